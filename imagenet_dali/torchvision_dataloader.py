"""Decode, crop and normalise with Pillow in worker processes, as torchvision does: an image folder or a prepared set.

It sees the same samples, crops and flips as the DALI loader, and the same pixels to within rounding.
"""

import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from common.errors import UserError
from common.sampling import NO_LABEL, PADDING, Draw
from imagenet_dali.augment import CenterCrop, RandomCrop
from imagenet_dali.dataset import CHECK, Split
from imagenet_dali.sources import Source


class FolderSplit:
    """One split of an image folder, with the labels and the splits that preparation would give it."""

    def __init__(self, source: Source, split: str) -> None:
        if split not in source.splits:
            raise UserError(f"DATA.root={source.root} has no {split} split: add {source.root / split}/<class>/*")
        self.root, self.class_names, self.num_classes = source.root, source.class_names, len(source.class_names)
        # arrays, because workers would copy a million strings page by page as they count references
        self._paths = np.array([os.fsencode(path) for path, _ in source.splits[split]])
        self._labels = np.array([label for _, label in source.splits[split]], np.int64)

    def __len__(self) -> int:
        return len(self._labels)

    def path(self, index: int) -> Path:
        """Return where an image lies."""
        return self.root / os.fsdecode(self._paths[index])

    def read(self, index: int) -> tuple[bytes, int]:
        """Return ``(content of the file, label)`` of one image."""
        path = self.path(index)
        try:
            return path.read_bytes(), int(self._labels[index])
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; the folder changed after it was listed") from error


class TorchvisionReader:
    """Read draws of a split as normalised images, float32 [B, 3, size, size], and labels, int64 [B], on ``device``.

    ``mean`` and ``std`` are of RGB values from 0 to 1. Rows of padding are zeros with label -100. Whole batches are
    made by ``workers`` processes, or in this one if 0. An image that does not decode raises `UserError` naming it.
    """

    def __init__(
        self,
        split: Split | FolderSplit,
        crop: RandomCrop | CenterCrop,
        *,
        size: int,
        mean: Sequence[float],
        std: Sequence[float],
        workers: int,
        device: torch.device,
    ) -> None:
        self.device = device
        self._mean, self._std = (torch.tensor(values, device=device)[:, None, None] * 255 for values in (mean, std))
        self._pass = _Pass()
        self._batches = DataLoader(
            _Batches(split, crop, size),
            batch_size=None,
            sampler=self._pass,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=device.type == "cuda",
            generator=torch.Generator(),  # the workers' seeds, unused, would be drawn from the model's random numbers
        )

    def read(self, draws: Iterator[Draw]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batch of each draw, in order."""
        self._pass.draws = draws
        for batch in self._batches:
            if isinstance(batch, UserError):
                raise batch
            images_BHWC, labels = batch
            samples = int((labels != NO_LABEL).sum())
            images = images_BHWC.to(self.device, non_blocking=True).permute(0, 3, 1, 2).contiguous().float()
            images.sub_(self._mean).div_(self._std)
            images[samples:] = 0
            yield images, labels.to(self.device, non_blocking=True)

    def close(self) -> None:
        """End the worker processes."""
        del self._batches


class _Pass:
    """The draws that the next pass over the DataLoader follows."""

    draws: Iterator[Draw]

    def __iter__(self) -> Iterator[Draw]:
        return self.draws


class _Batches(Dataset):
    """Makes the batch of a draw: images uint8 [B, size, size, 3], labels int64 [B]."""

    def __init__(self, split: Split | FolderSplit, crop: RandomCrop | CenterCrop, size: int) -> None:
        self.split, self.crop, self.size = split, crop, size

    def __getitem__(self, draw: Draw) -> tuple[Tensor, Tensor] | UserError:
        indices, uniforms = draw
        images = np.zeros((len(indices), self.size, self.size, 3), np.uint8)
        labels = np.full(len(indices), NO_LABEL)
        try:
            for row in np.flatnonzero(indices != PADDING):
                image, labels[row] = self._load(int(indices[row]))
                images[row] = self._view(image, uniforms[row : row + 1])
        except UserError as error:
            return error  # raised here, it would reach the user as the worker's traceback
        return torch.from_numpy(images), torch.from_numpy(labels)

    def _load(self, index: int) -> tuple[Image.Image, int]:
        data, label = self.split.read(index)
        try:
            image = Image.open(io.BytesIO(data))
            # the images of a prepared set are upright, whatever their EXIF block says
            image = ImageOps.exif_transpose(image) if isinstance(self.split, FolderSplit) else image
            return image.convert("RGB"), label
        except Exception as error:  # Pillow's decoders answer damaged files with a dozen unrelated types
            raise UserError(self._describe(index, error)) from error

    def _describe(self, index: int, error: Exception) -> str:
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(self.split, FolderSplit):
            return f"{self.split.path(index)}: {reason}; remove or replace this image"
        row = self.split.records[index]
        place = f"{self.split.shards[row['shard']]}: record {index} of {self.split.name} at byte {row['offset']}"
        return f"{place}: {reason}; {CHECK.format(root=self.split.root)}"

    def _view(self, image: Image.Image, uniforms: np.ndarray) -> Image.Image:
        """Return the crop of an image at the size of the network's input."""
        crops = self.crop(np.array([image.height]), np.array([image.width]), uniforms)
        top, left, height, width = *crops.start[0].tolist(), *crops.shape[0].tolist()
        box = *crops.region_start[0, ::-1].tolist(), *crops.region_end[0, ::-1].tolist()
        window = image.crop((left, top, left + width, top + height))
        view = window.resize((self.size, self.size), Image.Resampling.BILINEAR, box)
        return view.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if crops.flip[0] else view
