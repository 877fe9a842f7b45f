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
from common.tools.calibration import calibrate, calibration_error, coverage, scale

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
    return np.average(np.abs(top1 - mean), weights=images[images > 0])


def test_the_calibration_error_is_the_formulas():
    # 0.95 and 0.97 share a bin: top-1 0.5, confidence 0.96; 0.4 is alone, and wrong
    found = calibration_error(np.array([True, False, False]), np.array([0.95, 0.97, 0.4]))
    assert found == pytest.approx(2 / 3 * 0.46 + 1 / 3 * 0.4)


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.5])
def test_temperature_and_error_are_scikit_learns(factor):
    """Fitted on a fifth, measured on the others."""
    logits, labels = draw(4000, factor)
    scaled = scale(logits, labels).numpy()
    found = calibrate(answers_of(logits, labels), scaled)
    assert (found.fitted, found.reported) == (800, 3200)
    order = epoch_order(4000, 0, 0)
    fitted, reported = order[:800], order[800:]
    theirs = CalibratedClassifierCV(FrozenEstimator(Logits()), method="temperature", ensemble=False)
    theirs.fit(logits[fitted].numpy(), labels[fitted].numpy())
    expected = 1 / theirs.calibrated_classifiers_[0].calibrators[0].beta_
    # to half a step of the grid, 5 %
    assert found.temperature == pytest.approx(expected, rel=0.03)
    is_right = (logits.argmax(1) == labels)[reported].numpy()
    for temperature, error in ((1, found.ece), (found.temperature, found.calibrated_ece)):
        confidence = (logits[reported] / temperature).softmax(1).amax(1).numpy()
        assert error == pytest.approx(weighted_gap(is_right, confidence), abs=2e-3)
    assert found.calibrated_ece < 0.04


def test_the_temperature_does_not_depend_on_what_is_reported():
    logits, labels = draw(1000, 2.5)
    found = []
    for _ in range(2):
        scaled = scale(logits, labels).numpy()
        found.append(calibrate(answers_of(logits, labels), scaled))
        labels[epoch_order(1000, 0, 0)[200:]] = 0  # of those that are reported
    assert found[0].temperature == found[1].temperature
    assert found[0].ece != found[1].ece


def test_coverage_is_that_of_scikit_learns_precision():
    random = np.random.default_rng(0)
    for samples in (1, 2, 20, 300):
        confidence = random.integers(0, 50, samples) / 50  # some are equal
        is_right = random.random(samples) < confidence**0.2
        precision, _, thresholds = precision_recall_curve(is_right, confidence)
        kept = [np.mean(confidence >= least) for least in thresholds[precision[:-1] >= 0.95]]
        assert coverage(is_right, confidence) == pytest.approx(max(kept, default=0))


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Path:
    """The folder of a data set with 315 images to evaluate."""
    with mock.patch.dict(tiny_task.SAMPLES, test=315):
        return write_images(tmp_path_factory.mktemp("many"))


def evaluated(output: Path) -> dict:
    return json.loads((output / "evaluation.json").read_text())


def main(*words: object) -> None:
    evaluate.main([*map(str, words)])


def test_the_split_is_that_of_any_number_of_processes(run, many, tmp_path, capfd):
    pictures, labels = zip(*ImageFolder(many / "test"), strict=True)
    logits = timm_logits(run, pictures)
    for ranks in (1, 2):
        words = "--data", many, "--output", tmp_path / f"{ranks}", "--set=MICRO_BATCH_SIZE=32"
        run_ranks(ranks, main, run, *words)
    one, two = (evaluated(tmp_path / name)["calibration"] for name in "12")
    assert two == pytest.approx(one)
    assert (one["fitted"], one["reported"]) == (63, 252)
    reported = epoch_order(315, 0, 0)[63:]
    is_right = (logits.argmax(1) == torch.tensor(labels))[reported].numpy()
    for temperature, name in ((1, "ece"), (one["temperature"], "calibrated_ece")):
        confidence = (logits[reported] / temperature).softmax(1).amax(1).numpy()
        assert one[name] == pytest.approx(weighted_gap(is_right, confidence), abs=2e-3)
    said = " ".join(capfd.readouterr().out.split())
    line = (
        f"confidence ECE {one['ece']:.4f} on 252 images, {one['calibrated_ece']:.4f} with "
        f"--temperature {one['temperature']} of predict.py and export.py, fitted on 63 others"
    )
    assert said.count(f"{line} (seed 0) labels") == 2
    rows = list(csv.DictReader((tmp_path / "1/classes.csv").read_text().splitlines()))
    answers = logits.argmax(1).numpy()
    confidence = logits.softmax(1).amax(1).numpy()
    for label, row in enumerate(rows):
        kept = answers == label
        if not kept.any():
            assert row["coverage at 95 %"] == ""
            continue
        expected = coverage(np.array(labels)[kept] == label, confidence[kept])
        assert float(row["coverage at 95 %"]) == pytest.approx(expected, abs=1e-4)


def test_few_images_fit_no_temperature(run, tmp_path, capsys):
    main(run, "--output", tmp_path)
    found = evaluated(tmp_path)["calibration"]
    assert (found["temperature"], found["fitted"], found["reported"]) == (None, 0, 45)
    said = " ".join(capsys.readouterr().out.split())
    assert f"ECE {found['ece']:.4f} on 45 images; too few to fit a temperature, which" in said


def test_predictions_carry_the_temperature(run, data, capsys):
    images = ImageFolder(data / "test")
    (picture, _), (path, _) = images[0], images.samples[0]
    expected = (timm_logits(run, [picture])[0] / 0.25).softmax(0)
    predict.main([str(run), path, "--json", "--temperature", "0.25"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["temperature"] == 0.25
    for best in answer["classes"]:
        assert best["probability"] == pytest.approx(expected[best["label"]].item(), abs=1e-5)
    predict.main([str(run), path, "--temperature", "0.25"])
    assert "; temperature 0.25)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "command", [predict.main, lambda words: export.main([*words, "--to=timm"])]
)
def test_a_temperature_that_divides_by_nothing_is_refused(command, run, data):
    image = data / "test"
    words = [run, *([image] if command is predict.main else []), "--temperature=0"]
    refused = run_forked(command, words, code=2).stderr
    assert "argument --temperature: 0: expected a number > 0" in refused
