"""The 95 % intervals of an evaluation's metrics, each of which contains its metric.

The images count as a random sample. A share has Wilson's score interval, which has a width where
all answers are right. A mean over classes has it too, and AUROC, with the effective number of
samples: as many as give a share of this value the metric's variance (Franco et al., J. Surv. Stat.
Methodol. 7, 2019). The variance is the sum of squared influences of the samples (delta method; of
macro F1 as Takahashi et al., Appl. Intell. 52, 2022; of AUROC as DeLong et al., Biometrics 44,
1988). Bootstrap percentiles do not contain macro F1 where classes are small: a resample repeats
some of their images and lacks others.

Shape suffixes: N samples, C classes, P samples of class 1, M samples of class 0.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

NORMAL_95 = 1.959964  # the normal distribution's quantile of 97.5 %
METHODS = {
    "top1": "Wilson",
    "top5": "Wilson",
    "loss": "Hall",
    "mean_recall": "Wilson, delta method",
    "macro_f1": "Wilson, delta method",
    "auroc": "Wilson, DeLong",
}


class Interval(NamedTuple):
    """The limits of a confidence interval of 95 %."""

    low: float
    high: float


UNKNOWN = Interval(math.nan, math.nan)


def measure_intervals(
    metrics: Mapping[str, float], answers: np.ndarray, measured: np.ndarray
) -> dict[str, Interval]:
    """Return the interval of each of `METHODS` that ``metrics`` has, by name.

    ``answers`` [3, N]: as in `describe_classes`; ``measured`` [2, N]: the losses, and the scores of
    class 1 of two.
    """
    labels_N, best_N, _ = answers
    losses_N, scores_N = measured
    samples = len(labels_N)
    influences = {
        "mean_recall": influence_on_recall(labels_N, best_N),
        "macro_f1": influence_on_f1(labels_N, best_N),
    }
    intervals = {name: wilson_interval(metrics[name], samples) for name in ("top1", "top5")}
    intervals["loss"] = mean_interval(metrics["loss"], losses_N)
    if "auroc" in metrics:
        intervals["auroc"] = UNKNOWN
        if math.isfinite(metrics["auroc"]):
            influences["auroc"] = influence_on_auroc(labels_N, scores_N)
    for name, influence_N in influences.items():
        intervals[name] = class_interval(metrics[name], influence_N, labels_N)
    return {name: intervals[name] for name in METHODS if name in intervals}


def wilson_interval(share: float, samples: float) -> Interval:
    """Return Wilson's score interval of a share of ``samples``."""
    # The normal approximation would have no width where all answers are right.
    spread = NORMAL_95**2 / samples
    middle = share + spread / 2
    half = NORMAL_95 * math.sqrt(share * (1 - share) / samples + spread / (4 * samples))
    low = (middle - half) / (1 + spread)
    high = (middle + half) / (1 + spread)
    # rounding must not exclude the share, nor go beyond 0 and 1
    return Interval(max(0.0, min(share, low)), min(1.0, max(share, high)))


def class_interval(mean: float, influence_N: np.ndarray, labels_N: np.ndarray) -> Interval:
    """Return the interval of a mean over classes; an influence is what a sample has added to it."""
    samples_C = np.unique(labels_N, return_counts=True)[1]
    classes = len(samples_C)
    # One degree of freedom more for each class: a class of one sample has no variance of its own.
    unseen = mean * (1 - mean) * (samples_C**-2.0).sum() / classes**2
    variance = float((influence_N**2).sum() + unseen)
    # the number if all classes had the same variance
    alike = classes**2 / (1 / samples_C).sum()
    # One sample's variance is added to both: where no answer is wrong, this is ``alike``.
    effective = (mean * (1 - mean) + 1 / alike) / (variance + 1 / alike**2)
    return wilson_interval(mean, effective)


def mean_interval(mean: float, values_N: np.ndarray) -> Interval:
    """Return Hall's interval of the ``mean`` of values (J. R. Stat. Soc. B 54, 1992), at least 0.

    It allows for skewness: a few wrong answers make up most of the loss of a good model.
    """
    if len(values_N) < 2 or not math.isfinite(mean):
        return UNKNOWN
    deviations_N = values_N - values_N.mean()
    deviation = math.sqrt((deviations_N**2).mean())
    if not deviation:
        return Interval(mean, mean)
    error = deviation / math.sqrt(len(values_N) - 1)
    skewness = (deviations_N**3).mean() / deviation**3 / math.sqrt(len(values_N))
    low, high = (
        float(mean - error * _correct_quantile(quantile, skewness))
        for quantile in (NORMAL_95, -NORMAL_95)
    )
    return Interval(max(0.0, low), high)


def _correct_quantile(quantile: float, skewness: float) -> float:
    """Return the quantile of a mean that has the standardised ``skewness``."""
    shifted = quantile - skewness / 6
    # the limit, where rounding would decide
    if abs(skewness) < 1e-6:
        return shifted
    return 3 / skewness * (np.cbrt(1 + skewness * shifted) - 1)


def influence_on_recall(labels_N: np.ndarray, best_N: np.ndarray) -> np.ndarray:
    """Return the influence of each sample on the mean recall."""
    is_right_N = labels_N == best_N
    samples_C = np.bincount(labels_N)
    recall_C = np.bincount(labels_N, is_right_N) / np.maximum(samples_C, 1)
    known = np.count_nonzero(samples_C)
    return (is_right_N - recall_C[labels_N]) / samples_C[labels_N] / known


def influence_on_f1(labels_N: np.ndarray, best_N: np.ndarray) -> np.ndarray:
    """Return the influence of each sample on the macro F1; an answer of -1 is none."""
    is_right_N = labels_N == best_N
    classes = max(labels_N.max(), best_N.max()) + 1
    counts_C = np.bincount(labels_N, minlength=classes)
    counts_C += np.bincount(best_N[best_N >= 0], minlength=classes)
    known = np.count_nonzero(counts_C)
    # The last column is of answer -1.
    counts_C = np.append(np.maximum(counts_C, 1), 1)
    # F1 = 2 TP / (samples + answers)
    f1_C = 2 * np.bincount(labels_N, is_right_N, minlength=classes + 1) / counts_C
    share_C = f1_C / counts_C
    return (2 * is_right_N / counts_C[labels_N] - share_C[labels_N] - share_C[best_N]) / known


def influence_on_auroc(labels_N: np.ndarray, scores_N: np.ndarray) -> np.ndarray:
    """Return the influence of each sample on the AUROC."""
    influence_N = np.zeros(len(labels_N))
    for label in (0, 1):
        is_own_N = labels_N == label
        own = scores_N[is_own_N]
        others = np.sort(scores_N[~is_own_N])
        # the share of the others below each, with half of the equal ones
        below = np.searchsorted(others, own, "left") + np.searchsorted(others, own, "right")
        share = below / (2 * len(others))
        deviation = share - share.mean()
        influence_N[is_own_N] = deviation / len(own)
    return influence_N
