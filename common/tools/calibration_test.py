"""Confidences: against formulas, scikit-learn, and timm's logits, as a user sees them."""

import csv
import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.calibration import CalibratedClassifierCV, calibration_curve
from sklearn.frozen import FrozenEstimator
from sklearn.metrics import precision_recall_curve
from torchvision.datasets import ImageFolder

from common.data.sampler import epoch_order
from common.testing import tiny_task
from common.testing.commands import run_forked
from common.testing.ranks import run_ranks
from common.testing.tiny_task import timm_logits, write_images
from common.tools import evaluate, export, predict
from common.tools.calibration import (
    calibrate,
    calibration_error,
    chance_error,
    coverage,
    scale,
)

CLASSES = 10


class Logits(ClassifierMixin, BaseEstimator):
    """A classifier of scikit-learn whose samples are their own logits."""

    classes_ = np.arange(CLASSES)

    def fit(self, *_: object) -> "Logits":
        return self

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def decision_function(self, logits: np.ndarray) -> np.ndarray:
        return logits

    def predict(self, logits: np.ndarray) -> np.ndarray:
        return logits.argmax(1)


def draw(samples: int, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits that are ``factor`` times those by which labels are drawn, and the labels."""
    random = torch.Generator().manual_seed(0)
    right = 2 * torch.randn(samples, CLASSES, generator=random)
    labels = right.softmax(1).multinomial(1, generator=random)[:, 0]
    return factor * right, labels


def answers_of(logits: torch.Tensor, labels: torch.Tensor) -> np.ndarray:
    return torch.stack([labels, logits.argmax(1), labels]).numpy()


def weighted_gap(is_right: np.ndarray, confidence: np.ndarray) -> float:
    """Return the ECE by scikit-learn's reliability curve."""
    top1, mean = calibration_curve(is_right, confidence, n_bins=15)
    images, _ = np.histogram(confidence, 15, (0, 1))
    is_filled = images > 0
    gaps = np.abs(top1 - mean)
    return np.average(gaps, weights=images[is_filled])


def expected_error(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> float:
    """Return scikit-learn's ECE of logits divided by the temperature."""
    is_right = logits.argmax(1) == labels
    probabilities = (logits / temperature).softmax(1)
    confidence = probabilities.amax(1)
    return weighted_gap(is_right.numpy(), confidence.numpy())


def test_the_calibration_error_is_the_formulas():
    is_right = np.array([True, False, False])
    confidence = np.array([0.95, 0.97, 0.4])
    # 0.95 and 0.97 share a bin: top-1 0.5, confidence 0.96; 0.4 is alone, and wrong
    expected = 2 / 3 * 0.46 + 1 / 3 * 0.4
    found = calibration_error(is_right, confidence)
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("images", [300, 3000])
def test_chance_alone_gives_the_error_of_confidences_that_hold(images):
    """Against draws of right and wrong answers by their confidences."""
    random = np.random.default_rng(0)
    confidence = random.random(images) ** 0.25
    errors = []
    for _ in range(500):
        is_right = random.random(images) < confidence
        errors.append(calibration_error(is_right, confidence))
    assert chance_error(confidence) == pytest.approx(np.mean(errors), rel=0.05)


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.5])
def test_temperature_and_error_are_scikit_learns(factor):
    """Fitted on a fifth, measured on the others."""
    logits, labels = draw(4000, factor)
    scaled = scale(logits, labels).numpy()
    found = calibrate(answers_of(logits, labels), scaled)
    assert found.fitted == 800
    assert found.reported == 3200
    order = epoch_order(4000, 0, 0)
    fitted = order[:800]
    reported = order[800:]

    estimator = FrozenEstimator(Logits())
    theirs = CalibratedClassifierCV(estimator, method="temperature", ensemble=False)
    theirs.fit(logits[fitted].numpy(), labels[fitted].numpy())
    (classifier,) = theirs.calibrated_classifiers_
    (calibrator,) = classifier.calibrators
    # to half a step of the grid, 5 %
    assert found.temperature == pytest.approx(1 / calibrator.beta_, rel=0.03)

    ece = expected_error(logits[reported], labels[reported], 1)
    calibrated_ece = expected_error(logits[reported], labels[reported], found.temperature)
    assert found.ece == pytest.approx(ece, abs=2e-3)
    assert found.calibrated_ece == pytest.approx(calibrated_ece, abs=2e-3)
    assert found.calibrated_ece < 0.04
    confidence = (logits[reported] / found.temperature).softmax(1).amax(1)
    assert found.chance_ece == pytest.approx(chance_error(confidence.numpy()))


def test_the_temperature_does_not_depend_on_what_is_reported():
    logits, labels = draw(1000, 2.5)
    scaled = scale(logits, labels).numpy()
    first = calibrate(answers_of(logits, labels), scaled)

    reported = epoch_order(1000, 0, 0)[200:]
    labels[reported] = 0
    scaled = scale(logits, labels).numpy()
    second = calibrate(answers_of(logits, labels), scaled)

    assert second.temperature == first.temperature
    assert second.ece != first.ece


