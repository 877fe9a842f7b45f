"""Decode, crop and normalise the JPEGs of a prepared data set with NVIDIA DALI, on the GPU or the CPU.

Records are read and verified here, and crops are computed from the sampler's random numbers; DALI decodes. Its own
TFRecord reader verifies nothing and shuffles only within a buffer.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from nvidia.dali import Pipeline, fn, pipeline_def, types
from nvidia.dali.data_node import DataNode
from torch import Tensor

from common.data.crops import CenterCrop, Crops, RandomCrop
from common.data.sampling import NO_LABEL, PADDING, Draw
from imagenet_dali.dataset import Split

# more threads than cores, because they wait for the disk; in large parts, because from memory they are bound by the GIL
READING_THREADS = 8
RECORDS_PER_READ = 64
BATCHES_READ_AHEAD = 3
FILTERS = {"bilinear": types.INTERP_LINEAR, "bicubic": types.INTERP_CUBIC}  # pyright: ignore[reportAttributeAccessIssue]


class RawBatch(NamedTuple):
    """A batch before decoding: rows of the split's table, JPEG bytes, crops; only the first ``samples`` are used."""

    indices: np.ndarray
    jpegs: list[np.ndarray]
    crops: Crops
    samples: int


@pipeline_def
def decode_pipeline(
    source: Callable[[], tuple], size: int, filter_: str, mean: Sequence[float], std: Sequence[float], on_gpu: bool
) -> tuple[DataNode, DataNode]:
    """Return the graph: decode a window, resample a region of it to ``size``, normalise and mirror.

    ``source`` returns a batch: JPEG bytes, start and shape of the windows, start and end of the regions, flips, labels.
    """
    jpegs, start, shape, region_start, region_end, flip, labels = fn.external_source(source, num_outputs=7)
    images = fn.decoders.image_slice(
        jpegs,
        device="mixed" if on_gpu else "cpu",
        start=start,
        shape=shape,
        axes=(0, 1),
        adjust_orientation=False,
        jpeg_fancy_upsampling=True,  # the CPU's way, so that a GPU sees the same pixels
    )
    images = fn.resize(
        images, size=(size, size), interp_type=FILTERS[filter_], roi_start=region_start, roi_end=region_end
    )
    images = fn.crop_mirror_normalize(  # pyright: ignore[reportCallIssue]
        images,  # pyright: ignore[reportArgumentType]
        mirror=flip,
        mean=[255 * value for value in mean],
        std=[255 * value for value in std],
        dtype=types.FLOAT,  # pyright: ignore[reportAttributeAccessIssue]
        output_layout="CHW",
    )
    return images, labels.gpu() if on_gpu else labels


