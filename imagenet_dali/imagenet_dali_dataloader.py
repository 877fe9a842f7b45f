"""Decode, crop and normalise the JPEGs of a prepared data set with NVIDIA DALI, on GPU or CPU.

Records are read and verified here, and crops are computed from the sampler's random numbers. DALI's
own TFRecord reader verifies nothing and shuffles only within a buffer. On a CPU DALI only decodes:
its resizing takes five times as long as PyTorch's, which has Pillow's pixels.
"""

import ctypes
import functools
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import simplejpeg
import torch
from nvidia.dali import Pipeline, fn, pipeline_def, types
from nvidia.dali.data_node import DataNode
from PIL import Image
from torch import Tensor

from common.data.crops import Crop, Crops, Normalizer, at_size, reflected, resample
from common.data.image_split import Record
from common.data.loader import Batch, Batches, prefetch, to_device
from common.data.sampler import NO_LABEL, Draw
from common.data.workers import RecordReader
from common.errors import UserError
from common.launchers import is_first_process
from imagenet_dali.dataset import TFRecordSplit

if TYPE_CHECKING:
    from common.data.auto_augment import Policy

FILTERS = {"bilinear": types.INTERP_LINEAR, "bicubic": types.INTERP_CUBIC}  # pyright: ignore[reportAttributeAccessIssue]
# Matches the errors of DALI, CUDA and nvJPEG.
OUT_OF_MEMORY = re.compile("out.of.memory|alloc", re.IGNORECASE)
# The version of nvJPEG since which windows are upsampled on the GPU. With an older one DALI decodes
# them on the CPU.
FANCY_WINDOWS = (13, 2)


class RawBatch(NamedTuple):
    """A batch before decoding, whose padding shows the first image."""

    indices: np.ndarray  # rows of the split's table
    jpegs: list[np.ndarray]  # the bytes of each
    crops: Crops
    uniforms: np.ndarray
    labels: np.ndarray
    samples: int  # rows before the padding
    size: int  # pixels of its result


@pipeline_def
def decode_windows(source: Callable[[], tuple]) -> DataNode:
    """Return the graph for a CPU: decode the windows of a batch, uint8 [Y, X, 3] each.

    ``source`` returns a batch: JPEG bytes, start and shape of the windows.
    """
    jpegs, start, shape = fn.external_source(source, num_outputs=3)
    return fn.decoders.image_slice(
        jpegs, start=start, shape=shape, axes=(0, 1), adjust_orientation=False
    )


@pipeline_def
def decode_and_resize(
    source: Callable[[], tuple], filter_: str, device: str, whole: bool
) -> DataNode:
    """Return the graph for a GPU: decode a window, resample a region, mirror; uint8 [3, Y, X].

    With ``whole``, images are decoded whole and cut then.
    ``source`` returns a batch: JPEG bytes, start and shape of the windows, start and end of the
    regions, flips, the sizes that the regions become. ``device`` is "mixed", or "cpu" for tests.
    """
    inputs = fn.external_source(source, num_outputs=7)
    jpegs, start, shape, region_start, region_end, flip, sizes = inputs
    # Upsampling is done the CPU's way: a GPU sees the same pixels.
    options: dict[str, Any] = dict(
        device=device, adjust_orientation=False, jpeg_fancy_upsampling=True
    )
    if whole:
        images = fn.decoders.image(jpegs, **options)
        images = fn.slice(
            images, start, shape, axes=(0, 1), normalized_anchor=False, normalized_shape=False
        )
    else:
        images = fn.decoders.image_slice(jpegs, start=start, shape=shape, axes=(0, 1), **options)
    images = fn.resize(
        images,
        size=sizes,
        interp_type=FILTERS[filter_],
        roi_start=region_start,
        roi_end=region_end,
    )
    mirrored: dict[str, Any] = dict(mirror=flip, dtype=types.UINT8, output_layout="CHW")  # pyright: ignore[reportAttributeAccessIssue]
    return fn.crop_mirror_normalize(images, **mirrored)  # pyright: ignore[reportCallIssue, reportArgumentType]


@functools.cache
def decodes_windows() -> bool:
    """Return whether nvJPEG decodes windows on the GPU with the CPU's pixels; say so once."""
    pipeline = decode_windows(lambda: (), batch_size=1, num_threads=1, device_id=None)
    pipeline.build()  # loads nvJPEG, as long as the pipeline exists
    version = nvjpeg_version()
    del pipeline
    name = f"nvJPEG {'.'.join(map(str, version))}"
    does = (
        "windows of images"
        if version >= FANCY_WINDOWS
        else "whole images, since windows need nvJPEG 13.2"
    )
    if is_first_process():
        print(f"DALI: {name} decodes {does}", flush=True)
    return version >= FANCY_WINDOWS


