"""A step of a run is taken again, to the bit, and said to be what was planted in it."""

import json
import math
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from common.metrics.metrics_file import read_metrics
from common.run.replay import describe_activations
from common.run.train import train as train_on
from common.testing.commands import in_words, read_folder, run_forked
from common.testing.parity_cases import CASES
from common.testing.ranks import run_ranks, slow
from common.testing.tiny_task import TASK, train, write_images
from common.text import counted

# Twelve steps of 16 images: of 16 pixels in the first epoch, then of 24.
SETTINGS = [
    "TOTAL_BATCH_SIZE=16",
    "NUM_EPOCHS=3",
    "gradient_accumulation=1",
    "LOG.every=1",
    "CHECKPOINT_EVERY=4",
    "EVAL_EVERY=1",
    "KEEP=9",
    "MODEL.dropout=0.1",
    "MODEL.image_size=24",
    "IMAGE_SIZES=[(1, 16)]",
    "MIXUP=0.5",
    "EMA=0.9",
    "clip_grad_norm=0.5",
]
HALF = "fp16=dict(mode=AMP_TYPE.TORCH, dtype='float16')"
ROWS = [
    ("none", ["gradient_accumulation=2"]),
    ("none", [HALF]),
    ("dp2", []),
    slow("dp4", []),
    slow("zero 3", []),
    slow("2d-4", []),
    slow("3d-8", []),
]
RANDOM_ROWS = [
    ("none", [HALF]),
    ("dp2", []),
    ("2d-4", []),
    ("zero 3", []),
]


def start(images: Path, run: Path, settings: Sequence[str], flags: Sequence[str] = ()) -> None:
    train(images, run, *settings, flags=flags)


def settings_of(mode: str, settings: Sequence[str]) -> tuple[int, list[str]]:
    """Return the number of processes and the settings of a row."""
    gpus, options = (4, {}) if mode == "dp4" else CASES[mode]
    of_mode = [f"{key}={value}" for key, value in options.items()]
    return gpus, [*SETTINGS, *settings, *of_mode]


