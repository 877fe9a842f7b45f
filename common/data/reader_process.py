"""Read records in a process of its own: a training loop keeps Python's lock to itself.

For a batch of 256 JPEGs of 65 KB, `RecordReader` needs 16 ms of CPU time in Python, on 16 threads
that take the lock from the thread that launches a GPU's kernels. Here that process receives views
of memory. DALI's own way, ``external_source(parallel=True)``, needs /dev/shm, of which containers
have 64 MB, and imports the user's script once more.
"""

import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import numpy as np

from common.data.image_split import ImageSplit, Record
from common.data.sampler import PADDING, Draw
from common.data.workers import MOST_DRAWS_AHEAD, RecordReader
from common.errors import UserError

# Batches in memory. DALI has four at a time: one that it returned, and those that it decodes.
BUFFERS = 6
# The process reads ahead as `RecordReader` does, and fills the buffers.
DRAWS_SENT = MOST_DRAWS_AHEAD + BUFFERS


@dataclass
class Buffer:
    """Memory of two processes that has no name: nothing limits it, and it is freed with them."""

    descriptor: int
    _map: mmap.mmap | None = None

    def of(self, nbytes: int) -> mmap.mmap:
        """Return the memory, of ``nbytes`` at least; it grows first in the process that writes."""
        if self._map is None or len(self._map) < nbytes:
            if os.fstat(self.descriptor).st_size < nbytes:
                os.ftruncate(self.descriptor, nbytes)
            self._map = mmap.mmap(self.descriptor, 0)
        return self._map


class ReaderProcess:
    """Yield draws with their records, as `RecordReader` does, which another process has read.

    The records of a batch are views of a buffer, which is filled again once none of them is left.
    The process is a new program, not a fork, in which CUDA would fail. It gets no signals and ends
    with this one. If it dies, `UserError` is raised.
    """

    def __init__(self, split: ImageSplit):
        self.split = split
        self._process: subprocess.Popen[bytes] | None = None

    def read(self, draws: Iterator[Draw]) -> Iterator[tuple[Draw, list[Record]]]:
        """Yield each draw and the records of its samples, without padding, in order."""
        sent: deque[Draw] = deque()
        try:
            if not self._process:
                self._start()
            for draw in draws:
                # The random numbers, most of a draw, stay here.
                self._connection.send(draw._replace(uniforms=draw.uniforms[:, :0]))
                sent.append(draw)
                if len(sent) > DRAWS_SENT:
                    yield self._receive(sent.popleft())
            self._connection.send(None)
            while sent:
                yield self._receive(sent.popleft())
        except BaseException as error:
            # What was asked for is not wanted any more: the next pass starts another process.
            self.close()
            if isinstance(error, EOFError | ConnectionError):
                raise UserError(
                    f"the process that reads records has died, status {self.status}; if that was "
                    "for lack of memory (-9), lower DATA.window or MICRO_BATCH_SIZE"
                ) from error
            raise

    def close(self) -> None:
        """End the process."""
        if self._process:
            self._process.kill()
            self.status = self._process.wait()
            self._connection.close()
            for buffer in self._buffers:
                os.close(buffer.descriptor)
            self._process = None

    def _start(self) -> None:
        self._buffers = [Buffer(os.memfd_create("records")) for _ in range(BUFFERS)]
        self._free = deque(range(BUFFERS))
        self._connection, theirs = multiprocessing.Pipe()
        descriptors = [theirs.fileno(), *(buffer.descriptor for buffer in self._buffers)]
        # Not by multiprocessing, which would import the main script in the process.
        program = (
            f"import sys; sys.path[:] = {sys.path}; from common.data.reader_process import serve; "
            f"serve(*{descriptors})"
        )
        # A program inherits which signals are blocked: Ctrl-C and Slurm reach the trainer alone.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            command = [sys.executable, "-c", program]
            self._process = subprocess.Popen(command, pass_fds=descriptors)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
        self._connection.send(self.split)

    def _receive(self, draw: Draw) -> tuple[Draw, list[Record]]:
        """Return a draw with its records."""
        while self._free:
            self._connection.send(self._free.popleft())
        reply = self._connection.recv()
        if isinstance(reply, Exception):
            raise reply
        number, sizes, faults = reply
        ends = np.cumsum(sizes).tolist()
        memory = np.frombuffer(self._buffers[number].of(sum(sizes)), np.uint8)
        # The views refer to it: with the last of them it is gone.
        weakref.finalize(memory, self._free.append, number)
        labels = self.split.labels[draw.indices[draw.indices != PADDING]].tolist()
        records: list[Record] = [
            (memory[start:end].data, label)
            for (start, end), label in zip(pairwise([0, *ends]), labels, strict=True)
        ]
        for row, fault in faults.items():
            records[row] = fault
        return draw, records


def serve(connection: int, *buffers: int) -> None:
    """Read what the process at the other end of ``connection`` asks for, until that ends."""
    trainer = Connection(connection)
    reader = RecordReader(trainer.recv())
    memory = [Buffer(descriptor) for descriptor in buffers]
    draws: SimpleQueue[Draw | None] = SimpleQueue()
    free: SimpleQueue[int] = SimpleQueue()

    def receive() -> None:
        # At once, so that the trainer never waits to send.
        try:
            while True:
                message = trainer.recv()
                queue: SimpleQueue[Any] = free if isinstance(message, int) else draws
                queue.put(message)
        finally:
            os._exit(0)  # even if the main thread waits for storage

    threading.Thread(target=receive, daemon=True).start()
    try:
        while True:
            for _, records in reader.read(iter(draws.get, None)):
                number = free.get()
                trainer.send((number, *_pack(records, memory[number])))
    except Exception as error:
        trainer.send(error)
        threading.Event().wait()  # for the trainer to end this process


def _pack(records: Sequence[Record], buffer: Buffer) -> tuple[list[int], dict[int, UserError]]:
    """Write the records one after another; return the size of each, and those that are bad."""
    faults = {row: record for row, record in enumerate(records) if isinstance(record, UserError)}
    images = [b"" if isinstance(record, UserError) else record[0] for record in records]
    sizes = [len(image) for image in images]
    memory = buffer.of(max(1, sum(sizes)))
    memory.seek(0)
    for image in images:
        memory.write(image)
    return sizes, faults
