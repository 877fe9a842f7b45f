"""Loaders of encoded images, which are decoded, cropped and augmented as they are read.

`ImageReader` decodes with simplejpeg or Pillow in worker processes. The reader of
`imagenet_dali` sees the same samples, crops and flips, and the same pixels but for rounding: to
within 0.3 grey levels in the mean of an image.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from PIL import Image
from simplejpeg import decode_jpeg
from torch import Tensor

from common.data.bad_images import BadImages
from common.data.crops import (
    CROP_UNIFORMS,
    CenterCrop,
    Crop,
    Normalizer,
    RandomCrop,
    SimpleCrop,
    at_size,
    crop_image,
)
from common.data.decoding import decode_image
from common.data.image_split import ImageSplit, Record
from common.data.loader import Batch, Batches, BatchReader, Loader, prefetch, to_device
from common.data.sampler import NO_LABEL, PADDING, Draw, EvalSampler, TrainSampler
from common.data.sharing import ALONE, Sharing
from common.data.workers import RecordReader, WorkerPool
from common.errors import UserError
from common.files import Values
from common.hardware import rank_cores
from common.text import first_line

# Keys of DATA for small images, which are held in memory.
UNUSED = ("crop_padding", "autoaugment")
# Keys of DATA for shards and tables of labels.
SHARDS_ONLY = ("order", "block", "window", "labels", "columns")


class DecodingReader:
    """The end of a batch, for readers of encoded images: normalised, on the device.

    Ranks that share the decoding gather it before that, as uint8.
    """

    def __init__(
        self,
        split: ImageSplit,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device,
        dp_size: int,
        sharing: Sharing,
    ):
        self.device = device
        self.sharing = sharing
        self._bad = BadImages(len(split) / dp_size)
        self._normalize = Normalizer(mean, std, device)

    def _finish(self, images: Tensor, labels: np.ndarray, bad: list[str]) -> Any:
        """Return the batch of uint8 images; where others have rows of it, what `join` takes."""
        if self.sharing.size > 1:
            return images, labels, bad
        return self._complete(images, labels, bad)

    def _complete(self, images: Tensor, labels: np.ndarray, bad: list[str]) -> Batch:
        self._bad.add(bad)
        return self._normalize(images, labels == NO_LABEL), to_device(labels, self.device)

    def join(self, parts: Any, sharing: Sharing, total: int) -> Batch:
        """Return the whole batch, of ``total`` rows; all ranks count its bad images."""
        images, *on_host = parts
        # First: the host waits here until all ranks have decoded, and notices one that died.
        labels, bad = zip(*sharing.gather_objects(on_host), strict=True)
        return self._complete(
            sharing.gather(images, total), np.concatenate(labels)[:total], [*chain(*bad)]
        )


class ImageReader(DecodingReader):
    """Read draws as normalised images, float32 [B, 3, size, size], and labels, int64 [B].

    ``mean`` and ``std`` are of RGB values from 0 to 1. ``crop`` takes the first numbers of a draw,
    ``augment``, a `Policy` or `TimmRandAugment`, the last. Whole batches are made by ``workers``
    processes, one a core if None, or in this one if 0; of draws with spans, each of which is read
    once, the workers only decode. Rows of padding, and of images that cannot be read, are zeros
    with label -100. The latter are named on stderr; more than `MAX_BAD_SHARE` of what one of
    ``dp_size`` processes reads in a pass raises `UserError`, and so does a worker that dies.
    """

    def __init__(
        self,
        split: ImageSplit,
        crop: Crop,
        *,
        size: int,
        mean: Sequence[float],
        std: Sequence[float],
        workers: int | None,
        device: torch.device,
        batch: int = 0,  # its largest draw, for other readers
        dp_size: int = 1,
        sharing: Sharing = ALONE,
        augment: Any = None,
    ):
        super().__init__(split, mean, std, device, dp_size, sharing)
        self._records = RecordReader(split, for_workers=True)
        workers = rank_cores() if workers is None else workers
        self._pool = WorkerPool(partial(_decode_draw, split, crop, size, augment), workers)

    def read(self, draws: Iterator[Draw]) -> Batches:
        """Yield the batch of each draw, in order."""
        self._bad.count = 0
        self._pool.start()
        return prefetch(self._read(draws), self.device)

    def _read(self, draws: Iterator[Draw]) -> Batches:
        for images_BHWC, labels, bad in self._pool.map(self._records.read(draws)):
            images_BCYX = to_device(images_BHWC, self.device).permute(0, 3, 1, 2).contiguous()
            yield self._finish(images_BCYX, labels, bad)

    def close(self) -> None:
        """End the worker processes and the reading threads."""
        self._pool.close()
        self._records.close()


def _decode_draw(
    split: ImageSplit,
    crop: Crop,
    size: int,
    augment: Any,
    task: tuple[Draw, list[Record]],
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return images, uint8 [B, size, size, 3], labels, int64 [B], and messages for bad images.

    ``task`` is a draw and its records, [] to read the images here. A draw's own size is used.
    """
    (indices, uniforms, _, image_size), records = task
    size = image_size or size
    crop = at_size(crop, size)
    # Rows of padding and of bad images stay zero, with `NO_LABEL`.
    images = np.zeros((len(indices), size, size, 3), np.uint8)
    labels = np.full(len(indices), NO_LABEL)
    bad = []
    for row in np.flatnonzero(indices != PADDING):
        try:
            image, label = load_image(split, int(indices[row]), records[row] if records else None)
        except UserError as error:
            bad.append(str(error))
        else:
            view = crop_image(image, crop, size, uniforms[row : row + 1])
            if augment:
                view = augment(Image.fromarray(view), uniforms[row, -augment.uniforms :])
            images[row] = np.asarray(view)
            labels[row] = label
    return images, labels, bad