def printed(capfd: pytest.CaptureFixture[str]) -> str:
    """Return the standard output since the last call, as one line."""
    return " ".join(capfd.readouterr().out.split())


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def run(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    run_ranks(1, start, images, folder, SETTINGS)
    return folder


@pytest.mark.parametrize(("mode", "settings"), ROWS)
def test_steps_are_replayed_to_the_bit_and_nothing_is_written(
    mode, settings, images, tmp_path, capfd
):
    gpus, settings = settings_of(mode, settings)
    run = tmp_path / "run"
    run_ranks(gpus, start, images, run, settings)
    before = read_folder(run)
    saved = [int(path.name[-8:]) for path in run.glob("checkpoints/step-*")]
    for step in (3, 7, 10):
        replay = ["--replay", str(step), "--replay-to", str(tmp_path / f"step{step}")]
        printed(capfd)
        run_ranks(gpus, start, images, run, settings, replay)
        saved_before = [number for number in saved if number < step]
        first = max(saved_before, default=0) + 1
        records = counted(step - first + 1, "record")
        words = f"metrics.jsonl: equal to the bit at {records}, {first} to {step}"
        assert words in printed(capfd)
    assert read_folder(run) == before

    told = json.loads((tmp_path / "step10" / "step.json").read_text())
    (record,) = [line for line in read_metrics(run) if line["step"] == 10 and "lr" in line]
    assert told["loss"] == pytest.approx(record["loss"], rel=1e-6)
    # The norms of the tensors make up the whole one, whatever cuts them.
    squares = sum(row["gradient"] ** 2 for row in told["tensors"])
    assert squares**0.5 == pytest.approx(record["grad_norm"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "settings"), RANDOM_ROWS)
def test_random_steps_are_replayed_to_the_bit(mode, settings, images, tmp_path, capfd):
    gpus, settings = settings_of(mode, settings)
    run = tmp_path / "run"
    run_ranks(gpus, start, images, run, settings)
    for step in random.Random(mode).sample(range(1, 13), 5):
        printed(capfd)
        run_ranks(gpus, start, images, run, settings, ["--replay", str(step)])
        assert "metrics.jsonl: equal to the bit at" in printed(capfd)


def test_a_planted_image_is_found_by_name_and_the_pictures_are_what_the_model_saw(images, tmp_path):
    """A yellow image is labelled blue."""
    data = tmp_path / "data"
    shutil.copytree(images, data)
    yellow = Image.new("RGB", (24, 20), "yellow")
    yellow.save(data / "train" / "blue" / "odd.png")
    settings = [
        *SETTINGS,
        "MIXUP=0",
        "LEARNING_RATE=5e-3",
        "NUM_EPOCHS=12",
        "MODEL.dropout=0",
    ]
    run = tmp_path / "run"
    run_ranks(1, start, data, run, settings)
    found = 0
    for step in range(45, 49):
        folder = tmp_path / str(step)
        flags = ["--replay", str(step), "--replay-to", str(folder)]
        run_ranks(1, start, data, run, settings, flags)
        told = json.loads((folder / "step.json").read_text())
        rows = [image for image in told["images"] if image["image"].endswith("blue/odd.png")]
        if rows:
            odd = rows[0]
            first = told["images"][0]
            assert first["image"] == odd["image"]
            *_, largest = sorted(folder.glob("*.png"))
            assert largest.name.endswith(f"-rank0-micro0-row{odd['row']:04}-odd.png")
            pixels = np.asarray(Image.open(largest)).reshape(-1, 3)
            assert (pixels == [255, 255, 0]).all()
            found += 1
    assert found == 1  # an image is in one step of an epoch


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--replay=3", "--output=elsewhere"], "--replay 3: "),
        (["--replay=13"], "--replay 13: the run has 12 steps"),
        (["--replay-to=x"], "--replay-to has no effect without --replay"),
        (["--replay=3", "--replay-to=run"], "--replay-to run is not empty"),
        (["--replay=3", "--set=LEARNING_RATE=1"], "LEARNING_RATE=1"),
    ],
)
def test_what_cannot_be_replayed_is_said_in_a_line(flags, message, images, run, monkeypatch):
    monkeypatch.chdir(run.parent)
    settings = in_words(f"DATA.root={images}", *SETTINGS)
    words = ["--config=tiny.py", "--output=run", *settings, *flags]
    ended = run_forked(lambda argv: train_on(argv, TASK), words, 2)
    assert message in ended.stderr


def test_what_is_not_finite_is_kept_apart_from_what_is_large_and_named_from_the_input_on():
    finite = {"image": "a.png", "is_finite": True}
    not_finite = {"image": "b.png", "is_finite": False}
    layers = {
        "stem": 7.0,
        "norm": math.nan,
        "head": math.inf,
    }
    words = "; layers whose output is not: 2 of 3, from the input on: norm, head"
    said = describe_activations({"images": [finite, not_finite], "activations": layers})
    assert said == f"images that are not finite: b.png{words}"
    said = describe_activations({"images": [finite], "activations": layers})
    assert said == f"all images are finite{words}"


def test_a_replay_without_records_says_how_to_get_them(images, run, tmp_path, capfd):
    copy = shutil.copytree(run, tmp_path / "run")
    file = copy / "metrics.jsonl"
    *_, last = file.read_text().splitlines(keepends=True)
    file.write_text(last)
    run_ranks(1, start, images, copy, SETTINGS, ["--replay", "3"])
    words = "metrics.jsonl: it has no record of these steps to compare with; LOG.every=1 writes"
    assert words in printed(capfd)


def test_a_replay_on_other_processes_says_so(images, run, capfd):
    run_ranks(2, start, images, run, SETTINGS, ["--replay", "3"])
    said = printed(capfd)
    assert "equal to the bit at" not in said
    assert "(on other processes: close, not equal to the bit)" in said
