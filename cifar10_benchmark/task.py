"""The loaders of a config's ``DATA``, over images kept in the memory of the training device."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cifar10_benchmark.dataset import DOWNLOAD, Images, open_images
from common.config.plan import DataSummary
from common.data.auto_augment import AutoAugment
from common.data.crops import CenterCrop, Normalizer
from common.data.image_folder import note_missing
from common.data.image_loaders import SHARDS_ONLY
from common.data.loader import Batches, Loader, prefetch, to_device
from common.data.recorded import Recorded
from common.data.sampler import NO_LABEL, PADDING, Draw, EvalSampler, TrainSampler
from common.errors import UserError
from common.files import Values
from common.task import Task, refuse_unused

# Keys of DATA for photographs only.
UNUSED = ("loader", "workers", "crop", "crop_scale", "crop_ratio", "randaugment", *SHARDS_ONLY)

# Three numbers choose top, left and flip; the others are AutoAugment's.
UNIFORMS_PER_SAMPLE = 3 + AutoAugment.UNIFORMS


def describe_data(data: Values) -> DataSummary:
    """Count samples and classes of the data set, which is downloaded first if needed."""
    refuse_unused(data, UNUSED)
    images = open_images(data)
    return DataSummary(
        train_samples=len(images.train.labels),
        eval_samples=len(images.test.labels),
        num_classes=len(images.class_names),
        fingerprint=images.fingerprint,
        class_names=images.class_names,
        class_counts=np.bincount(images.train.labels, minlength=len(images.class_names)).tolist(),
        validation=note_missing("the test split", images.class_names, images.test.labels),
    )


def build_train_loader(
    data: Values,
    total_batch: int,
    micro_batch: int,
    *,
    image_size: int,
    device: torch.device,
    graphs: bool = False,
    **options: Any,
) -> Loader:
    """Return the training loader: augmented images, newly permuted in every epoch.

    With ``graphs`` a GPU makes a batch by one launch, a CUDA graph.
    ``options`` are ``dp_rank``, ``dp_size``, ``seed`` and ``resolutions`` of `TrainSampler`.
    """
    images = _load(data, "train", image_size)
    # Without effect: there is little to share, as images in memory are decoded.
    options.pop("sharing", None)
    options |= dict(num_uniforms=UNIFORMS_PER_SAMPLE, repeats=data["repeats"])
    options["balanced"] = images.labels if data["sampling"] else None
    sampler = TrainSampler(len(images.labels), total_batch, micro_batch, **options)
    augment = Augment(data["crop_padding"], data["flip"], data["autoaugment"])
    return Loader(sampler, MemoryReader(images, augment, data, device, graphs))


def build_eval_loader(
    data: Values, batch: int, *, image_size: int, device: torch.device, **ranks: Any
) -> Loader:
    """Return the loader of the test split: each sample exactly once over all ranks, unchanged.

    ``ranks`` are ``dp_rank`` and ``dp_size`` of `EvalSampler`.
    """
    images = _load(data, "test", image_size)
    ranks.pop("sharing", None)
    sampler = EvalSampler(len(images.labels), batch, **ranks)
    return Loader(sampler, MemoryReader(images, None, data, device))


def build_eval_crop(data: Values, image_size: int) -> CenterCrop:
    """Return the transform from an image of any size to the data set's size."""
    return CenterCrop(image_size, short_side=image_size)


def _load(data: Values, split: str, image_size: int) -> Images:
    """Return a split; raise `UserError` if its images are not of the model's size."""
    images: Images = getattr(open_images(data), split)
    side = images.images.shape[-1]
    # No crop follows that would bring an image to the model's size.
    if side != image_size:
        raise UserError(
            f"MODEL.image_size={image_size}: the {split} images of {data['root']} are {side} x "
            f"{side} pixels and are not resized; use --set MODEL.image_size={side}"
        )
    return images


