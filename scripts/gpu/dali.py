"""Pieces: photographs that DALI decodes, alone and beside training."""

import contextlib
import os
import statistics
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from common.config.load import load_config
from common.data.crops import UNIFORMS_PER_SAMPLE, RandomCrop
from common.data.loader import Loader
from common.data.micro_batches import TrainSampler
from common.hardware import cores
from common.testing.photographs import write_photographs
from common.tools.harness import Row
from gpu.data import measure_overlap, repeat
from gpu.job import ROUNDS, TINY, VIT_S16, Job
from imagenet_dali.dataloader import build_eval_loader, build_train_loader
from imagenet_dali.dataset import open_split
from imagenet_dali.imagenet_dali_dataloader import DaliReader
from imagenet_dali.prepare import main as prepare

LOADS = (None, 0.0, 0.65, 1.0)  # 65% is DALI's default
TOLERANCE = 0.02  # mean difference of pixels that a GPU decodes, in units of the normalised images


def dali_beside_training(job: Job) -> Iterator[Row]:
    """Time steps of ViT-S/16 at batch 256 alone, DALI's batches alone, and both as in training."""
    data, size, batch = _prepare(job)
    model = (TINY if job.tiny else VIT_S16) | {"image_size": size, "num_classes": 4}
    place = dict(image_size=size, dp_rank=0, dp_size=1, device=job.device)
    loader = build_train_loader(data, batch, batch, seed=0, **place)
    batches = repeat(loader)
    images, _ = next(batches)
    before = images.clone()
    for _ in islice(batches, 4):  # DALI must not write into the memory of a batch that is in use
        pass
    if not torch.equal(images, before):
        yield {"wrong": "a batch of DALI changes while later ones are read"}
    yield from measure_overlap(job, model, batches, 1)
    loader.close()


def dali(job: Job) -> Iterator[Row]:
    """Decode, crop and normalise JPEGs of 500 x 400 with DALI; compare the device's pixels with a CPU's."""
    data, size, batch = _prepare(job)
    first, row = {}, {"batch": batch}
    for device in dict.fromkeys([torch.device("cpu"), job.device]):
        place = dict(image_size=size, dp_rank=0, dp_size=1, device=device)
        loader = build_train_loader(data, batch, batch, seed=0, **place)
        seconds = job.time(lambda loader=loader: [None for _ in loader])
        loader.close()
        rate = len(loader) * batch / statistics.median(seconds)
        yield row | {"decoded_on": device.type, "threads": cores(), "images_per_s": rate, "n": ROUNDS}
        first[device.type] = _first_batch(build_eval_loader(data, batch, **place))
    difference = (first[job.device.type] - first["cpu"]).abs()
    mean, largest = difference.mean().item(), difference.max().item()
    row |= {"decoded_on": f"{job.device.type} against cpu", "mean_difference": mean, "largest_difference": largest}
    yield row if mean <= TOLERANCE else row | {"wrong": f"pixels decoded on {job.device.type} differ"}


def jpeg_engine(job: Job) -> Iterator[Row]:
    """Decode the windows of crops, or whole images of which the GPU's JPEG engine decodes a share."""
    data, size, batch = _prepare(job)
    split, first = open_split(data["root"], "train"), {}
    sampler = TrainSampler(len(split), batch, batch, uniforms=UNIFORMS_PER_SAMPLE)
    for load in LOADS:
        place = dict(batch=batch, size=size, mean=data["mean"], std=data["std"], threads=cores(), device=job.device)
        loader = Loader(sampler, DaliReader(split, RandomCrop(), **place, resizes=True, hardware_load=load))
        seconds = job.time(lambda loader=loader: [None for _ in loader])
        rate = len(loader) * batch / statistics.median(seconds)
        loader.load_state_dict({"epoch": 0, "samples": 0})
        first[load] = _first_batch(loader)
        difference = (first[load] - first[None]).abs().mean().item()
        decoded = "windows" if load is None else f"whole images, engine's share {load:.0%}"
        row = {"decoded": decoded, "threads": cores(), "images_per_s": rate, "mean_difference": difference, "n": ROUNDS}
        yield row if difference <= TOLERANCE else row | {"wrong": f"{decoded}: pixels differ"}


def _prepare(job: Job) -> tuple[dict[str, Any], int, int]:
    """Return the recipe's DATA for JPEGs that this writes, the size of their crops, and a batch."""
    (width, height), images, crop, batch = ((48, 40), 64, 32, 8) if job.tiny else ((500, 400), 4096, 224, 256)
    folder = write_photographs(job.new_folder("images"), "abcd", images, width, height)
    shards, workers = job.new_folder("shards"), "1" if job.tiny else str(cores())
    with open(os.devnull, "w") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        prepare([str(folder), str(shards), "--validation-share", "0.125", "--workers", workers])
    data = load_config("vit-b16")["DATA"] | {"root": str(shards), "loader": "dali", "workers": cores()}
    return data, crop, batch


def _first_batch(loader: Any) -> Tensor:
    """Return the first images of the validation split, which are always cropped alike."""
    images = next(iter(loader))[0].cpu()
    loader.close()
    return images
