"""Corrupt and replaced data."""

import contextlib
import io
import random
from pathlib import Path

from common.data.micro_batches import epoch_order
from common.metrics.writers import read_metrics
from faults.lab import ONE, TWO, Lab, Mode, Trial, fault, read_result
from faults.places import Place, at
from faults.processes import Inject, expect
from imagenet_dali import prepare
from imagenet_dali.dataset import open_split
from imagenet_dali.testing import spoil_record, write_images

SEED = 1024
SETTINGS = ["MAX_STEPS=12", f"SEED={SEED}"]


def prepare_quietly(*arguments: object) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()):
        prepare.main([*map(str, arguments), "--workers", "1"])
    return printed.getvalue()


def prepare_more(lab: Lab) -> Path:
    """Prepare 150 images, so that one is less than 1 %."""
    folder = lab.new_folder()
    prepare_quietly(write_images(folder / "images", 50, 3), folder / "shards", "--validation-share", "0.2")
    return folder / "shards"


def spoiled(lab: Lab, choice: random.Random, mode: Mode, *settings: str) -> tuple[Trial, Path, int, Inject]:
    """Return a trial, its data, a training image of steps 8 to 11, and an `Inject` that damages it after step 3."""
    data = prepare_more(lab)
    index = int(choice.choice(epoch_order(len(open_split(data, "train")), SEED, 1)[: 4 * 16]))
    spoil = at(Place("step", 3), lambda: spoil_record(data, "train", index), 0)
    return Trial(lab, mode, settings=[*SETTINGS, *settings], data=data), data, index, spoil


@fault("a record goes bad: DALI stops, repair, resume", 2)
def record_goes_bad(lab: Lab, choice: random.Random) -> None:
    trial, data, index, spoil = spoiled(lab, choice, TWO)
    row = open_split(data, "train").records[index]
    ended = trial.run(spoil)
    expect(2 in ended.codes, f"{ended.codes}: {ended.printed}")
    where = f"train-00000-of-00001: record {index} of train at byte {row['offset']}"
    ended.expect_words(where, f"--check --repair {data}")
    printed = prepare_quietly("--check", "--repair", data)
    expect(f"record {index}" in printed, printed)
    trial.run().expect(0, "resuming from")
    read_result(trial.output)


@fault("an image goes bad: torchvision skips it", 2, 0)
def image_is_skipped(lab: Lab, choice: random.Random) -> None:
    """The same with torchvision's loader: the image is skipped and named; evaluation counts every sample."""
    trial, data, index, spoil = spoiled(lab, choice, ONE, "DATA.loader=torchvision", "DATA.workers=1")
    trial.run(spoil).expect(0, f"record {index} of train", "skipped: ")
    samples = {record["samples"] for record in read_metrics(trial.output) if record["kind"] == "eval"}
    expect(samples == {len(open_split(data, "validation"))}, samples)
    read_result(trial.output)


@fault("another data set: refused, unless allowed")
def another_data_set(lab: Lab, choice: random.Random) -> None:
    stopped, data = Trial(lab, TWO).stop_at_step_10(), prepare_more(lab)
    Trial(lab, TWO, stopped.output, data=data).run().expect(
        2, "DATA.root differs from the data set of", "DATA.allow_change=True"
    )
    Trial(lab, TWO, stopped.output, [*SETTINGS, "DATA.allow_change=True"], data).run().expect(0)
    read_result(stopped.output)
