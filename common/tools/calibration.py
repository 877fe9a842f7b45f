"""Whether the confidences of an evaluation hold: calibration error, temperature, coverage.

A confidence is the probability of the answer. The expected calibration error (ECE) of images is the
mean gap between confidence and top-1 in 15 equal bins of confidence, by images. A temperature, by
which logits are divided before the softmax, changes confidences and no answer (arXiv 1706.04599).

Shape suffixes: N images, B of a batch, T temperatures, C classes.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common.data.sampler import epoch_order
from common.metrics.plot import build_figure, save_figure

BINS = 15
# A grid, as the logits of all images of 21,843 classes would take gigabytes. Numbers as printed.
TEMPERATURES = [float(f"{1.05**power:.3g}") for power in range(-60, 61)]
AS_IT_IS = TEMPERATURES.index(1.0)
FITTED = 5  # one image in so many fits the temperature
FEWEST = 50  # of these
SEED = 0
PRECISION = 0.95


def scale(logits_BC: Tensor, labels_B: Tensor) -> Tensor:
    """Return losses and confidences [2, T, B] at each of `TEMPERATURES`; labels below 0 are any."""
    logits_BC = logits_BC.float()
    best_B = logits_BC.amax(1)
    right_B = logits_BC.gather(1, labels_B.clamp(min=0)[:, None])[:, 0]
    rows = []
    for temperature in TEMPERATURES:
        total_B = (logits_BC / temperature).logsumexp(1)
        confidence_B = (best_B / temperature - total_B).exp()
        rows.append(torch.stack([total_B - right_B / temperature, confidence_B]))
    return torch.stack(rows, 1)


@dataclass
class Calibration:
    """``ece`` is of ``reported`` images; ``calibrated_ece`` of the same, at the ``temperature``
    that was fitted on ``fitted`` others, if any. ``chance_ece`` is the mean ECE of so many images
    whose confidences hold, at that temperature. It is not 0.
    """

    ece: float
    reported: int
    bias: float  # the mean confidence of these images less their top-1
    chance_ece: float
    fitted: int = 0
    temperature: float | None = None
    calibrated_ece: float | None = None

    def __str__(self) -> str:
        side = "high" if self.bias > 0 else "low"
        ece = (
            f"too {side} by {abs(self.bias):.4f} on average; ECE {self.ece:.4f} on "
            f"{self.reported:,} images"
        )
        chance = f"chance alone gives {self.chance_ece:.4f}"
        if self.temperature is None:
            return f"{ece}, {chance}; a temperature takes {FITTED * FEWEST} unseen images"
        return (
            f"{ece}, {self.calibrated_ece:.4f} with --temperature {self.temperature} of predict.py "
            f"and export.py, fitted on {self.fitted:,} others (seed {SEED}); {chance}"
        )


def calibrate(answers: np.ndarray, scaled: np.ndarray) -> Calibration:
    """Fit a temperature on a fifth of the images, and measure on the others.

    ``answers`` [3, N]: as in `describe_classes`; ``scaled`` [2, T, N]: of `scale`.
    """
    is_right_N = answers[0] == answers[1]
    losses_TN, confidences_TN = scaled
    fitted, reported = _split(answers)

    confidence = confidences_TN[AS_IT_IS, reported]
    ece = calibration_error(is_right_N[reported], confidence)
    bias = float(np.mean(confidence - is_right_N[reported])) if len(reported) else 0.0
    result = Calibration(ece, len(reported), bias, chance_error(confidence), len(fitted))
    if result.fitted:
        best = losses_TN[:, fitted].mean(1).argmin()
        confidence = confidences_TN[best, reported]
        result.temperature = TEMPERATURES[best]
        result.calibrated_ece = calibration_error(is_right_N[reported], confidence)
        result.chance_ece = chance_error(confidence)
    return result


def _split(answers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which images fit the temperature, and which report; none fit if they are too few."""
    # Without an answer (NaN) there is no confidence.
    known = np.flatnonzero(answers[1] >= 0)
    images = known[epoch_order(len(known), SEED, 0)]
    count = len(images) // FITTED
    if count < FEWEST:
        count = 0
    return images[:count], images[count:]


def calibration_error(is_right_N: np.ndarray, confidence_N: np.ndarray) -> float:
    """Return the ECE of answers, 0 of none."""
    gaps = _sum_bins(confidence_N, confidence_N - is_right_N)
    return float(np.abs(gaps).sum() / max(1, len(confidence_N)))


def chance_error(confidence_N: np.ndarray) -> float:
    """Return the mean ECE of answers that are right as often as their confidences say."""
    variances = _sum_bins(confidence_N, confidence_N * (1 - confidence_N))
    # A bin's sum is about normal. The mean of |x|, for a normal x of variance v: sqrt(2 v / pi).
    return float(np.sqrt(2 / np.pi * variances).sum() / max(1, len(confidence_N)))


def coverage(is_right_N: np.ndarray, confidence_N: np.ndarray) -> float:
    """Return the largest share of answers, the most confident ones, of which 95 % are right."""
    order = np.argsort(-confidence_N)
    shares = np.cumsum(is_right_N[order]) / np.arange(1, len(order) + 1)
    # Answers of equal confidence are kept together.
    is_last = np.append(np.diff(confidence_N[order]) != 0, True)
    kept = np.flatnonzero(is_last & (shares >= PRECISION))
    return (kept[-1] + 1) / len(order) if len(kept) else 0.0


def _sum_bins(confidence_N: np.ndarray, values_N: np.ndarray) -> np.ndarray:
    """Return the sum of values in each bin of confidence."""
    bins = np.minimum((confidence_N * BINS).astype(int), BINS - 1)
    return np.bincount(bins, values_N, BINS)


def draw_reliability(
    answers: np.ndarray, scaled: np.ndarray, calibration: Calibration, path: Path
) -> None:
    """Draw top-1 by confidence; the area of a point is the share of the images in its bin."""
    _, reported = _split(answers)
    is_right = (answers[0] == answers[1])[reported]
    curves = {1.0: calibration.ece, calibration.temperature: calibration.calibrated_ece}
    figure, axes = build_figure(5.5, 5.0)
    axes.plot([0, 1], [0, 1], "--", color="grey", label="top-1 = confidence")
    for temperature, ece in curves.items():
        if temperature is None:
            continue
        confidence = scaled[1, TEMPERATURES.index(temperature), reported]
        images, right, total = (
            _sum_bins(confidence, values)
            for values in (np.ones(len(reported)), is_right, confidence)
        )
        filled = images > 0
        points = total[filled] / images[filled], right[filled] / images[filled]
        (line,) = axes.plot(*points, label=f"temperature {temperature:g}: ECE {ece:.4f}")
        sizes = 600 * images[filled] / len(reported)
        axes.scatter(*points, sizes, color=line.get_color())
    axes.set(xlabel="confidence", ylabel="top-1", title=f"Reliability, {len(reported):,} images")
    axes.legend(loc="upper left")
    save_figure(figure, path)
