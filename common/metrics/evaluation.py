"""What an evaluation measures, and which of two is better.

The counts of all samples by class suffice for each metric but AUROC, so that ranks add a few
numbers. scikit-learn would want every sample's answer; torchmetrics has states of its own for each.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.collectives import gather
from common.engine.upstream import ParallelMode, all_reduce


class Best(NamedTuple):
    """How good an evaluation is; the greater one is better."""

    score: float = -math.inf  # the metric of BEST, or the user's score
    negative_loss: float = 0.0  # decides between equal scores


def rank_evaluation(figures: Mapping[str, float | None], metric: str) -> Best:
    """Return how good an evaluation is by ``metric``, the config's BEST.

    One that is not finite, and {}, are no better than none, `Best()`.

    The ``score`` of a hook of the user's goes before the metric.
    """
    # with equal scores the loss decides alone
    default = 0.0 if metric == "loss" else figures.get(metric)
    score = figures.get("score", default)
    loss = figures.get("loss")
    if score is None or loss is None or not math.isfinite(score + loss):
        return Best()
    return Best(score, -loss)


def metric_value(figures: Mapping[str, float | None], metric: str) -> float:
    """Return a metric of an evaluation, NaN where it is missing or null."""
    value = figures.get(metric)
    return math.nan if value is None else value


def rank_repetitions(evaluations: Sequence[Mapping[str, float | None]], metric: str) -> Best:
    """Return how good the best evaluations of runs that differ only in their seeds are.

    These are the means of score and loss. Without any, or where `rank_evaluation` finds one no
    better than none, it is `Best()`.
    """
    ranks = [rank_evaluation(figures, metric) for figures in evaluations]
    if not ranks or Best() in ranks:
        return Best()
    return Best(*map(fmean, zip(*ranks, strict=True)))


class Counts:
    """The counts of an evaluation, on the device. Labels below 0, of padding, do not count."""

    def __init__(self, device: torch.device):
        # sum of cross-entropy, top-5 hits
        self.totals = torch.zeros(2, dtype=torch.float64, device=device)
        # samples, correct answers and answers [3, C + 1]; the last column is of what does not count
        self.by_class: Tensor | None = None
        self.scored: list[Tensor] = []  # of two classes, labels and scores [2, B] of each batch

    def add(self, logits_BC: Tensor, labels_B: Tensor) -> Tensor:
        """Count a batch; return its most probable classes, as `best_classes`."""
        loss = F.cross_entropy(logits_BC.float(), labels_B, reduction="sum")
        best_BK = best_classes(logits_BC)
        # [B, K]: the first column is of top-1, at most one of a row is true
        hits_BK = best_BK == labels_B[:, None]
        is_valid_B = labels_B >= 0
        top5_hits = hits_BK.sum()
        self.totals += torch.stack([loss.double(), top5_hits])
        classes = logits_BC.shape[1]
        if self.by_class is None:
            self.by_class = self.totals.new_zeros(3, classes + 1)
        # index_add_ and not bincount, for which the host would wait for a GPU.
        ones_B = self.totals.new_ones(len(labels_B))
        answers_B = best_BK[:, 0].where(is_valid_B, -1)
        right_B = labels_B.where(hits_BK[:, 0], -1)
        counted = (labels_B, right_B, answers_B)
        for row, classes_B in zip(self.by_class, counted, strict=True):
            columns_B = classes_B.where(classes_B >= 0, classes)
            row.index_add_(0, columns_B, ones_B)
        if classes == 2:
            # In float64: float32 would round close scores to ties, which count half in AUROC.
            logits_of_0, logits_of_1 = logits_BC.double().unbind(1)
            margins_B = logits_of_1 - logits_of_0
            self.scored.append(torch.stack([labels_B.double(), margins_B]))
        return best_BK

    def sum_over_ranks(self, mode: ParallelMode) -> dict[str, float]:
        """Return the metrics of the samples of all ranks of the group ``mode``.

        ``mean_recall`` is over the classes that have samples. ``macro_f1`` is also over those that
        are answered. ``auroc`` is of two classes only, and NaN where one has no samples.
        """
        assert self.by_class is not None
        # One all-reduce for all counts: small ones cost their latency.
        counts = torch.cat([self.totals, self.by_class.flatten()])
        sums = all_reduce(counts, mode).cpu()
        loss, top5 = sums[:2].tolist()
        sums_by_class = sums[2:].view_as(self.by_class)
        # Without the column of what does not count.
        counts_3C = sums_by_class[:, :-1].numpy()
        samples, right, _ = counts_3C.sum(1).tolist()
        metrics: dict[str, float] = {
            "loss": loss / samples,
            "top1": right / samples,
            "top5": top5 / samples,
        }
        metrics |= average_classes(counts_3C)
        if self.scored:
            # of all ranks: those of a tensor-parallel group repeat their samples equally often
            scored_2N = torch.cat(self.scored, dim=1)
            gathered = gather(scored_2N.cpu().numpy())
            labels, scores = np.concatenate(gathered, axis=1)
            is_valid = labels >= 0
            metrics["auroc"] = auroc(labels[is_valid], scores[is_valid])
        return metrics | {"samples": int(samples)}


def average_classes(counts_3C: np.ndarray) -> dict[str, float]:
    """Return ``mean_recall`` and ``macro_f1`` of samples, correct answers, answers by class."""
    samples_C, right_C, answers_C = counts_3C
    is_present_C = samples_C > 0
    # F1 = 2 TP / (2 TP + FP + FN), where the denominator is samples + answers.
    counted_C = samples_C + answers_C
    is_known_C = counted_C > 0
    # A class without samples has no recall: it would be 0 / 0.
    recall = right_C[is_present_C] / samples_C[is_present_C]
    f1 = 2 * right_C[is_known_C] / counted_C[is_known_C]
    return {
        "mean_recall": float(recall.mean()),
        "macro_f1": float(f1.mean()),
    }


def auroc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Return the probability that a sample of class 1 scores above one of class 0.

    Equal scores count half.
    """
    if np.isnan(scores).any():
        return math.nan
    # [V] different scores, and which of them each sample has [N]
    values, places = np.unique(scores, return_inverse=True)
    negatives, positives = (
        np.bincount(places[labels == label], minlength=len(values)) for label in (0, 1)
    )
    # the pairs of a sample of each class, and the negatives below each score [V]
    pairs = negatives.sum() * positives.sum()
    below = np.cumsum(negatives) - negatives
    ordered_pairs = positives @ (below + negatives / 2)
    return float(ordered_pairs / pairs) if pairs else math.nan


def best_classes(logits_BC: Tensor) -> Tensor:
    """Return the five most probable classes [B, K], K <= 5.

    They are -1 where the logits give no probabilities (NaN), so that no label equals them.
    """
    logits_BC = logits_BC.float()
    best_BK = logits_BC.topk(min(5, logits_BC.shape[1])).indices
    is_finite_B1 = logits_BC.logsumexp(1, keepdim=True).isfinite()
    return best_BK.where(is_finite_B1, -1)
