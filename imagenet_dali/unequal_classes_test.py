"""Classes of unequal size, as a user trains on them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import UserError
from common.metrics.metrics_file import read_metrics
from imagenet_dali.testing import train, write_images

COUNTS = {"ape": 40, "bee": 3, "cat": 10}
Start = Callable[..., None]
BALANCED = "DATA.sampling=balanced"


@pytest.fixture
def start(tmp_path) -> Start:
    """Return what trains on the classes with some settings, into a folder of ``tmp_path``."""
    for split in ("train", "val"):
        for name, count in COUNTS.items():
            write_images(tmp_path / "images" / split, count, [name])

    def start(output: str, *settings: str, **options: tuple[str, ...]) -> None:
        train(
            tmp_path,
            output,
            f"DATA.root={tmp_path / 'images'}",
            "DATA.loader=torchvision",
            "DATA.workers=0",
            *settings,
            **options,
        )

    return start


def losses(output: Path) -> list[float]:
    result = []
    for record in read_metrics(output):
        if record["kind"] == "train":
            result.append(record["loss"])
    return result


@pytest.mark.parametrize(
    ("setting", "weights"),
    [
        # 53 images / 3 classes / 40 and 3 images
        ("balanced", "0.44 to 5.9"),
        # 1 - 0.999^40 and 1 - 0.999^3, of the same mean
        ("effective", "0.45 to 5.8"),
    ],
)
def test_a_plan_says_the_counts_and_the_weights(setting, weights, start, capsys):
    start("planned", f"CLASS_WEIGHTS={setting}", flags=("--dry-run",))
    said = capsys.readouterr().out
    assert "images by class        bee 3, cat 10, ape 40\n" in said
    assert f"CLASS_WEIGHTS          {weights} in the training loss" in said


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (
            "[1,2]",
            r"^CLASS_WEIGHTS has 2 numbers: .* each of the 3 classes",
        ),
        (
            "[0,0,0]",
            r"^CLASS_WEIGHTS=\[0, 0, 0\]: all 0, so nothing would be trained; raise one",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights, message, start):
    with pytest.raises(UserError, match=message):
        start("refused", f"CLASS_WEIGHTS={weights}")


def test_the_loss_has_the_weights(start, tmp_path):
    start("run", "CLASS_WEIGHTS=[1e-9,1e-9,1e-9]")
    assert max(losses(tmp_path / "run")) < 1e-8


def test_classes_are_drawn_equally_often_in_a_resumed_run_too(start, tmp_path, capsys):
    start("whole", BALANCED)
    assert "\nimages by class: bee 3, cat 10, ape 40\n" in capsys.readouterr().out
    whole = losses(tmp_path / "whole")
    start("other")
    assert losses(tmp_path / "other") != whole
    start("parts", BALANCED, "MAX_STEPS=4")
    assert losses(tmp_path / "parts") == whole[:2]
    start("parts", BALANCED)
    assert losses(tmp_path / "parts") == whole
