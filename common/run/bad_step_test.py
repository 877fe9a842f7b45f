"""Steps that are not finite name themselves, and the image that has broken them."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
from PIL import Image
from torch import Tensor

from common.data.batch_augment import BatchAugment
from common.data.image_split import FolderSplit
from common.engine.step_optimizer import SkipCounter
from common.metrics.metrics_file import read_metrics
from common.run import train as train_module
from common.testing.parity_cases import CASES
from common.testing.ranks import run_ranks, slow
from common.testing.tape import TapeRecording
from common.testing.tiny_task import train, write_images
from common.tools import report

SETTINGS = [
    "TOTAL_BATCH_SIZE=16",
    "LOG.every=1",
    "CHECKPOINT_EVERY=2",
    "KEEP=9",
    "EVAL_EVERY=9",
]
HALF = "fp16=dict(mode=AMP_TYPE.TORCH, dtype='float16')"


class Broken(BatchAugment):
    """A transform that breaks an image without contrast, as dividing by its deviation does."""

    value = torch.nan

    def __call__(self, images: Tensor, labels: Tensor, *position: object) -> object:
        is_plain = images.flatten(2).std(2).sum(1) == 0
        images[is_plain] = self.value
        return super().__call__(images, labels, *position)


class Extreme(Broken):
    value = 3e38


def start(
    broken: type[Broken], images: Path, run: Path, settings: Sequence[str], *flags: str
) -> None:
    with mock.patch.object(train_module, "BatchAugment", broken):
        train(images, run, *settings, flags=flags)


def start_late(*args: object) -> None:
    """Start with counters that the host reads as a GPU's, not after every update."""
    build = SkipCounter.__init__

    def build_late(counter: SkipCounter, device: torch.device) -> None:
        build(counter, device)
        counter.every = 4

    with mock.patch.object(SkipCounter, "__init__", build_late):
        start(*args)


def start_recorded(*args: object) -> None:
    """Start with a CPU that records steps as a GPU does."""
    with mock.patch.dict("common.recording.RECORDINGS", cpu=TapeRecording):
        start_late(*args)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_images(tmp_path_factory.mktemp("images"))
    black = Image.new("RGB", (24, 20), "black")
    black.save(folder / "train" / "blue" / "odd.png")
    return folder


def noted(run: Path) -> list[dict]:
    return [record for record in read_metrics(run) if record["kind"] == "non_finite"]


@pytest.mark.parametrize(
    ("mode", "settings", "broken", "start"),
    [
        ("none", ["gradient_accumulation=2"], Broken, start),
        ("none", [], Extreme, start),
        ("none", [HALF], Broken, start),
        ("none", ["MIXUP=0.5"], Broken, start),
        ("none", [], Broken, start_late),
        ("dp2", [], Broken, start),
        slow("zero 3", [], Broken, start),
        slow("2d-4", [], Broken, start),
        slow("dp2 x 1d-2", [], Broken, start),
    ],
)
def test_the_planted_image_is_named_at_once_and_by_the_replay(
    mode, settings, broken, start, images, tmp_path, capfd
):
    gpus, options = CASES[mode]
    of_mode = [f"{key}={value}" for key, value in options.items()]
    settings = [*SETTINGS, *settings, *of_mode]
    is_blended = "MIXUP=0.5" in settings  # each image with another one
    run = tmp_path / "run"
    run_ranks(gpus, start, broken, images, run, settings)
    first, *_ = noted(run)
    said = capfd.readouterr().err
    where = r"micro-batch (\d) on rank (\d) is nan, the output for (\d) of \d+ images"
    words = rf"warning: step {first['step']}: the loss of {where} is not finite: (.*); the first "
    (found,) = re.findall(words, said)
    micro_batch, rank, count, names = found
    assert first["micro_batch"] == int(micro_batch)
    assert first["rank"] == int(rank)
    bad_images = 2 if is_blended else 1
    assert int(count) == bad_images
    assert len(names.split(", ")) == bad_images
    assert f"{images}/train/blue/odd.png" in names
    assert "; the first gradient, from the output back: head.bias. For more, add --replay" in said
    assert said.count("is not finite") == 1

    bad = noted(run)
    steps = ", ".join(str(record["step"]) for record in bad)
    closing = f"warning: {len(bad)} steps were not finite and changed nothing: {steps}; "
    assert closing + "metrics.jsonl has their images" in said
    for record in bad:
        assert any("blue/odd.png" in image for image in record["images"])
    if HALF not in settings:  # whose loss scale skips steps too
        assert [record["step"] for record in bad] == steps_that_were_skipped(run)

    folder = tmp_path / "step"
    replay = ["--replay", str(first["step"]), "--replay-to", str(folder)]
    run_ranks(gpus, start, broken, images, run, settings, *replay)
    said = " ".join(capfd.readouterr().out.split())
    # Of the transform's: 3e38 is finite.
    inputs = "all images are finite" if broken is Extreme else "images that are not finite: "
    assert inputs in said
    assert re.search(r"; layers whose output is not: (\d+) of \d+, from the input on: \w", said)
    told = json.loads((folder / "step.json").read_text())
    planted = told["images"][0]
    if not is_blended:
        assert planted["image"].endswith("blue/odd.png")
    assert planted["micro_batch"] == int(micro_batch)
    report.main([str(run)])
    row = f"{len(bad)}, the first {first['step']}: {', '.join(first['images'][:2])}; see --replay "
    assert row in (run / "report.html").read_text()