class Augment:
    """Crop images padded by ``padding`` black pixels, mirror half of them, apply AutoAugment.

    ``autoaugment`` is None or "cifar10".
    """

    def __init__(self, padding: int, flip: bool, autoaugment: str | None):
        self.padding = padding
        self.flip = flip
        self.policy = AutoAugment() if autoaugment else None

    def draw(self, uniforms: np.ndarray) -> np.ndarray:
        """Return what to do to each image, int64 [B, 3 or more].

        Its top and left, whether to mirror it, and its operations. ``uniforms`` are float64 [B,
        `UNIFORMS_PER_SAMPLE`].
        """
        offsets_B2 = np.floor(uniforms[:, :2] * (2 * self.padding + 1))
        mirrored_B = (uniforms[:, 2] < 0.5) & self.flip
        columns = [offsets_B2, mirrored_B]
        if self.policy:
            columns.append(self.policy.draw(uniforms[:, 3:]))
        return np.column_stack(columns).astype(np.int64)

    def __call__(self, images_BCYX: Tensor, drawn: Tensor) -> Tensor:
        """Return new images, uint8 [B, 3, Y, X], made as `draw` has drawn."""
        height, width = images_BCYX.shape[2:]
        top_B, left_B, mirrored_B = drawn[:, :3].unbind(1)
        # With zeros: black, since images are normalised after this.
        padded = F.pad(images_BCYX, (self.padding,) * 4)
        # A view of all crops, without a copy: P by Q positions.
        crops_BCPQYX = padded.unfold(2, height, 1).unfold(3, width, 1)
        batch = torch.arange(len(images_BCYX), device=images_BCYX.device)
        # Indices [B] on both sides of a slice: their axis comes first, [B, C, Y, X].
        images_BCYX = crops_BCPQYX[batch, :, top_B, left_B]
        is_mirrored_B111 = mirrored_B[:, None, None, None] > 0
        images_BCYX = torch.where(is_mirrored_B111, images_BCYX.flip(-1), images_BCYX)
        if self.policy:
            return self.policy.apply(images_BCYX, drawn[:, 3:])
        return images_BCYX


def _resize(images_BCYX: Tensor, size: int) -> Tensor:
    """Return uint8 images with sides of ``size``, in float32, rounded as Pillow rounds."""
    floats = images_BCYX.float()
    return F.interpolate(floats, (size, size), mode="bilinear", antialias=True).round()


class MemoryReader:
    """Read samples of a split, kept on ``device`` in uint8, as normalised images and labels.

    ``data`` is the config's, with "mean" and "std" of RGB values from 0 to 1. Padding rows are
    zeros with label -100. Images of a draw with another size are resized after ``augment``. With
    ``graphs`` a GPU makes a batch by one launch.
    """

    def __init__(
        self,
        images: Images,
        augment: Augment | None,
        data: Values,
        device: torch.device,
        graphs: bool = False,
    ):
        # The whole split, up to 154 MB for CIFAR-10: a step sends numbers to the device, no images.
        self._images = torch.from_numpy(images.images).to(device)
        self._labels = torch.from_numpy(images.labels).to(device)
        self._normalize = Normalizer(data["mean"], data["std"], device)
        self._augment = augment
        self._make = Recorded(self._make_batch, device, graphs)

    def read(self, draws: Iterator[Draw]) -> Batches:
        """Yield one batch per draw, in order."""
        return prefetch(self._read(draws), self._images.device)

    def _read(self, draws: Iterator[Draw]) -> Batches:
        """Yield the batches, made on the current stream."""
        device = self._images.device
        for indices, uniforms, _, image_size in draws:
            # Padding shows the first image until it is set to zeros below.
            drawn = np.where(indices == PADDING, 0, indices)[:, None]
            if self._augment:
                drawn = np.hstack([drawn, self._augment.draw(uniforms)])
            images, labels = self._make(to_device(drawn, device), size=image_size)
            if PADDING in indices:
                is_padding = to_device(indices == PADDING, device)
                images.masked_fill_(is_padding[:, None, None, None], 0)
                labels = labels.masked_fill(is_padding, NO_LABEL)
            yield images, labels

    def _make_batch(self, drawn: Tensor, size: int | None) -> tuple[Tensor, Tensor]:
        """Return the images and labels of ``drawn``: rows of the split, and `Augment.draw`'s."""
        rows = drawn[:, 0]
        images = self._images.index_select(0, rows)
        if self._augment:
            images = self._augment(images, drawn[:, 1:])
        # Only now: padding and AutoAugment's shifts are in pixels of the full size.
        if size not in (None, images.shape[-1]):
            images = _resize(images, size)
        return self._normalize(images), self._labels.index_select(0, rows)

    def close(self) -> None:
        """Do nothing: there are no threads or processes."""


TASK = Task(
    name="cifar10_benchmark",
    script="cifar10_benchmark/train.py",
    recipe="vit_lite_vanilla",
    recipes=("vit_lite",),
    describe=describe_data,
    build_train_loader=build_train_loader,
    build_eval_loader=build_eval_loader,
    build_eval_crop=build_eval_crop,
    train_samples=50_000,  # assumed by a dry run without the data
    download=DOWNLOAD,
    loader="memory",
)
