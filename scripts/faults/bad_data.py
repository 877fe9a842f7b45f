"""Data that goes bad, is another than before, or was made to do harm."""

import contextlib
import io
import os
import pickle
import random
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from common.checkpoint.save import MARKER, MODEL, OPTIMIZER, RANDOM, TRAINER, newest_checkpoint
from common.data.download import extract
from common.data.sampling import epoch_order
from common.errors import UserError
from common.files import sha256_of
from common.metrics.writers import read_metrics
from faults.lab import ONE, TWO, Lab, Recovery, Trial, fault, result
from faults.places import Place, at
from faults.processes import RunLostError, expect
from imagenet_dali import preparation, prepare
from imagenet_dali.dataset import open_split
from imagenet_dali.testing import BAD_IMAGES, encode, spoil_record, write_bad_images

SEED = 1024
SETTINGS = ["MAX_STEPS=12", f"SEED={SEED}"]


def write_images(folder: Path, count: int) -> Path:
    """Write good images of three classes."""
    noise = np.random.default_rng(0)
    for number in range(count):
        path = folder / "rgb"[number % 3] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(Image.fromarray(noise.integers(0, 255, (20, 24, 3), np.uint8))))
    return folder


def prepare_quietly(*arguments: object) -> str:
    """Run the command ``prepare``; return what it prints on stdout."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()):
        prepare.main([*map(str, arguments), "--workers", "1"])
    return printed.getvalue()


def prepare_more(lab: Lab) -> Path:
    """Prepare 150 images, of which one is less than 1 %."""
    folder = lab.new_folder()
    prepare_quietly(write_images(folder / "images", 150), folder / "shards", "--validation-share", "0.2")
    return folder / "shards"


def choose_record(choice: random.Random, data: Path) -> int:
    """Return a training image that is needed early in the second epoch: steps 8 to 11."""
    return int(choice.choice(epoch_order(len(open_split(data, "train")), SEED, 1)[: 4 * 16]))


@fault("a record goes bad: DALI stops, repair, resumed", 2)
def record_goes_bad(lab: Lab, choice: random.Random) -> Recovery:
    """Flip a bit of a record in the middle of a run: DALI stops and names it; after a repair the run resumes."""
    data, output = prepare_more(lab), lab.new_folder()
    index = choose_record(choice, data)
    row = open_split(data, "train").records[index]
    spoil = at(Place("step", 3), lambda: spoil_record(data, "train", index), 0)
    ended = lab.run(TWO, output, spoil, settings=SETTINGS, data=data)
    expect(2 in ended.codes, f"{ended.codes}: {ended.printed}")
    where = f"train-00000-of-00001: record {index} of train at byte {row['offset']}"
    ended.expect_words(where, f"--check --repair {data}")
    printed = prepare_quietly("--check", "--repair", data)
    expect(f"record {index}" in printed, printed)
    lab.run(TWO, output, settings=SETTINGS, data=data).expect(0, "resuming from")
    result(output)
    return Recovery()


@fault("an image goes bad: torchvision skips it", 2, 0)
def image_is_skipped(lab: Lab, choice: random.Random) -> Recovery:
    """The same under torchvision's loader: the image is left out and named, and evaluation counts every sample."""
    data, output = prepare_more(lab), lab.new_folder()
    index = choose_record(choice, data)
    spoil = at(Place("step", 3), lambda: spoil_record(data, "train", index), 0)
    settings = [*SETTINGS, "DATA.loader=torchvision", "DATA.workers=1"]
    lab.run(ONE, output, spoil, settings=settings, data=data).expect(0, f"record {index} of train", "skipped: ")
    samples = [record["samples"] for record in read_metrics(output) if record["kind"] == "eval"]
    expect(set(samples) == {len(open_split(data, "validation"))}, samples)
    result(output)
    return Recovery()


@fault("another data set: refused, unless allowed")
def another_data_set(lab: Lab, choice: random.Random) -> Recovery:
    """Resume with another data set: refused, unless it is allowed."""
    trial, data = Trial(lab, TWO).stop_at_step_10(), prepare_more(lab)
    trial.run(data=data).expect(2, "DATA.root is another data set", "DATA.allow_change=True")
    trial.run(data=data, settings=[*SETTINGS, "DATA.allow_change=True"]).expect(0)
    result(trial.output)
    return Recovery()


@fault(f"1,000 bad images of {len(BAD_IMAGES)} kinds into preparation", 1, 0)
def thousand_bad_images(lab: Lab, choice: random.Random) -> Recovery:
    """Put 1,000 bad images among 60 good ones into preparation: each is listed with its reason, and none is trained on.

    That many are refused altogether, above 1 %; here the limit is lifted, in this process.
    """
    folder = lab.new_folder()
    source, shards = write_images(folder / "images", 60), folder / "shards"
    good = {path.read_bytes() for path in source.rglob("*.jpg")}
    kinds = {path.relative_to(source).as_posix(): kind for path, kind in write_bad_images(source / "r", 1000).items()}
    limit, preparation.MAX_BAD_SHARE = preparation.MAX_BAD_SHARE, 1.0
    try:
        prepare_quietly(source, shards, "--validation-share", "0.1")
    finally:
        preparation.MAX_BAD_SHARE = limit
    listed = dict(line.split("\t") for line in (shards / "refused.txt").read_text().splitlines())
    expect(listed.keys() == kinds.keys(), "another list")
    expect(all(BAD_IMAGES[kinds[name]][1] in reason for name, reason in listed.items()), "another reason")
    splits = [open_split(shards, name) for name in ("train", "validation")]
    kept = {bytes(split.read(index)[0]) for split in splits for index in range(len(split))}
    expect(kept == good, f"{len(kept - good)} bad images in the shards, {len(good - kept)} good ones missing")
    lab.run(ONE, lab.new_folder(), data=shards).expect(0)
    return Recovery()


class Malice:
    """What runs a command where it is unpickled."""

    def __init__(self, evidence: Path) -> None:
        self.evidence = evidence

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return os.mkdir, (str(self.evidence),)


@fault("a pickle that runs code, as checkpoint: refused")
def malicious_checkpoint(lab: Lab, choice: random.Random) -> Recovery:
    """Put a pickle that runs code into each file of a checkpoint, with the right checksums: nothing runs.

    That checkpoint is refused, and the run resumes from the one before.
    """
    stopped, evidence, equal = Trial(lab, ONE).stop_at_step_10(), lab.new_folder(), True
    for name in (MODEL, OPTIMIZER, RANDOM, TRAINER):
        trial = Trial(lab, ONE)
        shutil.copytree(stopped.output, trial.output)
        checkpoint = newest_checkpoint(trial.checkpoints)
        (checkpoint / name).write_bytes(pickle.dumps(Malice(evidence)))
        files = [line.partition("  ")[2] for line in (checkpoint / MARKER).read_text().splitlines()]
        sums = "".join(f"{sha256_of(checkpoint / file)}  {file}\n" for file in files)
        (checkpoint / MARKER).write_text(sums)
        equal &= trial.resume(f"warning: {checkpoint} is damaged ({name}: ").equal
        expect(not evidence.exists(), f"{name} was executed")
    return Recovery(equal)


@fault("a tar with ../: refused")
def malicious_archive(lab: Lab, choice: random.Random) -> Recovery:
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
    except UserError:
        expect(list(outside.iterdir()) == [folder] and not list(folder.iterdir()), "something was written")
        return Recovery()
    raise RunLostError("it was not refused")
