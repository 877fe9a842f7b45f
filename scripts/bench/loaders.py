"""Data loaders to compare: random crops of 224 x 224, mirrored by chance, as normalised float32 batches.

Each is called with a `Work` and its `Rounds`, and reads as the library's documentation says, with one process or thread
for each core.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cifar10_benchmark.augment import UNIFORMS_PER_SAMPLE, Augment
from cifar10_benchmark.dataloader import MemoryReader
from cifar10_benchmark.dataset import Images
from common.config.load import load_config
from common.data.loader import Loader
from common.data.sampling import TrainSampler
from common.hardware import cores
from common.tools.harness import Rounds, timed
from imagenet_dali.dataloader import build_train_loader

SIDE = 224
WORKERS = cores()
IN_QUEUES = 2 * WORKERS  # batches that PyTorch's workers have ready when a round begins


@dataclass(frozen=True)
class Work:
    """What a round reads: ``images`` images, one pass, in batches of ``batch``.

    The folder has ``images/train/<class>/*.jpg``, the same prepared in ``shards``, with a shorter side of at most 320
    and 256 pixels in ``shards320`` and ``shards256``, and ``tars/*.tar`` for webdataset.
    """

    folder: Path
    batch: int
    images: int


def read_passes(loader: Iterable[Any], rounds: Rounds) -> None:
    """Read a pass a round: nothing is ready when it begins, and nothing is left when it ends."""
    torch.set_num_threads(1)
    for _ in rounds:
        for _batch in loader:
            pass


def repeat(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield pass after pass."""
    while True:
        yield from loader


def _ours(work: Work, root: str, loader: str) -> Iterable[Any]:
    data = load_config("vit-b16", [])["DATA"] | {"root": str(work.folder / root), "loader": loader}
    place = dict(image_size=SIDE, dp_rank=0, dp_size=1, seed=0, device=torch.device("cpu"))
    return build_train_loader(data, work.batch, work.batch, **place)


def dali(work: Work, rounds: Rounds, shards: str = "shards") -> None:
    read_passes(_ours(work, shards, "dali"), rounds)


def our_torchvision(work: Work, rounds: Rounds) -> None:
    read_passes(_ours(work, "images", "torchvision"), rounds)


def _transform() -> Callable[[Any], torch.Tensor]:
    from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
    from torchvision import transforms

    return transforms.Compose(
        [
            transforms.RandomResizedCrop(SIDE),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD),
        ]
    )


def torchvision(work: Work, rounds: Rounds) -> None:
    """Read as torchvision's ImageNet example does."""
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder

    images = ImageFolder(work.folder / "images" / "train", _transform())
    options = dict(shuffle=True, drop_last=True, num_workers=WORKERS, persistent_workers=True)
    read_passes(DataLoader(images, work.batch, **options), rounds)


def timm(work: Work, rounds: Rounds) -> None:
    """Read as timm's train.py does, without colour jitter; its prefetcher is for GPUs."""
    from timm.data import create_dataset, create_loader

    images = create_dataset("", root=str(work.folder / "images" / "train"), is_training=True)
    options = dict(color_jitter=0.0, interpolation="bilinear", num_workers=WORKERS, use_prefetcher=False)
    loader = create_loader(images, (3, SIDE, SIDE), work.batch, is_training=True, **options)
    read_passes(loader, rounds)


def webdataset(work: Work, rounds: Rounds) -> None:
    import webdataset as wds

    shards = [str(path) for path in sorted((work.folder / "tars").glob("*.tar"))]
    images = wds.WebDataset(shards, resampled=True, shardshuffle=False).shuffle(100)
    images = images.decode("pil").to_tuple("jpg", "cls").map_tuple(_transform()).batched(work.batch)
    batches = iter(wds.WebLoader(images, batch_size=None, num_workers=WORKERS))
    torch.set_num_threads(1)
    for figures in rounds:
        for _ in islice(batches, IN_QUEUES):  # it has no passes, and reads on between the rounds
            pass
        figures |= timed(lambda: [None for _ in islice(batches, work.images // work.batch)])


def decoding_alone(work: Work, rounds: Rounds) -> None:
    """Decode the whole images in one thread with libjpeg-turbo, and throw them away."""
    import simplejpeg

    files = repeat([path.read_bytes() for path in sorted((work.folder / "images" / "train").rglob("*.jpg"))])
    for _ in rounds:
        for file in islice(files, work.images):
            simplejpeg.decode_jpeg(file)


def cifar(data: Mapping[str, Any], batch: int, side: int, device: torch.device) -> Loader:
    """Return the loader of CIFAR-10's recipe, whose DATA is ``data``, over 10,000 random images on the device."""
    random = np.random.default_rng(0)
    images = Images(random.integers(0, 256, (10_000, 3, side, side), np.uint8), random.integers(0, 10, 10_000))
    sampler = TrainSampler(10_000, batch, batch, dp_rank=0, dp_size=1, seed=0, uniforms=UNIFORMS_PER_SAMPLE)
    augment = Augment(data["crop_padding"], data["flip"], data["autoaugment"])
    return Loader(sampler, MemoryReader(images, augment, mean=data["mean"], std=data["std"], device=device))
