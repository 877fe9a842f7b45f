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
from injection.bench import ONE, TWO, Bench, Fault, Recovery, result
from injection.processes import PATIENT, expect
from injection.victims import Place, at, on, stop
from PIL import Image

from common.checkpoint.save import MARKER, MODEL, OPTIMIZER, RANDOM, TRAINER, newest_checkpoint
from common.data.download import extract
from common.data.sampling import epoch_order
from common.errors import UserError
from common.files import sha256_of
from common.metrics.writers import read_metrics
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


def prepare_more(bench: Bench) -> Path:
    """Prepare 150 images, of which one is less than 1 %."""
    folder = bench.new_folder()
    images = write_images(folder / "images", 150)
    with contextlib.redirect_stdout(io.StringIO()):
        prepare.main([str(images), str(folder / "shards"), "--validation-share", "0.2", "--workers", "1"])
    return folder / "shards"


def choose_record(choice: random.Random, data: Path) -> int:
    """Return a training image that is needed early in the second epoch: steps 8 to 11."""
    return int(choice.choice(epoch_order(len(open_split(data, "train")), SEED, 1)[: 4 * 16]))


def record_goes_bad(bench: Bench, choice: random.Random) -> Recovery:
    """Flip a bit of a record in the middle of a run: DALI stops and names it; after a repair the run goes on."""
    data, output = prepare_more(bench), bench.new_folder()
    index = choose_record(choice, data)
    row = open_split(data, "train").records[index]
    spoil = on(0, lambda: at(Place("step", 3), lambda: spoil_record(data, "train", index)))
    ended = bench.run(TWO, output, spoil, settings=SETTINGS, data=data)
    expect(2 in ended.codes, f"{ended.codes}: {ended.said}")
    for words in (f"train-00000-of-00001: record {index} of train at byte {row['offset']}", f"--check --repair {data}"):
        expect(words in ended.said, f"{words!r} is not said: {ended.said}")
    with contextlib.redirect_stdout(io.StringIO()) as said:
        prepare.main(["--check", "--repair", str(data), "--workers", "1"])
    expect(f"record {index}" in said.getvalue(), said.getvalue())
    ended = bench.run(TWO, output, settings=SETTINGS, data=data).expect(0)
    expect("going on from" in ended.said, ended.said)
    result(output)
    return Recovery()


def image_is_skipped(bench: Bench, choice: random.Random) -> Recovery:
    """The same under torchvision's loader: the image is left out and named, and evaluation counts every sample."""
    data, output = prepare_more(bench), bench.new_folder()
    index = choose_record(choice, data)
    spoil = on(0, lambda: at(Place("step", 3), lambda: spoil_record(data, "train", index)))
    settings = [*SETTINGS, "DATA.loader=torchvision", "DATA.workers=1"]
    ended = bench.run(ONE, output, spoil, settings=settings, data=data).expect(0)
    expect(f"record {index} of train" in ended.said and "left out: " in ended.said, ended.said)
    samples = [record["samples"] for record in read_metrics(output) if record["kind"] == "eval"]
    expect(set(samples) == {len(open_split(data, "validation"))}, samples)
    result(output)
    return Recovery()


def another_data_set(bench: Bench, choice: random.Random) -> Recovery:
    """Go on with another data set: refused, unless it is allowed."""
    data, output = prepare_more(bench), bench.new_folder()
    bench.run(TWO, output, on(None, lambda: at(Place("step", 10), stop)), PATIENT).expect(143)
    refused = bench.run(TWO, output, data=data).expect(2)
    expect("DATA.root is another data set" in refused.said and "DATA.allow_change=True" in refused.said, refused.said)
    bench.run(TWO, output, data=data, settings=[*SETTINGS, "DATA.allow_change=True"]).expect(0)
    result(output)
    return Recovery()


