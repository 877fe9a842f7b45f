"""The metrics of an evaluation are scikit-learn's, on ranks that padding fills too."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score, recall_score, roc_auc_score

from common.engine.upstream import ParallelMode
from common.metrics.evaluation import Best, Counts, auroc, rank_repetitions
from common.testing.ranks import launched, run_ranks


def draw(classes: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits, some of which are equal, and labels of all classes but the last of many."""
    generator = torch.Generator().manual_seed(classes)
    logits = torch.randint(5, (samples, classes), generator=generator).float()
    # no two equal in a row, as whose class is then the first is not defined
    logits += torch.arange(classes) / 10
    known = max(2, classes - 1)
    labels = torch.randint(known, (samples,), generator=generator)
    return logits, labels


def measure(classes: int, samples: int, size: int) -> dict[str, float]:
    """Return the metrics on this rank of ``size``; its last samples are padding."""
    logits, labels = draw(classes, samples)
    padded = math.ceil(samples / size) * size
    with launched() as _:
        counts = Counts(torch.device("cpu"))
        rank = torch.distributed.get_rank()
        local = torch.arange(rank, padded, size)
        is_sample = local < samples
        rows = local % samples
        local_logits = logits[rows]
        local_labels = torch.where(is_sample, labels[rows], -100)
        batches = zip(local_logits.split(4), local_labels.split(4), strict=True)
        for batch, batch_labels in batches:
            counts.add(batch, batch_labels)
        return counts.sum_over_ranks(ParallelMode.DATA)


@pytest.mark.parametrize("classes", [2, 6])
@pytest.mark.parametrize("ranks", [1, 3])
def test_metrics_are_scikit_learns(classes, ranks):
    logits, labels = draw(classes, 23)
    chosen = logits.argmax(1)
    recalls = recall_score(labels, chosen, average=None, zero_division=np.nan)
    expected = {
        "top1": accuracy_score(labels, chosen),
        "loss": torch.nn.functional.cross_entropy(logits, labels).item(),
        "mean_recall": np.nanmean(recalls),
        "macro_f1": f1_score(labels, chosen, average="macro"),
        "samples": 23,
    }
    if classes == 2:
        scores = logits[:, 1] - logits[:, 0]
        expected["auroc"] = roc_auc_score(labels, scores)
    for metrics in run_ranks(ranks, measure, classes, 23, ranks):
        top5 = metrics.pop("top5")
        assert top5 >= metrics["top1"]
        assert metrics == pytest.approx(expected, rel=1e-6)


def test_repetitions_rank_by_their_means_and_the_loss_decides_between_equal_ones():
    a = {"top1": 0.75, "loss": 2.0}
    b = {"top1": 0.25, "loss": 1.0}
    c = {"top1": 0.5, "loss": 1.4}
    a_and_b = rank_repetitions([a, b], "top1")
    assert a_and_b == Best(0.5, -1.5)
    assert rank_repetitions([c], "top1") > a_and_b
    assert rank_repetitions([b, c], "loss") > rank_repetitions([a], "loss")


def test_the_score_of_a_users_hook_goes_before_the_metric():
    """As in checkpoints/best."""
    a = {"top1": 0.75, "loss": 2.0}
    b = {"top1": 0.25, "loss": 1.0, "score": 9.0}
    assert rank_repetitions([b], "top1") > rank_repetitions([a], "top1")


@pytest.mark.parametrize(
    "failed",
    [
        {},
        {"top1": 0.9, "loss": math.nan},
        {"loss": 1.0},
    ],
)
def test_a_repetition_without_a_finite_metric_makes_its_combination_no_better_than_none(failed):
    fine = {"top1": 0.5, "loss": 1.0}
    assert rank_repetitions([fine, failed], "top1") == Best()
    assert rank_repetitions([], "top1") == Best()


def test_an_auroc_that_is_not_defined_is_nan():
    of_one_class = auroc(labels=np.ones(3), scores=np.arange(3.0))
    of_nan = auroc(labels=np.arange(2), scores=np.array([0.0, math.nan]))
    assert math.isnan(of_one_class)
    assert math.isnan(of_nan)
