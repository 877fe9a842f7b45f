"""Each 95 % interval contains its metric, and covers the truth in 90 to 97 % of simulated sets."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from sklearn.metrics import f1_score, recall_score, roc_auc_score
from torch.nn.functional import one_hot

from common.metrics.evaluation import auroc, average_classes
from common.testing.ranks import launched
from common.tools import calibration, intervals
from common.tools.evaluate import Tally

SETS = 500  # of which the coverage's standard deviation is 1 %


def measure(logits: torch.Tensor, labels: torch.Tensor) -> tuple[dict, dict]:
    """Return the metrics of an evaluation and their intervals; needs a process group."""
    tally = Tally(torch.device("cpu"))
    tally.add(logits, labels)
    tally.sum_over_ranks()
    return tally.metrics, intervals.measure_intervals(tally.metrics, tally.answers, tally.measured)


def summarize(answers: np.ndarray, measured: np.ndarray, classes: int) -> dict:
    """Return the metrics of a set."""
    labels, best, is_among_5 = answers
    losses, scores = measured
    is_right = labels == best
    counts = [
        np.bincount(labels, minlength=classes),
        np.bincount(labels[is_right], minlength=classes),
        np.bincount(best, minlength=classes),
    ]
    metrics = {
        "top1": np.mean(is_right),
        "top5": np.mean(is_among_5),
        "loss": np.mean(losses),
        **average_classes(np.stack(counts)),
    }
    if classes == 2:
        metrics["auroc"] = auroc(labels, scores)
    return metrics


def find_outside(metrics: dict, limits: dict) -> dict:
    """Return the intervals that do not contain their metric."""
    outside = {}
    for name, interval in limits.items():
        value = metrics[name]
        if not interval.low <= value <= interval.high:
            outside[name] = value, interval
    return outside


def share_within(value: float, found: list[intervals.Interval]) -> float:
    """Return the share of the intervals that contain the value."""
    is_within = [interval.low <= value <= interval.high for interval in found]
    return np.mean(is_within)


@pytest.mark.parametrize("is_fixed", [False, True], ids=["random labels", "fixed labels"])
@pytest.mark.parametrize(
    ("samples", "classes", "signal", "decay"),
    [
        (100, 2, 1.0, 1),
        (100, 2, 1.5, 0.5),
        (1000, 5, 1.5, 0.5),
        (1000, 5, 2.5, 1),
        (1000, 50, 1.5, 1),
        (1000, 50, 3.0, 0.98),
    ],
)
def test_coverage(samples, classes, signal, decay, is_fixed, monkeypatch):
    """Draw many sets of images of one population: how many intervals contain its metric?

    Each class has ``decay`` times the images of the one before.
    """
    monkeypatch.setattr(calibration, "TEMPERATURES", [1.0])  # 121 take most of the time
    generator = torch.Generator().manual_seed(classes)
    size = (SETS, samples)
    frequencies = (decay ** torch.arange(classes)).float()
    drawn = torch.multinomial(frequencies, SETS * samples, replacement=True, generator=generator)
    labels = drawn.view(size)
    if is_fixed:
        labels = labels[:1].expand(size)
    logits = torch.randn(*size, classes, generator=generator)
    logits.scatter_add_(2, labels[..., None], torch.full((*size, 1), signal))
    tally = Tally(torch.device("cpu"))
    tally.add(logits.flatten(0, 1), labels.flatten())
    with launched() as _:
        tally.sum_over_ranks()
    truth = tally.metrics
    answers_of_sets = np.split(tally.answers, SETS, axis=1)
    measured_of_sets = np.split(tally.measured, SETS, axis=1)
    found = []
    for answers, measured in zip(answers_of_sets, measured_of_sets, strict=True):
        metrics = summarize(answers, measured, classes)
        limits = intervals.measure_intervals(metrics, answers, measured)
        assert find_outside(metrics, limits) == {}
        found.append(limits)
    covered = {}
    for name in intervals.METHODS:
        if name in truth:
            of_sets = [limits[name] for limits in found]
            covered[name] = share_within(truth[name], of_sets)
    assert {"top1", "loss", "mean_recall", "macro_f1"} < covered.keys()
    if classes <= 5:  # of five classes, top-5 is always right
        assert covered.pop("top5") == 1
    for name, share in covered.items():
        assert 0.9 <= share <= 0.97, name


@pytest.mark.parametrize("per_class", [1, 2, 4])
def test_an_interval_of_small_classes_contains_its_metric(per_class):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(600).repeat_interleave(per_class)
    is_wrong = torch.rand(len(labels), generator=generator) < 0.25
    others = torch.randint(600, (len(labels),), generator=generator)
    answers = torch.where(is_wrong, others, labels)
    logits = 9 * one_hot(answers, 600).float()
    with launched() as _:
        metrics, limits = measure(logits, labels)
    assert find_outside(metrics, limits) == {}


@pytest.mark.parametrize("classes", [2, 3, 9])
@pytest.mark.parametrize("samples", [1, 18, 1000])
def test_an_interval_has_a_width_where_all_is_right_or_wrong(classes, samples):
    labels = torch.arange(samples) % classes
    right = one_hot(labels, classes).float()
    wrong = right.roll(1, 1)
    # of Wilson's interval, about the rule of three: all right is 1 - 4 / samples to 1
    width = 3.8415 / (samples + 3.8415)
    for logits in (right, wrong):
        with launched() as _:
            metrics, limits = measure(logits, labels)
        del metrics["samples"]
        # one class has no AUROC, one sample no variance of the loss
        if samples == 1:
            assert math.isnan(limits.pop("loss").low)
            if classes == 2:
                assert math.isnan(limits.pop("auroc").high)
        assert find_outside(metrics, limits) == {}
        assert {"top1", "mean_recall", "macro_f1"} <= limits.keys()
        for name, (low, high) in limits.items():
            if metrics[name] in (0, 1):
                assert high - low == pytest.approx(width, rel=1e-3)


@pytest.mark.parametrize("right", [0, 7, 23])
def test_wilson_is_scipys(right):
    expected = binomtest(right, 23).proportion_ci(method="wilson")
    low, high = intervals.wilson_interval(right / 23, 23)
    assert low == pytest.approx(expected.low, abs=1e-6)
    assert high == pytest.approx(expected.high, abs=1e-6)


def test_an_influence_is_the_derivative_of_scikit_learns_metric_by_a_samples_weight():
    generator = np.random.default_rng(0)
    labels = generator.integers(4, size=60)
    is_answer_right = generator.random(60) < 0.6
    best = np.where(is_answer_right, labels, generator.integers(5, size=60))
    is_first = (labels > 1).astype(int)
    scores = is_first + generator.integers(4, size=60)

    def recall(weights: np.ndarray) -> float:
        known = range(4)
        return recall_score(labels, best, labels=known, average="macro", sample_weight=weights)

    def f1(weights: np.ndarray) -> float:
        return f1_score(labels, best, average="macro", sample_weight=weights)

    def area(weights: np.ndarray) -> float:
        return roc_auc_score(is_first, scores, sample_weight=weights)

    # of class 0, of the opposite sign
    on_area = intervals.influence_on_auroc(is_first, scores) * (2 * is_first - 1)
    cases = [
        (intervals.influence_on_recall(labels, best), recall),
        (intervals.influence_on_f1(labels, best), f1),
        (on_area, area),
    ]
    for influences, metric in cases:
        slopes = slopes_by_weight(metric, samples=60)
        assert influences == pytest.approx(slopes, abs=1e-7)
        assert np.abs(influences).max() > 0.001


def slopes_by_weight(metric: Callable[[np.ndarray], float], samples: int) -> list[float]:
    """Return the metric's derivative by the weight of each sample, around weights of 1."""
    step = 1e-4
    slopes = []
    for unit in np.eye(samples):
        above = metric(1 + step * unit)
        below = metric(1 - step * unit)
        slopes.append((above - below) / (2 * step))
    return slopes


def test_an_answer_that_is_none_is_no_class():
    labels = np.array([0, 0, 1, 1])
    best = np.array([0, -1, 1, 1])
    # F1 of class 0 is 2 / 3, of class 1 it is 1
    expected = [1 / 9, -1 / 9, 0, 0]
    assert intervals.influence_on_f1(labels, best) == pytest.approx(expected)