def load_image(
    split: ImageSplit, index: int, record: Record | None = None
) -> tuple[np.ndarray, int]:
    """Return an image, uint8 [Y, X, 3], and its label, from ``record`` if that is read already."""
    if isinstance(record, UserError):
        raise record
    data, label = record or split.read(index)
    classes = len(split.class_names)
    if not 0 <= label < classes:  # a loss would fail without a name
        raise split.fault(index, f"label {label}, out of range for {classes} classes")
    # Prepared records were decoded strictly once: the fast decoder suffices.
    decode = decode_jpeg if split.is_prepared else decode_image
    try:
        return decode(data), label
    except Exception as error:  # Pillow raises a dozen unrelated types for damaged files
        # Some messages end with the buffer's address: " <_io.BytesIO object at ...>".
        reason = first_line(error).partition(" <")[0]
        raise split.fault(index, reason) from error


def build_train_loader(
    images: ImageSplit,
    data: Values,
    total_batch: int,
    micro_batch: int,
    *,
    image_size: int,
    device: torch.device,
    build_reader: Callable[..., BatchReader] = ImageReader,
    graphs: bool = False,
    **sampling: Any,
) -> Loader:
    """Return the loader of random crops; each epoch permutes ``images``, or their blocks.

    ``graphs`` has no effect: decoding cannot be a CUDA graph. ``sampling`` are ``dp_rank``,
    ``dp_size``, ``sharing``, ``seed``, ``resolutions`` and ``block_bounds`` of `TrainSampler`.
    """
    augment = None
    uniforms = CROP_UNIFORMS
    randaugment = data["randaugment"]
    if randaugment:
        # torchvision takes a second to import
        from common.data.auto_augment import RandAugment, TimmRandAugment

        if isinstance(randaugment, str):
            augment = TimmRandAugment(randaugment, data["mean"], data["interpolation"])
        else:
            augment = RandAugment(*randaugment)
        uniforms += augment.uniforms
    sampling |= dict(num_uniforms=uniforms, repeats=data["repeats"], window=data["window"])
    sampling["balanced"] = images.labels if data["sampling"] else None
    sampler = TrainSampler(len(images), total_batch, micro_batch, **sampling)
    crop = RandomCrop(data["crop_scale"], data["crop_ratio"], data["flip"], data["interpolation"])
    if data["crop"] == "simple":
        crop = SimpleCrop(image_size, data["flip"], data["interpolation"])
    # Smaller images may come in larger micro-batches, and DALI reserves memory for the largest.
    largest = max([micro_batch, *(resolution.micro_batch for resolution in sampler.resolutions)])
    options = _reader_options(data, image_size, sampler, largest, device)
    reader = build_reader(images, crop, augment=augment, **options)
    return Loader(sampler, reader, images.name_image)


def build_eval_loader(
    images: ImageSplit,
    data: Values,
    batch: int,
    *,
    image_size: int,
    device: torch.device,
    build_reader: Callable[..., BatchReader] = ImageReader,
    **sampling: Any,
) -> Loader:
    """Return the loader of centre crops of ``images``, each sample exactly once over all ranks.

    ``sampling`` are ``dp_rank``, ``dp_size``, ``sharing`` and ``block_bounds`` of `EvalSampler`.
    """
    sampler = EvalSampler(len(images), batch, **sampling)
    options = _reader_options(data, image_size, sampler, batch, device)
    return Loader(sampler, build_reader(images, build_eval_crop(data, image_size), **options))


def build_eval_crop(data: Values, image_size: int) -> CenterCrop:
    """Return the crop of evaluation: the centre, ``DATA.eval_crop`` of the short side."""
    # Rounded down, as timm's short side is.
    return CenterCrop(image_size, int(image_size / data["eval_crop"]), data["interpolation"])


def _reader_options(
    data: Values,
    image_size: int,
    sampler: TrainSampler | EvalSampler,
    batch: int,
    device: torch.device,
) -> dict[str, Any]:
    """Return the arguments of a reader that training and evaluation share."""
    return dict(
        size=image_size,
        mean=data["mean"],
        std=data["std"],
        workers=data["workers"],
        device=device,
        dp_size=sampler.dp_size,
        sharing=sampler.sharing,
        batch=len(sampler.sharing.rows(batch)),
    )
