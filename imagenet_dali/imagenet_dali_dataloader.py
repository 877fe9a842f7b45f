"""Decode, crop and normalise the JPEGs of a prepared data set with NVIDIA DALI, on GPU or CPU.

Records are read and verified here, and crops are computed from the sampler's random numbers. DALI's
own TFRecord reader verifies nothing and shuffles only within a buffer.
"""

import ctypes
import functools
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import simplejpeg
import torch
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.data_node import DataNode
from torch import Tensor

from common.data.crops import Crop, Crops, at_size, reflected
from common.data.image_loaders import DecodingReader
from common.data.loader import Batches, prefetch, to_device
from common.data.reader_process import ReaderProcess
from common.data.sampler import NO_LABEL, Draw
from common.data.sharing import ALONE, Sharing
from common.data.workers import RecordReader
from common.errors import UserError
from common.hardware import rank_cores
from common.launchers import is_first_process
from common.shards.dataset import TFRecordSplit

if TYPE_CHECKING:
    from common.data.auto_augment import Policy

FILTERS = {"bilinear": types.INTERP_LINEAR, "bicubic": types.INTERP_CUBIC}  # pyright: ignore[reportAttributeAccessIssue]
# Matches the errors of DALI, CUDA and nvJPEG.
OUT_OF_MEMORY = re.compile("out.of.memory|alloc", re.IGNORECASE)
# The version of nvJPEG since which windows are upsampled on the GPU. With an older one DALI decodes
# them on the CPU.
FANCY_WINDOWS = (13, 2)
# The share of a batch that a GPU's JPEG engines decode. DALI's default, but not in all versions.
HW_DECODER_LOAD = 0.65
# Cores beside a GPU that do not decode: they launch the step's kernels and the loader's.
TRAINER_CORES = 3
# DALI needs an image in every row: padding and damaged records show this one, and become zeros.
BLANK_SIZE = 64
BLANK = np.frombuffer(
    simplejpeg.encode_jpeg(np.zeros((BLANK_SIZE, BLANK_SIZE, 3), np.uint8)), np.uint8
)


class RawBatch(NamedTuple):
    """A batch before decoding, whose padding shows `BLANK`."""

    indices: np.ndarray  # rows of the split's table
    jpegs: list[np.ndarray]  # the bytes of each
    crops: Crops
    windows: np.ndarray  # float32 [B, 10], what DALI takes of the crops, and the size
    uniforms: np.ndarray
    labels: np.ndarray
    bad: list[str]  # messages of the records that are damaged


@pipeline_def
def decode_and_resize(
    source: Callable[[], tuple],
    filter_: str,
    device: str,
    whole: bool,
    hw_decoder_load: float = HW_DECODER_LOAD,
) -> DataNode:
    """Return the graph: decode a window, resample a region, mirror; uint8 [3, Y, X].

    With ``whole``, images are decoded whole and cut then.
    ``source`` returns a batch: JPEG bytes; float32 [B, 10], start and shape of the windows, start
    and end of the regions, flips, the sizes that the regions become. They are not copied: they have
    to stay until the batch is returned. ``device`` is "mixed" or "cpu".
    """
    jpegs, windows = fn.external_source(source, num_outputs=2, no_copy=True)
    integers = fn.cast(windows, dtype=types.INT32)  # pyright: ignore[reportAttributeAccessIssue]
    start = integers[0:2]
    shape = integers[2:4]
    # Upsampling is done the CPU's way: a GPU sees the same pixels.
    options: dict[str, Any] = dict(
        device=device,
        adjust_orientation=False,
        jpeg_fancy_upsampling=True,
        hw_decoder_load=hw_decoder_load,
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
        resize_y=windows[9],
        resize_x=windows[9],
        interp_type=FILTERS[filter_],
        roi_start=windows[4:6],
        roi_end=windows[6:8],
    )
    mirrored: dict[str, Any] = dict(mirror=integers[8], dtype=types.UINT8, output_layout="CHW")  # pyright: ignore[reportAttributeAccessIssue]
    return fn.crop_mirror_normalize(images, **mirrored)  # pyright: ignore[reportCallIssue, reportArgumentType]


@functools.cache
def decodes_windows(device: str) -> bool:
    """Return whether a device decodes windows with `ImageReader`'s pixels; say so once."""
    windows = True
    decoder = "libjpeg-turbo"
    if device == "cuda":
        pipeline = decode_and_resize(
            lambda: (), "bilinear", "cpu", False, batch_size=1, num_threads=1, device_id=None
        )
        pipeline.build()  # loads nvJPEG, as long as the pipeline exists
        version = nvjpeg_version()
        del pipeline
        windows = version >= FANCY_WINDOWS
        number = ".".join(map(str, version))
        decoder = f"nvJPEG {number} (hw_decoder_load={HW_DECODER_LOAD})"
    does = "windows of images" if windows else "whole images, since windows need nvJPEG 13.2"
    if is_first_process():
        print(f"DALI: {decoder} decodes {does}", flush=True)
    return windows


