"""Compare what loaders ask of storage, and how fast they are where it is slow.

python scripts/bench/io.py [--rounds 1] [--images 2000] [--latency 0,5,50] [--only LOADER ...]

Each loader makes one pass over the same JPEGs, in random crops of 224 x 224 as in loader.py: ours in both orders and
DALI's reader from 8 TFRecord shards, webdataset from 8 tars, MosaicML Streaming from MDS shards of 16 MB, and
torchvision from files.

`requests`: system calls on these files, counted by strace, where it is installed and may trace. Ours open manifest and
tables seven times a run, and shards once per block; of the 16 blocks of so few images two streams share 7. `cold`: with
the files dropped from the page cache; set TMPDIR to a folder on the disk to be measured. `N ms`: from the page cache,
but each request waits N ms, in Python, where a loader asks for a contiguous range: a block or a record (ours), a shard
(webdataset, Streaming, which copies it), a file. DALI's own reader has no such place. The time to the first batch
includes opening the data set and starting workers, but no imports.
"""

import argparse
import importlib
import multiprocessing
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from functools import partial
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from loader import SIDE, WORKERS, Work, build_transform, open_ours, write_tars
from PIL import Image
from strace import counted

from common.errors import run_command
from common.testing.photographs import write_photographs
from common.tools.benchmark import run_benchmark
from common.tools.harness import Rounds, Row, in_processes, interleave
from common.tools.result_rows import summarise
from imagenet_dali import dataset
from imagenet_dali.prepare import main as prepare

SHARDS, SHARD_BYTES = 8, 1 << 24
BUFFER = 256  # images that webdataset and DALI shuffle
Door = Callable[[], None]  # called before each request
Open = Callable[[Work, Door, ExitStack], Iterable[Any]]


def ours(work: Work, door: Door, stack: ExitStack, order: str) -> Iterable[Any]:
    stack.enter_context(patch.object(dataset, "read_range", behind(door, dataset.read_range)))
    loader = open_ours(work, "shards", "dali", order=order)
    stack.callback(loader.close)
    return loader


def dali(work: Work, door: Door, stack: ExitStack) -> Iterable[Any]:
    """Read like DALI's documentation of TFRecord, in system calls instead of mapped memory."""
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy
    from nvidia.dali.tfrecord import FixedLenFeature, VarLenFeature, int64, string

    split, indexes = dataset.open_split(work.folder / "shards", "train"), []
    for number, shard in enumerate(split.shards):
        rows = split.records[split.records["shard"] == number]
        indexes.append(Path(stack.enter_context(TemporaryDirectory())) / shard.name)
        lines = (f"{offset} {size}\n" for offset, size in zip(rows["offset"], rows["size"], strict=True))
        indexes[-1].write_text("".join(lines))

    @pipeline_def(batch_size=work.batch, num_threads=WORKERS, device_id=None)
    def pipeline():
        features = {"image/encoded": FixedLenFeature((), string, ""), "image/class/label": VarLenFeature(int64, -1)}
        paths = dict(path=list(map(str, split.shards)), index_path=list(map(str, indexes)), features=features)
        read = fn.readers.tfrecord(**paths, random_shuffle=True, initial_fill=BUFFER, dont_use_mmap=True, name="Reader")
        images = fn.decoders.image_random_crop(read["image/encoded"], adjust_orientation=False)
        images = fn.resize(images, size=(SIDE, SIDE))
        mirrored = fn.crop_mirror_normalize(
            images, mirror=fn.random.coin_flip(), mean=[120.0], std=[60.0], dtype=types.FLOAT, output_layout="CHW"
        )
        return mirrored, read["image/class/label"]

    return DALIGenericIterator(
        pipeline(), ["image", "label"], reader_name="Reader", last_batch_policy=LastBatchPolicy.DROP
    )


