"""Records that a process of its own reads: the same ones, and nothing of it is left behind."""

import ctypes
import os
import signal
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor

from common.checkpoint.save import newest_checkpoint
from common.data.image_split import Record
from common.data.reader_process import BUFFERS, ReaderProcess
from common.data.sampler import EvalSampler, TrainSampler
from common.data.workers import RecordReader
from common.errors import UserError
from common.run.workers_test import CLONE_NEWNS, when_training
from common.shards.dataset import open_split
from common.testing.commands import forked, has_ended, run_forked, wait_until
from imagenet_dali import imagenet_dali_dataloader
from imagenet_dali.imagenet_dali_dataloader import reads_apart
from imagenet_dali.task import build_eval_loader, build_train_loader
from imagenet_dali.task_test import DATA, PLACED
from imagenet_dali.testing import read, spoil_record, train

LONG = "NUM_EPOCHS=2000", "CHECKPOINT_EVERY=1", "LOG.every=1"


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a process read, as beside a GPU."""
    monkeypatch.setattr(imagenet_dali_dataloader, "reads_apart", lambda *_: True)


def readers() -> list[psutil.Process]:
    """Return the processes that read for this one."""
    found = []
    for child in psutil.Process().children(recursive=True):
        if "reader_process" in " ".join(child.cmdline()):
            found.append(child)
    return found


@pytest.mark.parametrize(
    ("workers", "device", "apart"),
    [
        (None, "cuda", True),
        (4, "cuda", True),
        (0, "cuda", False),
        (None, "cpu", False),
    ],
)
def test_a_process_reads_beside_a_gpu(workers, device, apart):
    assert reads_apart(workers, device) == apart


@pytest.mark.parametrize("order", ["random", "blocks"])
def test_the_records_are_those_of_threads(order, data):
    """In training and evaluation, padding and damaged records included, and after a pass's end."""
    spoil_record(data, "train", 5)
    for split in ("train", "validation"):
        images = open_split(data, split)
        blocks = None
        if order == "blocks":
            blocks = images.block_bounds(12_000)
        if split == "train":
            sampler = TrainSampler(len(images), 40, 10, block_bounds=blocks, seed=0, window=2)
        else:
            sampler = EvalSampler(len(images), 7, block_bounds=blocks)
        threads = RecordReader(images)
        process = ReaderProcess(images)
        for epoch in range(2):
            assert_reads_alike(process, threads, sampler, epoch)
        threads.close()
        process.close()


def assert_reads_alike(
    process: ReaderProcess,
    threads: RecordReader,
    sampler: TrainSampler | EvalSampler,
    epoch: int,
) -> None:
    expected = list(threads.read(sampler.draws(epoch)))
    count = 0
    for draw, records in process.read(sampler.draws(epoch)):
        expected_draw, expected_records = expected[count]
        np.testing.assert_equal(tuple(draw), tuple(expected_draw))
        assert texts_of(records) == texts_of(expected_records)
        count += 1
    assert count == len(expected)
    assert count > BUFFERS  # each is used again


def texts_of(records: Iterable[Record]) -> list[str]:
    """Return what tells records apart: the error, or the label and the bytes."""
    texts = []
    for record in records:
        if isinstance(record, UserError):
            texts.append(repr(record))
        else:
            data, label = record
            texts.append(f"{label} {bytes(data).hex()}")
    return texts


def test_larger_batches_get_larger_buffers(prepared):
    images = open_split(prepared, "train")
    process = ReaderProcess(images)
    for batch in (4, 120):
        draws = EvalSampler(len(images), batch).draws(0)
        for draw, records in process.read(draws):
            indices = draw.indices[: len(records)]  # without the padding of the last draw
            for (found, _), index in zip(records, indices, strict=True):
                expected, _ = images.read(index)
                assert bytes(found) == bytes(expected)
    process.close()


@pytest.mark.parametrize("order", ["random", "blocks"])
def test_batches_are_those_of_threads(order, prepared, monkeypatch):
    """After a pass that was left early, and after a restart in the middle of the next one."""
    data = DATA | {
        "root": str(prepared),
        "block": 0.012,
        "randaugment": (2, 5),
    }

    def batches_read_by(expected: type) -> list[tuple[Tensor, Tensor]]:
        left = build_train_loader(data, 24, 8, order=order, seed=1, **PLACED)
        resumed = build_train_loader(data, 24, 8, order=order, seed=1, **PLACED)
        next(iter(left))
        batches = [next(iter(left))]
        resumed.load_state_dict(left.state_dict())
        batches += [*resumed]
        batches += read(resumed)
        batches += read(build_eval_loader(data, 7, **PLACED))
        left.close()
        assert type(left.reader.records) is expected
        return batches

    monkeypatch.setattr(imagenet_dali_dataloader, "reads_apart", lambda *_: False)
    by_threads = batches_read_by(RecordReader)
    monkeypatch.setattr(imagenet_dali_dataloader, "reads_apart", lambda *_: True)
    by_process = batches_read_by(ReaderProcess)
    torch.testing.assert_close(by_process, by_threads, rtol=0, atol=0)


