"""Each 95 % interval contains its metric, and covers the truth in 90 to 97 % of simulated sets."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from sklearn.metrics import f1_score, recall_score, roc_auc_score

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
    counted = (labels, labels[labels == best], best)
    metrics = {
        "top1": np.mean(labels == best),
        "top5": np.mean(is_among_5),
        "loss": np.mean(losses),
        **average_classes(np.stack([np.bincount(of, minlength=classes) for of in counted])),
    }
    if classes == 2:
        metrics["auroc"] = auroc(labels, scores)
    return metrics


def find_outside(metrics: dict, limits: dict) -> dict:
    """Return the intervals that do not contain their metric."""
    return {
        name: (metrics[name], interval)
        for name, interval in limits.items()
        if not interval.low <= metrics[name] <= interval.high
    }


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
    frequencies = decay ** torch.arange(classes)
    labels = torch.multinomial(
        frequencies.float(), SETS * samples, replacement=True, generator=generator
    ).view(size)
    if is_fixed:
        labels = labels[:1].expand(size)
    logits = torch.randn(*size, classes, generator=generator)
    logits.scatter_add_(2, labels[..., None], torch.full((*size, 1), signal))
    tally = Tally(torch.device("cpu"))
    tally.add(logits.flatten(0, 1), labels.flatten())
    with launched() as _:
        tally.sum_over_ranks()
    truth = tally.metrics
    found = []
    for answers, measured in zip(
        np.split(tally.answers, SETS, axis=1), np.split(tally.measured, SETS, axis=1), strict=True
    ):
        metrics = summarize(answers, measured, classes)
        found.append(intervals.measure_intervals(metrics, answers, measured))
        assert find_outside(metrics, found[-1]) == {}
    covered = {}
    for name in intervals.METHODS:
        if name in truth:
            within = [limits[name].low <= truth[name] <= limits[name].high for limits in found]
            covered[name] = np.mean(within)
    assert {"top1", "loss", "mean_recall", "macro_f1"} < covered.keys()
    if classes <= 5:  # of five classes, top-5 is always right
        assert covered.pop("top5") == 1
    assert {name: share for name, share in covered.items() if not 0.9 <= share <= 0.97} == {}


@pytest.mark.parametrize("per_class", [1, 2, 4])
def test_an_interval_of_small_classes_contains_its_metric(per_class):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(600).repeat_interleave(per_class)
    is_wrong = torch.rand(len(labels), generator=generator) < 0.25
    others = torch.randint(600, (len(labels),), generator=generator)
    logits = torch.nn.functional.one_hot(labels.where(~is_wrong, others), 600).float()
    with launched() as _:
        assert find_outside(*measure(9 * logits, labels)) == {}


@pytest.mark.parametrize("classes", [2, 3, 9])
@pytest.mark.parametrize("samples", [1, 18, 1000])
def test_an_interval_has_a_width_where_all_is_right_or_wrong(classes, samples):
    labels = torch.arange(samples) % classes
    right = torch.nn.functional.one_hot(labels, classes).float()
    for logits in (right, right.roll(1, 1)):
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
            # of Wilson's interval, about the rule of three: all right is 1 - 4 / samples to 1
            if metrics[name] in (0, 1):
                assert high - low == pytest.approx(3.8415 / (samples + 3.8415), rel=1e-3)


@pytest.mark.parametrize("right", [0, 7, 23])
def test_wilson_is_scipys(right):
    expected = binomtest(right, 23).proportion_ci(method="wilson")
    assert intervals.wilson_interval(right / 23, 23) == pytest.approx(tuple(expected), abs=1e-6)


def test_an_influence_is_the_derivative_of_scikit_learns_metric_by_a_samples_weight():
    generator = np.random.default_rng(0)
    labels = generator.integers(4, size=60)
    best = np.where(generator.random(60) < 0.6, labels, generator.integers(5, size=60))
    is_first = (labels > 1).astype(int)
    scores = is_first + generator.integers(4, size=60)
    cases = [
        (
            intervals.influence_on_recall(labels, best),
            lambda weights: recall_score(
                labels, best, labels=range(4), average="macro", sample_weight=weights
            ),
        ),
        (
            intervals.influence_on_f1(labels, best),
            lambda weights: f1_score(labels, best, average="macro", sample_weight=weights),
        ),
        (
            # of class 0, of the opposite sign
            intervals.influence_on_auroc(is_first, scores) * (2 * is_first - 1),
            lambda weights: roc_auc_score(is_first, scores, sample_weight=weights),
        ),
    ]
    for influences, metric in cases:
        step = 1e-4
        slopes = [
            (metric(np.ones(60) + step * unit) - metric(np.ones(60) - step * unit)) / (2 * step)
            for unit in np.eye(60)
        ]
        assert influences == pytest.approx(slopes, abs=1e-7)
        assert np.abs(influences).max() > 0.001


def test_an_answer_that_is_none_is_no_class():
    labels = np.array([0, 0, 1, 1])
    best = np.array([0, -1, 1, 1])
    # F1 of class 0 is 2 / 3, of class 1 it is 1
    assert intervals.influence_on_f1(labels, best) == pytest.approx([1 / 9, -1 / 9, 0, 0])