class DaliReader:
    """Read draws of a split as normalised images, float32 [B, 3, size, size], and labels, int64 [B], on ``device``.

    ``mean`` and ``std`` are of RGB values from 0 to 1. Rows of padding are zeros with label -100. A record that does
    not decode raises `UserError` naming its shard, number and offset; the reader cannot be used after that.
    """

    def __init__(
        self,
        split: Split,
        crop: RandomCrop | CenterCrop,
        *,
        batch: int,
        size: int,
        mean: Sequence[float],
        std: Sequence[float],
        threads: int,
        device: torch.device,
    ) -> None:
        self.split, self.crop, self.batch, self.device = split, crop, batch, device
        self._graph = {
            "size": size,
            "filter_": crop.interpolation,
            "mean": mean,
            "std": std,
            "on_gpu": device.type == "cuda",
        }
        self._pool = ThreadPoolExecutor(READING_THREADS, thread_name_prefix="record-reader")
        self._raw_batches: Iterator[RawBatch] = iter(())
        self._in_flight: deque[RawBatch] = deque()  # given to DALI, not yielded yet
        self._pipeline = self._build(self._next_inputs, batch, threads)

    def read(self, draws: Iterator[Draw]) -> Generator[tuple[Tensor, Tensor], None, None]:
        """Yield the batch of each draw, in order."""
        # DALI must finish the batches of a pass that was left early before it takes a new one
        self._raw_batches = iter(())
        while self._run() is not None:
            pass
        self._raw_batches = self._read_ahead(draws)
        while (batch := self._run()) is not None:
            yield batch

    def close(self) -> None:
        """End the reading threads and DALI's."""
        self._pool.shutdown(cancel_futures=True)
        del self._pipeline

    def _read_ahead(self, draws: Iterator[Draw]) -> Iterator[RawBatch]:
        """Yield the draws with their bytes, while the pool reads the next batches."""
        pending: deque[tuple[RawBatch, list[Future[list[np.ndarray]]]]] = deque()
        for draw in draws:
            samples = int(np.count_nonzero(draw.indices != PADDING))
            # DALI refuses an empty batch: one of padding only decodes an image that is not used
            indices = np.maximum(draw.indices[: max(1, samples)], 0)
            records = self.split.records[indices]
            crops = self.crop(records["height"], records["width"], draw.uniforms)
            parts = np.split(indices, range(RECORDS_PER_READ, len(indices), RECORDS_PER_READ))
            reads = [self._pool.submit(self._read_records, part) for part in parts]
            pending.append((RawBatch(indices, [], crops, samples), reads))
            if len(pending) > BATCHES_READ_AHEAD:
                yield _collect(*pending.popleft())
        while pending:
            yield _collect(*pending.popleft())

    def _read_records(self, indices: np.ndarray) -> list[np.ndarray]:
        return [np.frombuffer(self.split.read(index)[0], np.uint8) for index in indices.tolist()]

    def _next_inputs(self) -> tuple:
        """Hand DALI its next batch; StopIteration ends the pass."""
        raw = next(self._raw_batches)
        self._in_flight.append(raw)
        return self._inputs(raw)

    def _inputs(self, raw: RawBatch) -> tuple:
        labels = self.split.records["label"][raw.indices].astype(np.int64)
        return raw.jpegs, *raw.crops._replace(flip=raw.crops.flip.astype(np.int32)), labels

    def _build(self, source: Callable[[], tuple], batch: int, threads: int) -> Pipeline:
        device_id = self.device.index if self.device.type == "cuda" else None
        return decode_pipeline(source, **self._graph, batch_size=batch, num_threads=threads, device_id=device_id)

    def _run(self) -> tuple[Tensor, Tensor] | None:
        """Return the oldest batch in flight; None at the end of the pass."""
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        try:
            # bound to torch's stream: DALI reuses the memory only after the work that is queued there
            outputs = self._pipeline.run(stream)
        except StopIteration:
            self._pipeline.reset()
            return None
        except RuntimeError as error:
            raise self._explain(error) from error
        images, labels = (torch.from_dlpack(output.as_tensor()) for output in outputs)
        samples = self._in_flight.popleft().samples
        missing = self.batch - samples
        if missing:
            images = torch.cat([images[:samples], images.new_zeros(missing, *images.shape[1:])])
            labels = torch.cat([labels[:samples], labels.new_full((missing,), NO_LABEL)])
        return images, labels

    def _explain(self, error: RuntimeError) -> Exception:
        """Return what to raise for DALI's error: decode the batches in flight image by image to find the record."""
        samples = [
            RawBatch(raw.indices[[row]], [raw.jpegs[row]], Crops(*(array[[row]] for array in raw.crops)), 1)
            for raw in self._in_flight
            for row in range(len(raw.indices))
        ]
        inputs = map(self._inputs, samples)
        pipeline = self._build(lambda: next(inputs), 1, 1)
        for sample in samples:
            try:
                pipeline.run()
            except RuntimeError:
                index = sample.indices[0]
                return self.split.fault(index, "DALI cannot decode the image")
        return error


def _collect(raw: RawBatch, reads: list[Future[list[np.ndarray]]]) -> RawBatch:
    return raw._replace(jpegs=[jpeg for read in reads for jpeg in read.result()])
