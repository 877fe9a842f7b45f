"""Records that a process of its own reads: the same ones, and nothing of it is left behind."""

import ctypes
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

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
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "reader_process" in " ".join(child.cmdline())]


@pytest.mark.parametrize(
    ("workers", "device", "apart"),
    [(None, "cuda", True), (4, "cuda", True), (0, "cuda", False), (None, "cpu", False)],
)
def test_a_process_reads_beside_a_gpu(workers, device, apart):
    assert reads_apart(workers, device) == apart


@pytest.mark.parametrize("order", ["random", "blocks"])
def test_the_records_are_those_of_threads(order, data):
    """In training and evaluation, padding and damaged records included, and after a pass's end."""
    spoil_record(data, "train", 5)
    for split, sampler in (("train", TrainSampler), ("validation", EvalSampler)):
        images = open_split(data, split)
        blocks = images.block_bounds(12_000) if order == "blocks" else None
        given = (40, 10) if split == "train" else (7,)
        options = dict(seed=0, window=2) if split == "train" else {}
        draws = sampler(len(images), *given, block_bounds=blocks, **options).draws
        threads = RecordReader(images)
        process = ReaderProcess(images)
        for epoch in range(2):
            expected = list(threads.read(draws(epoch)))
            count = 0
            for draw, records in process.read(draws(epoch)):
                expected_draw, expected_records = expected[count]
                np.testing.assert_equal(tuple(draw), tuple(expected_draw))
                assert list(map(repr_of, records)) == list(map(repr_of, expected_records))
                count += 1
            assert count == len(expected) > BUFFERS
        threads.close()
        process.close()


def repr_of(record: Record) -> str:
    if isinstance(record, UserError):
        return repr(record)
    data, label = record
    return f"{label} {bytes(data).hex()}"


def test_larger_batches_get_larger_buffers(prepared):
    images = open_split(prepared, "train")
    process = ReaderProcess(images)
    for batch in (4, 120):
        draws = EvalSampler(len(images), batch).draws(0)
        for draw, records in process.read(draws):
            assert [bytes(data) for data, _ in records] == [
                bytes(images.read(index)[0]) for index in draw.indices[: len(records)]
            ]
    process.close()


@pytest.mark.parametrize("order", ["random", "blocks"])
def test_batches_are_those_of_threads(order, prepared, monkeypatch):
    """After a pass that was left early, and after a restart in the middle of the next one."""
    data = DATA | {"root": str(prepared), "block": 0.012, "randaugment": (2, 5)}
    shown = []
    for apart in (False, True):
        monkeypatch.setattr(imagenet_dali_dataloader, "reads_apart", lambda *_, is_=apart: is_)
        loaders = [build_train_loader(data, 24, 8, order=order, seed=1, **PLACED) for _ in range(2)]
        left, resumed = loaders
        next(iter(left))
        batches = [next(iter(left))]
        resumed.load_state_dict(left.state_dict())
        batches += [*resumed, *read(resumed), *read(build_eval_loader(data, 7, **PLACED))]
        left.close()
        assert type(left.reader.records) is (ReaderProcess if apart else RecordReader)
        shown.append(batches)
    torch.testing.assert_close(*shown, rtol=0, atol=0)


def test_a_run_resumes_to_the_bit(colours, tmp_path, monkeypatch):
    """With a process that reads, it ends as without, also if it is resumed within an epoch."""
    settings = f"DATA.root={colours}", "DATA.workers=1", "NUM_EPOCHS=2", "CHECKPOINT_EVERY=4"
    train(tmp_path, "threads", *settings)
    monkeypatch.setattr(imagenet_dali_dataloader, "reads_apart", lambda *_: True)
    train(tmp_path, "whole", *settings)
    fourth = tmp_path / "whole/checkpoints/step-00000004"
    train(tmp_path, "resumed", *settings, flags=["--resume", str(fourth)])
    weights = {
        (tmp_path / output / "checkpoints/step-00000006/model.safetensors").read_bytes()
        for output in ("threads", "whole", "resumed")
    }
    assert len(weights) == 1
    assert not readers()


def test_a_reader_that_is_killed_ends_the_run(apart, colours, tmp_path):
    def main(argv: list[str]) -> None:
        when_training(tmp_path / "run", lambda: readers()[0].kill())
        train(tmp_path, "run", f"DATA.root={colours}", *LONG)

    *_, line = run_forked(main, code=2).stderr.splitlines()
    assert line.startswith(
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_all_processes_ends_in_a_checkpoint(number, apart, colours, tmp_path):
    """As Slurm and Ctrl-C send it; the reader may be stuck, too."""

    def main(argv: list[str]) -> None:
        def signal_all() -> None:
            (reader,) = readers()
            (tmp_path / "reader").write_text(str(reader.pid))
            for pid in (reader.pid, os.getpid()):
                os.kill(pid, number)

        when_training(tmp_path / "run", signal_all)
        train(tmp_path, "run", f"DATA.root={colours}", *LONG)

    code = 143 if number == signal.SIGTERM else -signal.SIGINT
    ended = run_forked(main, code=code)
    assert "stopping after this step\n" in ended.stderr
    assert has_ended(int((tmp_path / "reader").read_text()))
    assert newest_checkpoint(tmp_path / "run/checkpoints")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a file system")
def test_a_full_dev_shm_does_not_matter(apart, colours, tmp_path):
    """And no name is left in there."""

    def main(argv: list[str]) -> None:
        assert ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) == 0
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/dev/shm"], check=True)
        with suppress(OSError):
            Path("/dev/shm/full").write_bytes(bytes(1 << 17))
        train(tmp_path, "run", f"DATA.root={colours}", "MAX_STEPS=4")
        assert os.listdir("/dev/shm") == ["full"]

    assert run_forked(main).stdout.splitlines()[-1].startswith("top1=")


def test_a_reader_starts_without_torch(prepared):
    """It would take 2 s and 200 MB."""
    process = ReaderProcess(open_split(prepared, "train"))
    batches = process.read(EvalSampler(8, 4).draws(0))
    next(batches)
    (reader,) = readers()
    assert not [mapped for mapped in reader.memory_maps() if "torch" in mapped.path]
    process.close()


def test_storage_that_fails_is_named(apart, data):
    """The error of the process is raised here."""
    loader = build_train_loader(DATA | {"root": str(data)}, 8, 8, seed=1, **PLACED)
    shard = data / "train/train-00001-of-00003"
    shard.unlink()
    with pytest.raises(OSError, match=f"No such file or directory: '{shard}'"):
        read(loader)
