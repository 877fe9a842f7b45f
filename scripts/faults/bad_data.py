"""Corrupt, replaced and malicious data."""

import contextlib
import io
import os
import pickle
import random
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

from common.checkpoint.save import MARKER, MODEL, OPTIMIZER, RANDOM, TRAINER, newest_checkpoint
from common.data.download import extract
from common.data.sampling import epoch_order
from common.errors import UserError
from common.files import sha256_of
from common.metrics.writers import read_metrics
from faults.lab import ONE, TWO, Lab, Mode, Recovery, Trial, fault, read_result
from faults.places import Place, at
from faults.processes import Inject, RunLostError, expect
from imagenet_dali import prepare
from imagenet_dali.dataset import open_split
from imagenet_dali.testing import BAD_IMAGES, spoil_record, write_bad_images, write_images

SEED = 1024
SETTINGS = ["MAX_STEPS=12", f"SEED={SEED}"]


def prepare_quietly(*arguments: object) -> str:
    """Run the command ``prepare``; return its stdout."""
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
    """Flip a bit of a record during a run: DALI stops and names it; after a repair the run resumes."""
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
    """Resume with another data set: refused, unless allowed."""
    stopped, data = Trial(lab, TWO).stop_at_step_10(), prepare_more(lab)
    Trial(lab, TWO, stopped.output, data=data).run().expect(
        2, "DATA.root differs from the data set of", "DATA.allow_change=True"
    )
    Trial(lab, TWO, stopped.output, [*SETTINGS, "DATA.allow_change=True"], data).run().expect(0)
    read_result(stopped.output)


@fault(f"1,000 bad images of {len(BAD_IMAGES)} kinds into preparation", 1, 0)
def thousand_bad_images(lab: Lab, choice: random.Random) -> None:
    """Prepare 60 good and 1,000 bad images: every bad one is listed with its reason and excluded."""
    folder = lab.new_folder()
    source, shards = write_images(folder / "images", 20, 3), folder / "shards"
    good = {path.read_bytes() for path in source.rglob("*.jpg")}
    kinds = {
        path.relative_to(source).as_posix(): kind for path, kind in write_bad_images(source / "class_0", 1000).items()
    }
    prepare_quietly(source, shards, "--validation-share", "0.1", "--max-refused", "1")
    listed = dict(line.split("\t") for line in (shards / "refused.txt").read_text().splitlines())
    expect(listed.keys() == kinds.keys(), "another list")
    expect(all(BAD_IMAGES[kinds[name]][1] in reason for name, reason in listed.items()), "another reason")
    splits = [open_split(shards, name) for name in ("train", "validation")]
    kept = {bytes(split.read(index)[0]) for split in splits for index in range(len(split))}
    expect(kept == good, f"{len(kept - good)} bad images in the shards, {len(good - kept)} good ones missing")
    Trial(lab, ONE, data=shards).run().expect(0)


class Malice:
    """Creates a folder when unpickled."""

    def __init__(self, evidence: Path) -> None:
        self.evidence = evidence

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return os.mkdir, (str(self.evidence),)


@fault("a pickle that runs code, as checkpoint: refused")
def malicious_checkpoint(lab: Lab, choice: random.Random) -> Recovery:
    """Put a pickle that runs code into each file of a checkpoint, with valid checksums: nothing is executed.

    The checkpoint is refused, and the run resumes from the one before.
    """
    stopped, evidence, equal = Trial(lab, ONE).stop_at_step_10(), lab.new_folder(), True
    for name in (MODEL, OPTIMIZER, RANDOM, TRAINER):
        trial = Trial(lab, ONE)
        shutil.copytree(stopped.output, trial.output, symlinks=True)
        checkpoint = newest_checkpoint(trial.checkpoints)
        (checkpoint / name).write_bytes(pickle.dumps(Malice(evidence)))
        files = [line.partition("  ")[2] for line in (checkpoint / MARKER).read_text().splitlines()]
        (checkpoint / MARKER).write_text("".join(f"{sha256_of(checkpoint / file)}  {file}\n" for file in files))
        equal &= bool(trial.resume(f"warning: {checkpoint} is damaged ({name}: ").equal)
        expect(not evidence.exists(), f"{name} was executed")
    return Recovery(equal)


@fault("a tar with ../: refused")
def malicious_archive(lab: Lab, choice: random.Random) -> None:
    """Unpack an archive with a file ``../evil``: refused, and nothing is written, outside or inside."""
    outside, archive = lab.new_folder(), lab.new_folder()
    folder = outside / "data"
    folder.mkdir(parents=True)
    with tarfile.open(archive, "w") as tar:
        for name in ("images/good", "../evil", "images/../../evil"):
            member = tarfile.TarInfo(name)
            member.size = 4
            tar.addfile(member, io.BytesIO(b"evil"))
    try:
        extract(archive, "images", folder)
        raise RunLostError("it was not refused")
    except UserError:
        expect(list(outside.iterdir()) == [folder] and not list(folder.iterdir()), "something was written")