def thousand_bad_images(bench: Bench, choice: random.Random) -> Recovery:
    """Put 1,000 bad images among 60 good ones into preparation: each is listed with its reason, and none is trained on.

    That many are refused altogether, above 1 %; here the limit is lifted.
    """
    folder = bench.new_folder()
    source = write_images(folder / "images", 60)
    good = {path.read_bytes() for path in source.rglob("*.jpg")}
    kinds = {path.relative_to(source).as_posix(): kind for path, kind in write_bad_images(source / "r", 1000).items()}
    arguments = [str(source), str(folder / "shards"), "--validation-share", "0.1", "--workers", "2"]
    limit, preparation.MAX_BAD_SHARE = preparation.MAX_BAD_SHARE, 1.0
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            prepare.main(arguments)
    finally:
        preparation.MAX_BAD_SHARE = limit
    listed = dict(line.split("\t") for line in (folder / "shards" / "refused.txt").read_text().splitlines())
    expect(listed.keys() == kinds.keys(), "another list")
    expect(all(BAD_IMAGES[kinds[name]][1] in reason for name, reason in listed.items()), "another reason")
    splits = [open_split(folder / "shards", name) for name in ("train", "validation")]
    kept = {bytes(split.read(index)[0]) for split in splits for index in range(len(split))}
    expect(kept == good, f"{len(kept - good)} bad images in the shards, {len(good - kept)} good ones missing")
    bench.run(ONE, bench.new_folder(), data=folder / "shards").expect(0)
    return Recovery()


class Malice:
    """What runs a command where it is unpickled."""

    def __init__(self, evidence: Path) -> None:
        self.evidence = evidence

    def __reduce__(self) -> tuple[Callable, tuple[str]]:
        return os.mkdir, (str(self.evidence),)


def malicious_checkpoint(bench: Bench, choice: random.Random) -> Recovery:
    """Put a pickle that runs code into each file of a checkpoint, with the right checksums: nothing runs.

    That checkpoint is refused, and the one before gone on from.
    """
    output = bench.new_folder()
    bench.run(ONE, output, on(None, lambda: at(Place("step", 10), stop)), PATIENT).expect(143)
    evidence, equal = bench.folder / "executed", True
    for name in (MODEL, OPTIMIZER, RANDOM, TRAINER):
        copy = bench.new_folder()
        shutil.copytree(output, copy)
        checkpoint = newest_checkpoint(copy / "checkpoints")
        (checkpoint / name).write_bytes(pickle.dumps(Malice(evidence)))
        files = [line.partition("  ")[2] for line in (checkpoint / MARKER).read_text().splitlines()]
        sums = "".join(f"{sha256_of(checkpoint / file)}  {file}\n" for file in files)
        (checkpoint / MARKER).write_text(sums)
        ended = bench.run(ONE, copy).expect(0)
        expect(f"warning: {checkpoint} is damaged ({name} cannot be read" in ended.said, ended.said)
        expect(not evidence.exists(), f"{name} was executed")
        equal = equal and bench.is_equal(ONE, copy)
    return Recovery(equal)


def malicious_archive(bench: Bench, choice: random.Random) -> Recovery:
    """Unpack an archive with a file ``../evil``: refused, and nothing is written, outside or inside."""
    outside = bench.new_folder()
    folder = outside / "data"
    folder.mkdir(parents=True)
    archive = bench.new_folder()
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
    expect(False, "it was not refused")
    raise AssertionError


def data_faults() -> list[Fault]:
    """Return the rows."""
    return [
        Fault("a record goes bad: DALI stops, repair, goes on", record_goes_bad, 2),
        Fault("an image goes bad: torchvision skips it", image_is_skipped, 2, 0),
        Fault("another data set: refused, unless allowed", another_data_set),
        Fault(f"1,000 bad images of {len(BAD_IMAGES)} kinds into preparation", thousand_bad_images, 1, 0),
        Fault("a pickle that runs code, as checkpoint: refused", malicious_checkpoint),
        Fault("a tar with ../: refused", malicious_archive),
    ]