def steps_that_were_skipped(run: Path) -> list[int]:
    """Return the steps in whose records the number of skipped updates has grown."""
    steps = []
    before = 0
    for record in read_metrics(run):
        if record["kind"] == "train":
            if record["skipped"] > before:
                steps.append(record["step"])
            before = record["skipped"]
    return steps


def test_a_failed_run_and_a_recorded_one_name_the_step(images, tmp_path, capfd):
    run = tmp_path / "run"
    with pytest.raises(RuntimeError) as error:
        run_ranks(1, start, Broken, images, run, [*SETTINGS, "MAX_SKIPPED=0"])
    (first,) = noted(run)
    step = first["step"]
    words = f"; the first step that was not finite was {step}: add --replay {step} to the command"
    assert words in str(error.value)
    capfd.readouterr()

    settings = [*SETTINGS, "GRAPHS=True", "NUM_EPOCHS=3"]
    run_ranks(1, start_recorded, Broken, images, tmp_path / "recorded", settings)
    (record,) = noted(tmp_path / "recorded")
    assert record["step"] == step
    said = capfd.readouterr().err
    words = f"warning: step {step}: the loss or a gradient is not finite: {images}/train/"
    assert words in said


def test_overflows_of_the_loss_scale_are_no_bad_steps(images, tmp_path, capfd):
    scale = "fp16=dict(mode=AMP_TYPE.TORCH, dtype='float16', init_scale=2.0**40)"
    settings = [*SETTINGS, scale, "MAX_SKIPPED=5"]
    with pytest.raises(RuntimeError, match="6 consecutive updates were skipped"):
        run_ranks(1, train, images, tmp_path / "run", *settings)
    assert not noted(tmp_path / "run")
    assert "is not finite" not in capfd.readouterr().err


def test_an_image_with_a_label_outside_is_named_and_left_out(images, tmp_path, capfd):
    read = FolderSplit.read

    def read_wrongly(split: FolderSplit, index: int) -> tuple:
        data, label = read(split, index)
        if split.path(index).name == "odd.png":
            label = 9
        return data, label

    run = tmp_path / "run"
    with mock.patch.object(FolderSplit, "read", read_wrongly):
        run_ranks(1, train, images, run, "MAX_STEPS=10", *SETTINGS)
    said = " ".join(capfd.readouterr().err.split())
    assert f"{images}/train/blue/odd.png: label 9, out of range for 7 classes" in said
    *records, _ = read_metrics(run)
    assert max(record["skipped"] for record in records) == 0
