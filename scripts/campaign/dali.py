"""Pieces: decoding photographs with DALI."""

import contextlib
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from campaign.engines import time_rounds
from campaign.job import Job, Row, WrongError
from campaign.made_images import write_folders
from common.config.load import load_config
from common.data.loader import Loader
from imagenet_dali.dataloader import build_eval_loader, build_train_loader
from imagenet_dali.prepare import main as prepare

CLASSES = 4
TOLERANCE = 0.02  # mean difference of pixels that a GPU decodes, in units of the normalised images


def dali(job: Job) -> Iterator[Row]:
    """Decode, crop and normalise JPEGs of 500 x 400 with DALI; compare the device's pixels with a CPU's."""
    size, images, batch = ((48, 40), 64, 8) if job.tiny else ((500, 400), 4096, 256)
    root = _prepare(job, images, size)
    cores = len(os.sched_getaffinity(0))
    devices = dict.fromkeys([torch.device("cpu"), job.device])
    first = {}
    for device in devices:
        loader = _load(root, batch, device, cores)
        row = {"decoded_on": device.type, "threads": cores, "image": "x".join(map(str, size)), "batch": batch}
        seconds = time_rounds(job, lambda loader=loader: _read(loader), rounds=3, at_least=0)
        loader.close()
        yield row | {"images_per_s": len(loader) * batch / sorted(seconds)[1], "n": len(seconds)}
        first[device.type] = _first_batch(root, batch, device, cores)
    difference = (first[job.device.type] - first["cpu"]).abs()
    row = {"decoded_on": f"{job.device.type} against cpu", "image": "x".join(map(str, size)), "batch": batch}
    yield row | {"mean_difference": difference.mean().item(), "largest_difference": difference.max().item()}
    if not difference.mean().item() <= TOLERANCE:
        raise WrongError(f"decoded on {job.device.type}, pixels are {difference.mean():.3f} off in the mean")


def _prepare(job: Job, images: int, size: tuple[int, int]) -> Path:
    names = map(str, range(CLASSES))
    folder = write_folders(job.new_folder("images"), names, images // CLASSES, *size)
    shards = job.new_folder("shards")
    workers = "1" if job.tiny else str(len(os.sched_getaffinity(0)))
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
        prepare([str(folder), str(shards), "--validation-share", "0.125", "--workers", workers])
    return shards


def _options(root: Path, device: torch.device, workers: int) -> tuple[dict, dict]:
    data = load_config("vit-b16")["DATA"] | {"root": str(root), "loader": "dali", "workers": workers}
    return data, dict(image_size=224, dp_rank=0, dp_size=1, device=device)


def _load(root: Path, batch: int, device: torch.device, workers: int) -> Loader:
    data, place = _options(root, device, workers)
    return build_train_loader(data, batch, batch, seed=0, **place)


def _first_batch(root: Path, batch: int, device: torch.device, workers: int) -> Tensor:
    """Return the first images of the validation split, which are cropped alike every time."""
    data, place = _options(root, device, workers)
    loader = build_eval_loader(data, batch, **place)
    ((images, _),) = islice(loader, 1)
    images = images.cpu()
    loader.close()
    return images


def _read(loader: Loader) -> None:
    for _ in loader:
        pass
