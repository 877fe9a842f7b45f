"""Decode, crop and normalise with Pillow in worker processes, as torchvision does.

The DALI loader sees the same samples, crops and flips, and the same pixels to within rounding.
"""

from collections.abc import Generator, Iterator, Sequence
from itertools import chain
from typing import NamedTuple, Protocol, cast

import numpy as np
import simplejpeg
import torch
from PIL import Image
from torch import Tensor

from common.data.corrupt_images import BadImages, reason_of
from common.data.crops import Crop
from common.data.cuda_prefetch import prefetch
from common.data.decode import decode_image
from common.data.micro_batches import NO_LABEL, PADDING, Draw
from common.data.pixels import Normalizer, crop_image
from common.data.record_reader import Record, RecordReader, RecordSource
from common.data.worker_pool import WorkerPool
from common.errors import UserError


class ImageSplit(Protocol):
    """What is read: encoded images and their labels, by number."""

    @property
    def is_prepared(self) -> bool: ...  # whether all are RGB JPEGs whose orientation in EXIF is to be ignored

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[bytes | memoryview, int]: ...

    def fault(self, index: int, reason: object) -> UserError: ...


class Augment(Protocol):
    """Changes the crop of an image, for training, as its numbers in [0, 1) say."""

    uniforms: int  # how many an image takes

    def __call__(self, image: Image.Image, uniforms: np.ndarray) -> Image.Image: ...

    def augment_batch(self, images: Tensor, uniforms: np.ndarray) -> Tensor: ...


class TorchvisionReader:
    """Read draws of a split as normalised images, float32 [B, 3, size, size], and labels, int64 [B], on ``device``.

    ``mean`` and ``std`` are of RGB values from 0 to 1. ``crop`` takes the first numbers of a draw, ``augment`` the
    last. Whole batches are made by ``workers`` processes, or in this one if 0; of draws with spans, each of which is
    read once, and of remote data the workers only decode. Rows of padding, and of images that cannot be read, are zeros
    with label -100.
    The latter are named on stderr; more than `MAX_BAD_SHARE` of what one of ``dp_size`` processes reads in a pass
    raises `UserError`, and so does a worker that dies.
    """

    def __init__(
        self,
        split: ImageSplit,
        crop: Crop,
        *,
        size: int,
        mean: Sequence[float],
        std: Sequence[float],
        workers: int,
        device: torch.device,
        dp_size: int = 1,
        augment: Augment | None = None,
    ) -> None:
        self.device = device
        self._records = RecordReader(cast(RecordSource, split))  # called for draws with spans and remote data only
        self._is_remote = getattr(split, "is_remote", False)  # what reads it does not survive a fork
        self._bad = BadImages(len(split) / dp_size)
        self._normalize = Normalizer(mean, std, device)
        self._pool = WorkerPool(_Batches(split, crop, size, augment), workers)

    def read(self, draws: Iterator[Draw]) -> Generator[tuple[Tensor, Tensor], None, None]:
        """Yield the batch of each draw, in order."""
        self._bad.start_pass()
        return prefetch(self._read(draws), self.device)

    def _read(self, draws: Iterator[Draw]) -> Generator[tuple[Tensor, Tensor], None, None]:
        for images_BHWC, labels, bad in self._pool.map(self._tasks(draws)):
            self._bad.add(bad)
            has_padding = NO_LABEL in labels
            images, labels = (self._to_device(torch.from_numpy(array)) for array in (images_BHWC, labels))
            images = self._normalize(images)
            if has_padding:
                images.masked_fill_((labels == NO_LABEL)[:, None, None, None], 0)
            yield images, labels

    def _to_device(self, tensor: Tensor) -> Tensor:
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def close(self) -> None:
        """End the worker processes and the reading threads."""
        self._pool.close()
        self._records.close()

    def _tasks(self, draws: Iterator[Draw]) -> Iterator[tuple[Draw, list[Record] | None]]:
        """Yield the draws with records that can be sent to another process, or with None for a worker to read them."""
        for first in draws:
            if first.spans is None and not self._is_remote:
                yield first, None
                continue
            for draw, records in self._records.read(chain([first], draws)):
                yield draw, [each if isinstance(each, UserError) else (bytes(each[0]), each[1]) for each in records]


class _Batch(NamedTuple):
    images: np.ndarray  # uint8 [B, size, size, 3]
    labels: np.ndarray  # int64 [B]
    bad: list[str]  # messages about corrupt images


class _Batches:
    """Makes the batch of a draw and its records; without them it reads the images itself."""

    def __init__(self, split: ImageSplit, crop: Crop, size: int, augment: Augment | None) -> None:
        self.split, self.crop, self.size, self.augment = split, crop, size, augment

    def __call__(self, task: tuple[Draw, list[Record] | None]) -> _Batch:
        (indices, uniforms, _), records = task
        images = np.zeros((len(indices), self.size, self.size, 3), np.uint8)
        labels = np.full(len(indices), NO_LABEL)
        bad = []
        for row in np.flatnonzero(indices != PADDING):
            try:
                image, label = self._load(int(indices[row]), records[row] if records else None)
            except UserError as error:
                bad.append(str(error))
            else:
                view = crop_image(image, self.crop, self.size, uniforms[row : row + 1])
                if self.augment:
                    view = self.augment(Image.fromarray(view), uniforms[row, -self.augment.uniforms :])
                images[row] = np.asarray(view)
                labels[row] = label
        return _Batch(images, labels, bad)

    def _load(self, index: int, record: Record | None) -> tuple[np.ndarray, int]:
        if isinstance(record, UserError):
            raise record
        data, label = record or self.split.read(index)
        try:
            return simplejpeg.decode_jpeg(data) if self.split.is_prepared else decode_image(data), label
        except Exception as error:  # Pillow's decoders answer damaged files with a dozen unrelated types
            raise self.split.fault(index, reason_of(error)) from error