def test_coverage_is_that_of_scikit_learns_precision():
    random = np.random.default_rng(0)
    for samples in (1, 2, 20, 300):
        confidence = random.integers(0, 50, samples) / 50  # some are equal
        is_right = random.random(samples) < confidence**0.2
        precision, _, thresholds = precision_recall_curve(is_right, confidence)
        is_precise = precision[:-1] >= 0.95
        shares = [np.mean(confidence >= least) for least in thresholds[is_precise]]
        expected = max(shares, default=0)
        assert coverage(is_right, confidence) == pytest.approx(expected)


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Path:
    """The folder of a data set with 315 images to evaluate."""
    folder = tmp_path_factory.mktemp("many")
    with mock.patch.dict(tiny_task.SAMPLES, test=315):
        return write_images(folder)


def evaluated(output: Path) -> dict:
    """Return what an evaluation has written of confidences."""
    record = json.loads((output / "evaluation.json").read_text())
    return record["calibration"]


def printed(text: str) -> str:
    """Return the text without its line breaks and alignment."""
    return " ".join(text.split())


def main(*words: object) -> None:
    evaluate.main([*map(str, words)])


def test_the_split_is_that_of_any_number_of_processes(run, many, tmp_path, capfd):
    pictures, labels = zip(*ImageFolder(many / "test"), strict=True)
    labels = torch.tensor(labels)
    logits = timm_logits(run, pictures)
    words = ["--data", many, "--set=MICRO_BATCH_SIZE=32"]
    run_ranks(1, main, run, *words, "--output", tmp_path / "1")
    run_ranks(2, main, run, *words, "--output", tmp_path / "2")

    one = evaluated(tmp_path / "1")
    two = evaluated(tmp_path / "2")
    assert two == pytest.approx(one)
    assert one["fitted"] == 63
    assert one["reported"] == 252
    reported = epoch_order(315, 0, 0)[63:]
    ece = expected_error(logits[reported], labels[reported], 1)
    calibrated_ece = expected_error(logits[reported], labels[reported], one["temperature"])
    assert one["ece"] == pytest.approx(ece, abs=2e-3)
    assert one["calibrated_ece"] == pytest.approx(calibrated_ece, abs=2e-3)

    said = printed(capfd.readouterr().out)
    low = abs(one["bias"])
    line = (
        f"confidence too low by {low:.4f} on average; ECE {one['ece']:.4f} on 252 images, "
        f"{one['calibrated_ece']:.4f} with --temperature {one['temperature']} "
        "of predict.py and export.py, fitted on 63 others"
    )
    chance = f"chance alone gives {one['chance_ece']:.4f}"
    assert said.count(f"{line} (seed 0); {chance} labels") == 2

    table = (tmp_path / "1" / "classes.csv").read_text()
    rows = list(csv.DictReader(table.splitlines()))
    answers = logits.argmax(1)
    confidence = logits.softmax(1).amax(1)
    for label, row in enumerate(rows):
        kept = answers == label
        if not kept.any():
            assert row["coverage at 95 %"] == ""
            continue
        is_right = labels[kept] == label
        expected = coverage(is_right.numpy(), confidence[kept].numpy())
        assert float(row["coverage at 95 %"]) == pytest.approx(expected, abs=1e-4)


def test_few_images_fit_no_temperature(run, tmp_path, capsys):
    main(run, "--output", tmp_path)
    found = evaluated(tmp_path)
    assert found["temperature"] is None
    assert found["fitted"] == 0
    assert found["reported"] == 45
    said = printed(capsys.readouterr().out)
    line = f"ECE {found['ece']:.4f} on 45 images, chance alone gives {found['chance_ece']:.4f}"
    assert f"{line}; a temperature takes 250 unseen images" in said


def test_predictions_carry_the_temperature(run, data, capsys):
    images = ImageFolder(data / "test")
    picture, _ = images[0]
    path, _ = images.samples[0]
    (logits,) = timm_logits(run, [picture])
    expected = (logits / 0.25).softmax(0)
    predict.main([str(run), path, "--json", "--temperature", "0.25"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["temperature"] == 0.25
    for best in answer["classes"]:
        probability = expected[best["label"]].item()
        assert best["probability"] == pytest.approx(probability, abs=1e-5)
    predict.main([str(run), path, "--temperature", "0.25"])
    assert "; temperature 0.25)" in printed(capsys.readouterr().out)


def test_the_temperature_of_an_export_is_not_applied_twice(run, data, tmp_path, capsys):
    output = tmp_path / "exported"
    export_to_timm([str(run), "--temperature=0.25", f"--output={output}"])
    assert f"{output.name}, logits divided by 0.25" in printed(capsys.readouterr().out)
    picture = ImageFolder(data / "test").samples[0][0]
    refused = run_forked(predict.main, [output, picture, "--temperature=0.25"], code=2).stderr
    assert f"of {output} by 0.25 already: leave it out" in printed(refused)


def export_to_timm(words: list[str]) -> None:
    export.main([*words, "--to=timm"])


@pytest.mark.parametrize(
    ("command", "positions"),
    [
        (predict.main, ["image.png"]),
        (export_to_timm, []),
    ],
)
def test_a_temperature_that_divides_by_nothing_is_refused(command, positions, run):
    words = [run, *positions, "--temperature=0"]
    refused = run_forked(command, words, code=2).stderr
    assert "argument --temperature: 0: expected a number > 0" in refused