def nvjpeg_version() -> tuple[int, int]:
    """Return the version of the nvJPEG that was loaded first, which DALI uses; else (0, 0)."""
    major = ctypes.c_int()
    minor = ctypes.c_int()
    for name in ("libnvjpeg.so.13", "libnvjpeg.so.12"):
        with suppress(OSError):
            library = ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
            for part, value in enumerate((major, minor)):
                library.nvjpegGetProperty(part, ctypes.byref(value))
            break
    return major.value, minor.value


class DaliReader:
    """Read draws as normalised images, float32 [B, 3, size, size], and labels, int64 [B].

    ``mean`` and ``std`` are of RGB values from 0 to 1. ``crop`` takes the first numbers of a draw,
    ``augment`` the last. Rows of padding are zeros with label -100. DALI does all but ``augment``
    on a GPU, or if ``resizes``. A record that does not decode raises `UserError` naming its shard,
    number and offset; the reader cannot be used after that.
    """

    def __init__(
        self,
        split: TFRecordSplit,
        crop: Crop,
        *,
        batch: int,
        size: int,
        mean: Sequence[float],
        std: Sequence[float],
        threads: int,
        device: torch.device,
        augment: "Policy | None" = None,
        resizes: bool | None = None,
    ) -> None:
        self.split = split
        self.crop = crop
        self.batch = batch
        self.size = size
        self.threads = threads
        self.device = device
        self.augment = augment
        self._normalize = Normalizer(mean, std, device)
        self.resizes = device.type == "cuda" if resizes is None else resizes
        self.records = RecordReader(split)
        self._resizing = ThreadPoolExecutor(threads, thread_name_prefix="resize")
        self._raw_batches: Iterator[RawBatch] = iter(())
        self._in_flight: deque[RawBatch] = deque()  # given to DALI, not yielded yet
        self._pipeline = self._build()

    def read(self, draws: Iterator[Draw]) -> Batches:
        """Yield the batch of each draw, in order."""
        return prefetch(self._read(draws), self.device)

    def _read(self, draws: Iterator[Draw]) -> Batches:
        # DALI must finish the batches of a pass that was left early before it takes a new one.
        self._raw_batches = iter(())
        while self._run() is not None:
            pass
        self._raw_batches = self._read_raw(draws)
        pending: deque[Callable[[], Batch]] = deque()
        while (decoded := self._run()) is not None:
            if self.resizes:
                pending.append(partial(self._finish, *decoded))
            else:
                pending.append(self._resize(*decoded))
            # The threads resize one more while this one is used.
            if self.resizes or len(pending) > 1:
                yield pending.popleft()()
        for finish in pending:
            yield finish()

    def close(self) -> None:
        """End the reading threads, the resizing ones and DALI's."""
        self.records.close()
        self._resizing.shutdown(cancel_futures=True)
        del self._pipeline

    def _read_raw(self, draws: Iterator[Draw]) -> Iterator[RawBatch]:
        """Yield the draws with their bytes."""
        for draw, records in self.records.read(draws):
            samples = len(records)
            indices = np.maximum(draw.indices, 0)
            # DALI needs an image in every row: padding shows the first one, and becomes zeros.
            if samples < len(indices):
                records = records + [self.split.read(0)] * (len(indices) - samples)
            rows = self.split.records[indices]
            labels = rows["label"].astype(np.int64)
            labels[samples:] = NO_LABEL
            shape = np.stack([rows["height"], rows["width"]], axis=1).astype(np.int64)
            size = draw.image_size or self.size
            crops = at_size(self.crop, size)(shape, draw.uniforms)
            jpegs = [_jpeg(record) for record in records]
            yield RawBatch(indices, jpegs, crops, draw.uniforms, labels, samples, size)

    def _next_inputs(self) -> tuple:
        """Hand DALI its next batch; StopIteration ends the pass."""
        raw = next(self._raw_batches)
        self._in_flight.append(raw)
        *window, flip, _ = raw.crops
        if not self.resizes:
            return raw.jpegs, *window[:2]
        sizes = np.full((len(flip), 2), raw.size, np.float32)
        return raw.jpegs, *window, flip.astype(np.int32), sizes

    def _build(self) -> Pipeline:
        on_gpu = self.device.type == "cuda"
        place = dict(
            batch_size=self.batch,
            num_threads=self.threads,
            device_id=self.device.index if on_gpu else None,
        )
        if not self.resizes:
            return decode_windows(self._next_inputs, **place)
        how = "mixed" if on_gpu else "cpu"
        whole = not decodes_windows()
        return decode_and_resize(self._next_inputs, self.crop.interpolation, how, whole, **place)

    def _run(self) -> tuple[RawBatch, tuple] | None:
        """Return the oldest batch in flight and what DALI made of it; None at a pass's end."""
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        try:
            # On torch's stream: DALI reuses the memory only after the work that is queued there.
            outputs = self._pipeline.run(stream)
        except StopIteration:
            # DALI takes no inputs after the end of a pass until it is reset.
            self._pipeline.reset()
            return None
        except (RuntimeError, MemoryError) as error:
            raise self._explain(error) from error
        return self._in_flight.popleft(), outputs

    def _finish(self, raw: RawBatch, outputs: tuple) -> Batch:
        """Return the batch that DALI has resized."""
        images = _shift(torch.from_dlpack(outputs[0].as_tensor()), raw.crops)
        if self.augment:
            images = self.augment.augment_batch(
                # A copy, since `augment_batch` works in place and the memory is DALI's.
                images.clone(),
                raw.uniforms[:, -self.augment.uniforms :],
            )
        return self._normalized(images, raw)

    def _normalized(self, images_BCYX: Tensor, raw: RawBatch) -> Batch:
        """Return the batch with its padding as zeros, on the device."""
        images = self._normalize(images_BCYX)
        images[raw.samples :] = 0
        return images, to_device(raw.labels, self.device)

    def _resize(self, raw: RawBatch, outputs: tuple) -> Callable[[], Batch]:
        """Resize the windows that DALI has decoded, in threads; return what waits for the batch."""
        images_BYXC = torch.empty(len(raw.jpegs), raw.size, raw.size, 3, dtype=torch.uint8)
        arrays = images_BYXC.numpy()

        def resize(first: int) -> None:
            for row in range(first, raw.samples, self.threads):
                view = resample(
                    np.asarray(outputs[0][row]), raw.crops, row, raw.size, self.crop.interpolation
                )
                if self.augment:
                    uniforms = raw.uniforms[row, -self.augment.uniforms :]
                    view = np.asarray(self.augment(Image.fromarray(view), uniforms))
                arrays[row] = view

        resized = self._resizing.map(resize, range(self.threads))

        def wait() -> Batch:
            for _ in resized:
                pass
            return self._normalized(images_BYXC.permute(0, 3, 1, 2).contiguous(), raw)

        return wait

    def _explain(self, error: Exception) -> Exception:
        """Return what to raise for DALI's error, a record's if a strict decoder refuses it, too."""
        if OUT_OF_MEMORY.search(str(error).partition("Stacktrace")[0]):
            memory = "GPU" if self.device.type == "cuda" else "host"
            return UserError(
                f"DALI has too little memory on the {memory} to decode a batch of {self.batch} "
                "images: lower MICRO_BATCH_SIZE, or raise gradient_accumulation"
            )
        # DALI does not name the record: a strict decoder finds it among the batches in flight.
        for raw in self._in_flight:
            for index, data in zip(raw.indices, raw.jpegs, strict=True):
                try:
                    simplejpeg.decode_jpeg(data)
                except ValueError as reason:
                    return self.split.fault(index, reason)
        return error


def _shift(images_BCYX: Tensor, crops: Crops) -> Tensor:
    """Move mirrored images as ``crops.shift`` says, since DALI cannot pad by reflection."""
    if not crops.shift.any():
        return images_BCYX
    # The images are mirrored already: their columns move the other way.
    shifts = crops.shift[:, 0], np.where(crops.flip, -1, 1) * crops.shift[:, 1]
    rows_BY, columns_BX = (
        to_device(reflected(images_BCYX.shape[2], shift), images_BCYX.device) for shift in shifts
    )
    batch = torch.arange(len(images_BCYX), device=images_BCYX.device)[:, None, None]
    shifted_BYXC = images_BCYX.permute(0, 2, 3, 1)[batch, rows_BY[:, :, None], columns_BX[:, None]]
    return shifted_BYXC.permute(0, 3, 1, 2).contiguous()


def _jpeg(record: Record) -> np.ndarray:
    """Return the bytes of a record as DALI takes them; raise its error if it is bad."""
    if isinstance(record, UserError):
        raise record
    return np.frombuffer(record[0], np.uint8)
