"""Compare our loaders with torchvision's, timm's and webdataset's, and with decoding alone.

python scripts/bench/loader.py [--rounds 4] [--size 500x400] [--batch 64]

Random crops of 224 x 224 with random flips, as normalised float32 batches, from generated JPEGs of smooth noise, about
0.3 bytes per pixel; times are per image. Each loader follows its documentation, with one process or thread per core.
`decoding alone` is one thread of libjpeg-turbo decoding whole images: the limit for a loader that does not scale or
crop while decoding. `shrunk to 320` reads the output of `prepare --short-side 320`. Libraries that are not installed
are skipped.
"""

import argparse
import io
import tarfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from common.config.load import load_config
from common.data.loader import Loader
from common.errors import UserError, run_command
from common.hardware import cores
from common.testing.photographs import write_photographs
from common.tools.benchmark import run_benchmark
from common.tools.harness import Rounds, Row, in_processes, interleave, timed
from common.tools.result_rows import summarise
from imagenet_dali.dataloader import build_train_loader
from imagenet_dali.prepare import main as prepare

SIDE, CLASSES = 224, 4
WORKERS = cores()
IN_QUEUES = 2 * WORKERS  # batches that PyTorch's workers have prefetched when a round begins


@dataclass(frozen=True)
class Work:
    """One pass over ``images`` images in batches of ``batch``.

    The folder has ``images/train/<class>/*.jpg``, prepared ``shards``, ``shards320`` and ``shards256`` (shortest side),
    and ``tars/*.tar`` for webdataset.
    """

    folder: Path
    batch: int
    images: int


def read_passes(loader: Iterable[Any], rounds: Rounds) -> None:
    """Read one pass per round, without prefetching across rounds."""
    torch.set_num_threads(1)
    for _ in rounds:
        for _batch in loader:
            pass


def ours(work: Work, rounds: Rounds, root: str = "shards", loader: str = "dali") -> None:
    read_passes(open_ours(work, root, loader), rounds)


def open_ours(work: Work, root: str, loader: str, **changes: Any) -> Loader:
    data = load_config("vit-b16", [])["DATA"] | {"root": str(work.folder / root), "loader": loader} | changes
    place = dict(image_size=SIDE, dp_rank=0, dp_size=1, seed=0, device=torch.device("cpu"))
    return build_train_loader(data, work.batch, work.batch, **place)


