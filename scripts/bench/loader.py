"""Compare our loaders with torchvision's, timm's and webdataset's, and with decoding alone; and CIFAR-10's with a step.

python scripts/bench/loader.py [--rounds 4] [--size 500x400] [--batch 64] [--images 1024]

The images are JPEGs of smooth noise that this writes, about 0.3 bytes a pixel. Times are those of an image. All use
every core; `decoding alone` is one thread with libjpeg-turbo of the whole image: the limit for whoever does not shrink
or cut it while decoding. `shrunk to 320` reads what `prepare --short-side 320` makes. A batch of CIFAR-10 is compared
with a training step with its 512 images. Libraries of requirements-bench.txt that are not installed are left out.
"""

import argparse
import io
import tarfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import loaders
import torch
from job import Job, build_ours
from loaders import Work
from loops import autocast

from cifar10_benchmark.dataloader import READ_AHEAD
from common.errors import UserError, run_command
from common.testing.photographs import write_photographs
from common.tools.benchmark import run_benchmark
from common.tools.harness import Figures, Rounds, Row, in_processes, interleave, timed
from common.tools.result_rows import summarise
from imagenet_dali.prepare import main as prepare

LOADERS: dict[str, Callable[[Work, Rounds], None]] = {
    "torchvision": loaders.torchvision,
    "ours, DALI": loaders.dali,
    "ours, DALI, shrunk to 320": partial(loaders.dali, shards="shards320"),
    "ours, DALI, shrunk to 256": partial(loaders.dali, shards="shards256"),
    "ours, torchvision": loaders.our_torchvision,
    "timm": loaders.timm,
    "webdataset": loaders.webdataset,
    "decoding alone": loaders.decoding_alone,
}
CLASSES = 4


def main(argv: list[str]) -> None:
    run_benchmark(
        "loader",
        measure,
        argv,
        __doc__,
        rounds=4,
        packages=["webdataset", "simplejpeg"],
        size=dict(default="500x400", help="width and height of the images (default: 500x400)"),
        batch=dict(type=int, default=64, help="images of a batch (default: 64)"),
        images=dict(type=int, default=1024, help="images that a round reads, whole batches (default: 1024)"),
    )


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of the loaders of photographs, and those of CIFAR-10's."""
    size, batch, images = ("64x48", 4, 16) if args.tiny else (args.size, args.batch, args.images)
    rounds = 1 if args.tiny else args.rounds
    try:
        width, height = map(int, size.split("x"))
    except ValueError:
        raise UserError(f"--size {size}: write it as 500x400") from None
    if images < batch or images % batch:
        raise UserError(f"--images {images}: not a multiple of --batch {batch}")
    with TemporaryDirectory() as folder:
        write_images(Path(folder), images, width, height)
        figures = compare(Work(Path(folder), batch, images), rounds)
    part = f"{size}, batch {batch}, {loaders.WORKERS} workers"
    yield from summarise(figures, "torchvision", images, part=part)
    figures = compare_cifar(8 if args.tiny else 512, rounds)
    yield from summarise(figures, "a training step", READ_AHEAD, part="CIFAR-10 in memory, a batch")


def compare(work: Work, rounds: int) -> dict[str, list[Figures] | None]:
    """Return each loader's figures but for its first round; None for what is not installed."""
    present = {name: loader for name, loader in LOADERS.items() if name != "webdataset" or find_spec(name)}
    with in_processes({name: partial(loader, work) for name, loader in present.items()}) as variants:
        figures = interleave(variants, rounds + 1)
    return {name: figures[name][1:] if name in figures else None for name in LOADERS}


def compare_cifar(batch: int, rounds: int) -> dict[str, list[Figures]]:
    """Return the figures of as many steps of ViT-Lite-7/4, and augmented batches, as are made together."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    job = Job((f"TOTAL_BATCH_SIZE={batch}",), steps=1, rounds=1, data=None)
    batches = loaders.repeat(loaders.cifar(job.config["DATA"], batch, 32, torch.device("cpu")))
    model, optimizer, criterion, _ = build_ours(job)
    images, labels = next(batches)

    def step() -> None:
        optimizer.zero_grad()
        with autocast():
            output = model(images)
        criterion(output.float(), labels).backward()
        optimizer.step()

    for _ in islice(batches, READ_AHEAD - 1):  # the rest of what was made with the first
        pass
    variants = {
        "a training step": lambda: {clock: READ_AHEAD * seconds for clock, seconds in timed(step).items()},
        "its data": lambda: timed(lambda: list(islice(batches, READ_AHEAD))),
    }
    figures = interleave(variants, rounds + 1)
    torch.set_num_threads(threads)
    return {name: rows[1:] for name, rows in figures.items()}


def write_images(folder: Path, count: int, width: int, height: int) -> None:
    """Write JPEGs as an image folder, as TFRecord shards, and as tar files."""
    for split, images in (("train", count), ("val", CLASSES)):  # our shards have to have both
        write_photographs(folder / "images" / split, map(str, range(CLASSES)), images, width, height)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        for side in ("", "320", "256"):
            prepare([str(folder / "images"), str(folder / f"shards{side}"), *(["--short-side", side] if side else [])])
    (folder / "tars").mkdir()
    paths = sorted((folder / "images" / "train").rglob("*.jpg"))
    for worker in range(loaders.WORKERS):
        with tarfile.open(folder / "tars" / f"{worker}.tar", "w") as tar:
            for path in paths[worker :: loaders.WORKERS]:
                for suffix, content in ((".jpg", path.read_bytes()), (".cls", path.parent.name.encode())):
                    entry = tarfile.TarInfo(path.stem + suffix)
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))


if __name__ == "__main__":
    run_command(main)