def webdataset(work: Work, door: Door, stack: ExitStack) -> Iterable[Any]:
    import webdataset as wds

    stack.enter_context(patch("webdataset.cache.open", behind(door, open), create=True))
    shards = [str(path) for path in sorted((work.folder / "tars").glob("*.tar"))]
    images = wds.WebDataset(shards, shardshuffle=len(shards), empty_check=False).shuffle(BUFFER).decode("pil")
    images = images.to_tuple("jpg", "cls").map_tuple(build_transform()).batched(work.batch)
    return wds.WebLoader(images, batch_size=None, num_workers=WORKERS)


def streaming(work: Work, door: Door, stack: ExitStack) -> Iterable[Any]:
    mosaic = import_streaming()
    from streaming.base.storage.download import LocalDownloader as Local

    class Images(mosaic.StreamingDataset):
        def __getitem__(self, index: int) -> Any:
            sample = super().__getitem__(index)
            return transform(Image.open(BytesIO(sample["image"]))), sample["label"]

    transform = build_transform()
    stack.enter_context(patch.object(Local, "_download_file_impl", behind(door, Local._download_file_impl)))
    mosaic.base.util.clean_stale_shared_memory()
    # it is freed at exit only, which a process of multiprocessing skips
    stack.enter_context(patch("streaming.base.shared.memory.atexit", MagicMock(register=stack.callback)))
    cache = stack.enter_context(TemporaryDirectory())
    remote = str(work.folder / "mds")
    images = Images(remote=remote, local=cache, shuffle=True, batch_size=work.batch, num_canonical_nodes=1)
    return torch.utils.data.DataLoader(images, work.batch, num_workers=WORKERS)


def import_streaming() -> Any:
    """Import MosaicML Streaming; its base imports transformers for data sets of text only."""
    names = ["", ".feature_extraction_utils", ".tokenization_utils_base", ".models.auto.tokenization_auto"]
    missing = {f"transformers{name}": MagicMock() for name in names} if not find_spec("transformers") else {}
    sys.modules |= missing
    try:
        return importlib.import_module("streaming")
    finally:
        for name in missing:
            del sys.modules[name]


def torchvision(work: Work, door: Door, stack: ExitStack) -> Iterable[Any]:
    from torchvision.datasets import ImageFolder
    from torchvision.datasets.folder import pil_loader

    images = ImageFolder(work.folder / "images" / "train", build_transform(), loader=behind(door, pil_loader))
    return torch.utils.data.DataLoader(images, work.batch, shuffle=True, num_workers=WORKERS)


LOADERS: dict[str, Open] = {
    "ours, blocks": partial(ours, order="blocks"),
    "ours, random": partial(ours, order="random"),
    "DALI's TFRecord reader": dali,
    "webdataset": webdataset,
    "MosaicML Streaming": streaming,
    "torchvision, files": torchvision,
}
PACKAGES = {"webdataset": "webdataset", "MosaicML Streaming": "streaming"}


MODULES = ("imagenet_dali.imagenet_dali_dataloader", "nvidia.dali.plugin.pytorch", "timm.data", "torchvision.datasets")


def behind(door: Door, function: Callable[..., Any]) -> Callable[..., Any]:
    def delayed(*args: Any, **named: Any) -> Any:
        door()
        return function(*args, **named)

    return delayed


def read(open_: Open, work: Work, latency: float, is_cold: bool, counts: bool, rounds: Rounds) -> None:
    """Make a pass per round; measure its time, that of the first batch, or what it asks of storage."""
    torch.set_num_threads(1)
    requests = multiprocessing.Value("q")

    def door() -> None:
        with requests:
            requests.value += 1
        time.sleep(latency / 1e3)

    for measured in rounds:
        requests.value = 0
        if is_cold:
            drop_from_cache(work.folder)
        with ExitStack() as stack:
            if counts:
                stack.enter_context(counted(work.folder, measured))
            started, first = time.perf_counter(), None
            for _ in open_(work, door, stack):
                first = first or time.perf_counter() - started
            assert requests.value or open_ is dali, "no request was delayed"
            measured |= {"first": first, "wall": time.perf_counter() - started, "requests": requests.value}


