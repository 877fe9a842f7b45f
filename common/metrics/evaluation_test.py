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
    return logits, torch.randint(known, (samples,), generator=generator)


def measure(classes: int, samples: int, size: int) -> dict[str, float]:
    """Return the metrics on this rank of ``size``; its last samples are padding."""
    logits, labels = draw(classes, samples)
    with launched() as _:
        counts = Counts(torch.device("cpu"))
        rank = torch.distributed.get_rank()
        mine = torch.arange(rank, math.ceil(samples / size) * size, size)
        own_logits = logits[mine % samples].split(4)
        own_labels = torch.where(mine < samples, labels[mine % samples], -100).split(4)
        for batch, label in zip(own_logits, own_labels, strict=True):
            counts.add(batch, label)
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
        expected["auroc"] = roc_auc_score(labels, logits[:, 1] - logits[:, 0])
    for metrics in run_ranks(ranks, measure, classes, 23, ranks):
        assert metrics.pop("top5") >= metrics["top1"]
        assert metrics == pytest.approx(expected, rel=1e-6)


def test_repetitions_rank_by_their_means_and_the_loss_decides_between_equal_ones():
    measured = [(0.75, 2.0), (0.25, 1.0), (0.5, 1.4)]
    a, b, c = ({"top1": top1, "loss": loss} for top1, loss in measured)
    assert rank_repetitions([a, b], "top1") == Best(0.5, -1.5)
    assert rank_repetitions([c], "top1") > rank_repetitions([a, b], "top1")
    assert rank_repetitions([b, c], "loss") > rank_repetitions([a], "loss")
    # the score of a user's hook goes before the metric, as in checkpoints/best
    assert rank_repetitions([b | {"score": 9.0}], "top1") > rank_repetitions([a], "top1")


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
    assert rank_repetitions([fine, failed], "top1") == rank_repetitions([], "top1") == Best()


def test_an_auroc_that_is_not_defined_is_nan():
    assert math.isnan(auroc(np.ones(3), np.arange(3.0)))
    assert math.isnan(auroc(np.arange(2), np.array([0.0, math.nan])))
