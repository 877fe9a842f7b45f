"""Pieces: photographs that DALI decodes, and batches that are made beside the training."""

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

import torch
from bench.loaders import cifar, repeat
from torch import Tensor

from cifar10_benchmark.dataloader import READ_AHEAD
from common.config.load import load_config
from common.data.loader import Loader
from common.hardware import cores
from common.testing.photographs import write_photographs
from common.tools.harness import Row, WrongError
from gpu.engines import PRECISIONS, TINY, open_engine, time_rounds, train_step
from gpu.job import Job
from gpu.parts import milliseconds
from imagenet_dali.dataloader import build_eval_loader, build_train_loader
from imagenet_dali.prepare import main as prepare

TOLERANCE = 0.02  # mean difference of pixels that a GPU decodes, in units of the normalised images


def dali(job: Job) -> Iterator[Row]:
    """Decode, crop and normalise JPEGs of 500 x 400 with DALI; compare the device's pixels with a CPU's."""
    size, images, batch = ((48, 40), 64, 8) if job.tiny else ((500, 400), 4096, 256)
    first = {}
    data = load_config("vit-b16")["DATA"] | {"root": _prepare(job, images, size), "loader": "dali", "workers": cores()}
    row = {"image": "x".join(map(str, size)), "batch": batch}
    for device in dict.fromkeys([torch.device("cpu"), job.device]):
        place = dict(image_size=224, dp_rank=0, dp_size=1, device=device)
        loader = build_train_loader(data, batch, batch, seed=0, **place)
        seconds = time_rounds(job, partial(_read, loader), rounds=3, at_least=0)
        loader.close()
        rate = len(loader) * batch / sorted(seconds)[1]
        yield row | {"decoded_on": device.type, "threads": cores(), "images_per_s": rate, "n": len(seconds)}
        first[device.type] = _first_batch(build_eval_loader(data, batch, **place))
    difference = (first[job.device.type] - first["cpu"]).abs()
    mean, largest = difference.mean().item(), difference.max().item()
    yield row | {"decoded_on": f"{job.device.type} against cpu", "mean_difference": mean, "largest_difference": largest}
    if not mean <= TOLERANCE:
        raise WrongError(f"decoded on {job.device.type}, pixels are {mean:.3f} off in the mean")


def _prepare(job: Job, images: int, size: tuple[int, int]) -> str:
    folder, shards = write_photographs(job.new_folder("images"), "abcd", images, *size), job.new_folder("shards")
    workers = "1" if job.tiny else str(cores())
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
        prepare([str(folder), str(shards), "--validation-share", "0.125", "--workers", workers])
    return str(shards)


def _first_batch(loader: Loader) -> Tensor:
    """Return the first images, of the validation split, which are cropped alike every time."""
    ((images, _),) = islice(loader, 1)
    images = images.cpu()
    loader.close()
    return images


def _read(loader: Loader) -> None:
    for _ in loader:
        pass


def cuda_prefetch(job: Job) -> Iterator[Row]:
    """Time steps of ViT-Lite-7/4 at batch 512 alone, CIFAR-10's augmented batches alone, and both as in training."""
    recipe = load_config("vit_lite_vanilla")
    model, batch = (TINY, 4) if job.tiny else (recipe["MODEL"], recipe["TOTAL_BATCH_SIZE"])
    batches = repeat(cifar(recipe["DATA"], batch, model["image_size"], job.device))
    with open_engine(model, PRECISIONS["bf16" if job.has_bfloat16 else "fp32"]) as engine:
        ready = next(batches)
        works: dict[str, Callable[[], object]] = {
            "step": lambda: train_step(engine, ready),
            "batch": lambda: next(batches),
            "both": lambda: train_step(engine, next(batches)),
        }
        times = {}
        for name, work in works.items():
            times[name] = milliseconds(job, lambda work=work: [work() for _ in range(READ_AHEAD)])["ms"] / READ_AHEAD
            yield {"work": name, "ms": times[name]}
    hidden = (times["step"] + times["batch"] - times["both"]) / times["batch"]
    yield {"work": "share of the batch's time that both save", "share": hidden}