def build_transform() -> Callable[[Any], torch.Tensor]:
    from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
    from torchvision import transforms

    random = [transforms.RandomResizedCrop(SIDE), transforms.RandomHorizontalFlip()]
    normalize = transforms.Normalize(IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
    return transforms.Compose([*random, transforms.ToTensor(), normalize])


def torchvision(work: Work, rounds: Rounds) -> None:
    """Read like torchvision's ImageNet example."""
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder

    images = ImageFolder(work.folder / "images" / "train", build_transform())
    options = dict(shuffle=True, drop_last=True, num_workers=WORKERS, persistent_workers=True)
    read_passes(DataLoader(images, work.batch, **options), rounds)


def timm(work: Work, rounds: Rounds) -> None:
    """Read like timm's train.py, without colour jitter; its prefetcher is for GPUs."""
    from timm.data import create_dataset, create_loader

    images = create_dataset("", root=str(work.folder / "images" / "train"), is_training=True)
    options = dict(color_jitter=0.0, interpolation="bilinear", num_workers=WORKERS, use_prefetcher=False)
    read_passes(create_loader(images, (3, SIDE, SIDE), work.batch, is_training=True, **options), rounds)


def webdataset(work: Work, rounds: Rounds) -> None:
    import webdataset as wds

    shards = [str(path) for path in sorted((work.folder / "tars").glob("*.tar"))]
    images = wds.WebDataset(shards, resampled=True, shardshuffle=False).shuffle(100)
    images = images.decode("pil").to_tuple("jpg", "cls").map_tuple(build_transform()).batched(work.batch)
    batches = iter(wds.WebLoader(images, batch_size=None, num_workers=WORKERS))
    torch.set_num_threads(1)
    for measured in rounds:
        for _ in islice(batches, IN_QUEUES):  # it has no passes, and keeps reading between rounds
            pass
        measured |= timed(lambda: [None for _ in islice(batches, work.images // work.batch)])


def decoding_alone(work: Work, rounds: Rounds) -> None:
    import simplejpeg

    files = cycle([path.read_bytes() for path in sorted((work.folder / "images" / "train").rglob("*.jpg"))])
    for _ in rounds:
        for file in islice(files, work.images):
            simplejpeg.decode_jpeg(file)


LOADERS: dict[str, Callable[[Work, Rounds], None]] = {
    "torchvision": torchvision,
    "ours, DALI": ours,
    "ours, DALI, shrunk to 320": partial(ours, root="shards320"),
    "ours, DALI, shrunk to 256": partial(ours, root="shards256"),
    "ours, torchvision": partial(ours, root="images", loader="torchvision"),
    "timm": timm,
    "webdataset": webdataset,
    "decoding alone": decoding_alone,
}


def main(argv: list[str]) -> None:
    run_benchmark(
        "loader",
        measure,
        argv,
        __doc__,
        rounds=4,
        packages=["webdataset", "simplejpeg"],
        size=dict(default="500x400", help="width and height of the images (default: 500x400)"),
        batch=dict(type=int, default=64, help="images per batch (default: 64)"),
        images=dict(type=int, default=1024, help="images per round, a multiple of --batch (default: 1024)"),
    )


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each loader."""
    size, batch, images = ("64x48", 4, 16) if args.tiny else (args.size, args.batch, args.images)
    rounds = 1 if args.tiny else args.rounds
    try:
        width, height = map(int, size.split("x"))
    except ValueError:
        raise UserError(f"--size {size}: expected WIDTHxHEIGHT, such as 500x400") from None
    if images < batch or images % batch:
        raise UserError(f"--images {images}: not a multiple of --batch {batch}")
    with TemporaryDirectory() as folder:
        write_images(Path(folder), images, width, height)
        measured = compare(Work(Path(folder), batch, images), rounds)
    yield from summarise(measured, "torchvision", images, part=f"{size}, batch {batch}, {WORKERS} workers")


def compare(work: Work, rounds: int) -> dict[str, list[Row] | None]:
    """Return each loader's measurements without its first round; None if not installed."""
    present = {name: loader for name, loader in LOADERS.items() if name != "webdataset" or find_spec(name)}
    with in_processes({name: partial(loader, work) for name, loader in present.items()}) as variants:
        measured = interleave(variants, rounds + 1)
    return {name: measured[name][1:] if name in measured else None for name in LOADERS}


def write_images(folder: Path, count: int, width: int, height: int) -> None:
    """Write JPEGs as an image folder, as TFRecord shards, and as tar files."""
    for split, images in (("train", count), ("val", CLASSES)):  # our shards need both
        write_photographs(folder / "images" / split, map(str, range(CLASSES)), images, width, height)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        for side in ("", "320", "256"):
            prepare([str(folder / "images"), str(folder / f"shards{side}"), *(["--short-side", side] if side else [])])
    write_tars(folder, WORKERS)


def write_tars(folder: Path, number: int) -> None:
    """Write the training images of an image folder as ``tars/*.tar`` for webdataset."""
    (folder / "tars").mkdir()
    paths = sorted((folder / "images" / "train").rglob("*.jpg"))
    for first in range(number):
        with tarfile.open(folder / "tars" / f"{first}.tar", "w") as tar:
            for path in paths[first::number]:
                for suffix, content in ((".jpg", path.read_bytes()), (".cls", path.parent.name.encode())):
                    entry = tarfile.TarInfo(path.stem + suffix)
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))


if __name__ == "__main__":
    run_command(main)