def decoding_threads(workers: int | None, device: str) -> int:
    """Return DALI's threads for DATA.workers; it needs one, even for 0."""
    if workers is None:
        workers = rank_cores() - (TRAINER_CORES if device == "cuda" else 0)
    return max(1, workers)


def reads_apart(workers: int | None, device: str) -> bool:
    """Return whether a process of its own reads the records, except with DATA.workers=0.

    On a CPU nothing waits for Python's lock: decoding takes 20 times as long as reading.
    """
    return device == "cuda" and workers != 0


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


class DaliReader(DecodingReader):
    """Read draws as normalised images, float32 [B, 3, size, size], and labels, int64 [B].

    ``mean`` and ``std`` are of RGB values from 0 to 1. ``crop`` takes the first numbers of a draw,
    ``augment`` the last. Rows of padding, and of records whose checksum does not match, are zeros
    with label -100; `BadImages` counts the latter for one of ``dp_size`` processes. A record with a
    right checksum that does not decode raises `UserError` naming its shard, number and offset; the
    reader cannot be used after that.
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
        workers: int | None,
        device: torch.device,
        dp_size: int = 1,
        sharing: Sharing = ALONE,
        augment: "Policy | None" = None,
    ):
        super().__init__(split, mean, std, device, dp_size, sharing)
        self.split = split
        self.crop = crop
        self.batch = batch
        self.size = size
        self.augment = augment
        read_apart = reads_apart(workers, device.type)
        self.records = ReaderProcess(split) if read_apart else RecordReader(split)
        self._raw_batches: Iterator[RawBatch] = iter(())
        self._in_flight: deque[RawBatch] = deque()  # given to DALI, not yielded yet
        self._pipeline = decode_and_resize(
            self._next_inputs,
            crop.interpolation,
            "mixed" if device.type == "cuda" else "cpu",
            not decodes_windows(device.type),
            batch_size=batch,
            num_threads=decoding_threads(workers, device.type),
            device_id=device.index,
        )

    def read(self, draws: Iterator[Draw]) -> Batches:
        """Yield the batch of each draw, in order."""
        self._bad.count = 0
        return prefetch(self._read(draws), self.device)

    def _read(self, draws: Iterator[Draw]) -> Batches:
        # DALI must finish the batches of a pass that was left early before it takes a new one.
        self._raw_batches = iter(())
        while self._run() is not None:
            pass
        self._raw_batches = self._read_raw(draws)
        while (decoded := self._run()) is not None:
            yield self._augment(*decoded)

    def close(self) -> None:
        """End the reading threads and DALI's."""
        self.records.close()
        del self._pipeline

    def _read_raw(self, draws: Iterator[Draw]) -> Iterator[RawBatch]:
        """Yield the draws with their bytes."""
        for draw, records in self.records.read(draws):
            indices = np.maximum(draw.indices, 0)
            jpegs = [BLANK] * len(indices)
            bad = []
            for row, record in enumerate(records):
                if isinstance(record, UserError):
                    bad.append(str(record))
                else:
                    jpegs[row] = np.frombuffer(record[0], np.uint8)
            is_blank = np.array([jpeg is BLANK for jpeg in jpegs])
            rows = self.split.records[indices]
            labels = np.where(is_blank, NO_LABEL, rows["label"].astype(np.int64))
            shape = np.stack([rows["height"], rows["width"]], axis=1).astype(np.int64)
            shape[is_blank] = BLANK_SIZE
            size = draw.image_size or self.size
            crops = at_size(self.crop, size)(shape, draw.uniforms)
            # An input, not an argument of the graph: epochs may have images of several sizes.
            windows = np.c_[*crops[:5], np.full(len(indices), size)].astype(np.float32)
            yield RawBatch(indices, jpegs, crops, windows, draw.uniforms, labels, bad)

    def _next_inputs(self) -> tuple:
        """Hand DALI its next batch; StopIteration ends the pass."""
        raw = next(self._raw_batches)
        self._in_flight.append(raw)
        return raw.jpegs, raw.windows

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

    def _augment(self, raw: RawBatch, outputs: tuple) -> Any:
        """Return the batch that DALI has resized."""
        images = _shift(torch.from_dlpack(outputs[0].as_tensor()), raw.crops)
        if self.augment or self.sharing.size > 1:
            # The memory is DALI's, which uses it for the next batch.
            images = images.clone()
        if self.augment:
            images = self.augment.augment_batch(images, raw.uniforms[:, -self.augment.uniforms :])
        return self._finish(images, raw.labels, raw.bad)

    def _explain(self, error: Exception) -> Exception:
        """Return what to raise for DALI's error, a record's if a strict decoder refuses it, too."""
        # Without the stack: its function names may contain "alloc" in any error.
        if OUT_OF_MEMORY.search(str(error).partition("Stacktrace")[0]):
            return UserError(
                f"DALI has too little memory to decode a batch of {self.batch} images: lower "
                "MICRO_BATCH_SIZE, or raise gradient_accumulation"
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