def test_a_run_resumes_to_the_bit(colours, tmp_path, monkeypatch):
    """With a process that reads, it ends as without, also if it is resumed within an epoch."""
    settings = [
        f"DATA.root={colours}",
        "DATA.workers=1",
        "NUM_EPOCHS=2",
        "CHECKPOINT_EVERY=4",
    ]
    train(tmp_path, "threads", *settings)
    monkeypatch.setattr(imagenet_dali_dataloader, "reads_apart", lambda *_: True)
    train(tmp_path, "whole", *settings)
    fourth = tmp_path / "whole/checkpoints/step-00000004"
    train(tmp_path, "resumed", *settings, flags=["--resume", str(fourth)])
    last = "checkpoints/step-00000006/model.safetensors"
    expected = (tmp_path / "threads" / last).read_bytes()
    assert (tmp_path / "whole" / last).read_bytes() == expected
    assert (tmp_path / "resumed" / last).read_bytes() == expected
    assert not readers()


def test_a_reader_that_is_killed_ends_the_run(apart, colours, tmp_path):
    def main(argv: list[str]) -> None:
        when_training(tmp_path / "run", lambda: readers()[0].kill())
        train(tmp_path, "run", f"DATA.root={colours}", *LONG)

    ended = run_forked(main, code=2)
    last_line = ended.stderr.splitlines()[-1]
    assert last_line.startswith(
        "error: the process that reads records has died, status -9; if that was for lack of memory "
    )
    assert newest_checkpoint(tmp_path / "run/checkpoints")


def test_a_reader_ends_with_a_trainer_that_is_killed(apart, colours, tmp_path):
    def main(argv: list[str]) -> None:
        train(tmp_path, "run", f"DATA.root={colours}", *LONG)

    with forked(main) as (process, _, _):
        wait_until(readers)  # begins after the start of the run
        (reader,) = readers()
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: has_ended(reader.pid), 10)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGTERM, 143, id="15"),
        pytest.param(signal.SIGINT, -signal.SIGINT, id="2"),
    ],
)
def test_a_signal_to_all_processes_ends_in_a_checkpoint(number, code, apart, colours, tmp_path):
    """As Slurm and Ctrl-C send it; the reader may be stuck, too."""

    def main(argv: list[str]) -> None:
        def signal_all() -> None:
            (reader,) = readers()
            (tmp_path / "reader").write_text(str(reader.pid))
            os.kill(reader.pid, number)
            os.kill(os.getpid(), number)

        when_training(tmp_path / "run", signal_all)
        train(tmp_path, "run", f"DATA.root={colours}", *LONG)

    ended = run_forked(main, code=code)
    assert "stopping after this step\n" in ended.stderr
    reader_pid = int((tmp_path / "reader").read_text())
    assert has_ended(reader_pid)
    assert newest_checkpoint(tmp_path / "run/checkpoints")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a file system")
def test_a_full_dev_shm_does_not_matter(apart, colours, tmp_path):
    """And no name is left in there."""

    def main(argv: list[str]) -> None:
        assert ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) == 0
        private = "mount --make-rprivate /"
        small = "mount -t tmpfs -o size=64k tmpfs /dev/shm"
        for command in (private, small):
            subprocess.run(command.split(), check=True)
        with suppress(OSError):
            Path("/dev/shm/full").write_bytes(bytes(1 << 17))
        train(tmp_path, "run", f"DATA.root={colours}", "MAX_STEPS=4")
        assert os.listdir("/dev/shm") == ["full"]

    last_line = run_forked(main).stdout.splitlines()[-1]
    assert last_line.startswith("top1=")


def test_a_reader_starts_without_torch(prepared):
    """It would take 2 s and 200 MB."""
    process = ReaderProcess(open_split(prepared, "train"))
    batches = process.read(EvalSampler(8, 4).draws(0))
    next(batches)
    (reader,) = readers()
    for mapped in reader.memory_maps():
        assert "torch" not in mapped.path
    process.close()


def test_storage_that_fails_is_named(apart, data):
    """The error of the process is raised here."""
    given = DATA | {"root": str(data)}
    loader = build_train_loader(given, 8, 8, seed=1, **PLACED)
    shard = data / "train/train-00001-of-00003"
    shard.unlink()
    with pytest.raises(OSError, match=f"No such file or directory: '{shard}'"):
        read(loader)