def drop_from_cache(folder: Path) -> None:
    os.sync()  # pages that are not on the disk stay
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main(argv: list[str]) -> None:
    run_benchmark(
        "io",
        measure,
        argv,
        __doc__,
        rounds=1,
        packages=["webdataset", "mosaicml-streaming"],
        images=dict(type=int, default=2000, help="images (default: 2000)"),
        size=dict(default="500x400", help="width and height of the images (default: 500x400)"),
        batch=dict(type=int, default=64, help="images per batch (default: 64)"),
        latency=dict(default="0,5,50", help="ms that a request waits (default: 0,5,50)"),
        only=dict(nargs="+", choices=LOADERS, metavar="LOADER", help="ours in blocks and these loaders"),
    )


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each loader: what it asks of storage; its speed cold, and with each latency."""
    images, size, batch, latencies = args.images, args.size, args.batch, args.latency
    if args.tiny:
        images, size, batch, latencies = 32, "64x48", 4, "1"
    names = LOADERS if args.only is None else ("ours, blocks", *args.only)
    loaders = {name: LOADERS[name] for name in LOADERS if name in names and find_spec(PACKAGES.get(name, "torch"))}
    for module in MODULES:
        importlib.import_module(module)
    with TemporaryDirectory() as folder:
        work = Work(Path(folder), batch, images)
        write_sources(work, *map(int, size.split("x")), with_mds=streaming in loaders.values())
        if shutil.which("strace"):
            for name, (counts,) in run(loaders, work, 1, counts=True).items():
                yield {
                    "part": "requests, counted by strace",
                    "variant": name,
                    "wall_ms": counts["wall"] / images * 1e3,
                    "opens_per_image": counts["opens"] / images,
                    "reads_per_image": counts["reads"] / images,
                    "kb_per_read": counts["bytes"] / 1e3 / max(1, counts["reads"]),
                    "mb": counts["bytes"] / 1e6,
                }
        for part, latency in [("cold", 0.0), *((f"{text} ms", float(text)) for text in latencies.split(","))]:
            chosen = {name: open_ for name, open_ in loaders.items() if not (open_ is dali and latency)}
            measured = run(chosen, work, args.rounds, latency=latency, is_cold=part == "cold")
            for row in summarise(measured, next(iter(LOADERS)), images, part=part):
                rounds = measured[row["variant"]]
                first = statistics.median(one["first"] for one in rounds)
                row |= {"images_per_s": 1e3 / row["wall_ms"], "first_batch_s": first}
                yield row | ({"requests_per_image": rounds[0]["requests"] / images} if rounds[0]["requests"] else {})


def run(
    loaders: dict[str, Open],
    work: Work,
    rounds: int,
    *,
    latency: float = 0.0,
    is_cold: bool = False,
    counts: bool = False,
) -> dict[str, list[Row]]:
    variants = {name: partial(read, open_, work, latency, is_cold, counts) for name, open_ in loaders.items()}
    with in_processes(variants) as ready:
        return interleave(ready, rounds)


def write_sources(work: Work, width: int, height: int, with_mds: bool) -> None:
    """Write JPEGs as files that share nothing, as TFRecord shards, tars and MDS shards."""
    folder = work.folder
    for split, images in (("train", work.images), ("val", 4)):
        write_photographs(folder / "images" / split, "0123", images, width, height)
    for path in (folder / "images").rglob("*.jpg"):  # links to few files
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
    with open(os.devnull, "w") as out, redirect_stdout(out), redirect_stderr(out):
        prepare([str(folder / "images"), str(folder / "shards"), "--shards", str(SHARDS)])
    write_tars(folder, SHARDS)
    if with_mds:
        columns = {"image": "bytes", "label": "int"}
        with import_streaming().MDSWriter(out=str(folder / "mds"), columns=columns, size_limit=SHARD_BYTES) as writer:
            for path in sorted((folder / "images" / "train").rglob("*.jpg")):
                writer.write({"image": path.read_bytes(), "label": int(path.parent.name)})


if __name__ == "__main__":
    run_command(main)
