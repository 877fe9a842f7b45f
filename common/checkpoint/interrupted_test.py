"""A run that is interrupted, and whose command is rerun, ends with the uninterrupted run's result
to the bit.
"""

import errno
import itertools
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.checkpoint import save
from common.checkpoint.hook import CheckpointHook
from common.checkpoint.save import list_checkpoints
from common.testing import tiny_task
from common.testing.checkpoints import read_result
from common.testing.commands import Ended, run_forked

SETTINGS = (
    "CHECKPOINT_EVERY=3",
    "EVAL_EVERY=1",
    "EMA=0.9",
    "MODEL.dropout=0.1",
    "LOG.every=2",
    "gradient_accumulation=2",
    "IMAGE_SIZES=[(1, 8, 14)]",  # 16 pixels follow, in micro-batches of 7
)  # 2 epochs of 5 steps
Inject = Callable[[], object]


def run(data: Path, output: Path, inject: Inject = lambda: None, code: int = 0) -> Ended:
    """Run the command in a process of its own, in which ``inject()`` is called first; expect exit
    status ``code``.
    """

    def main(argv: list[str]) -> None:
        inject()
        tiny_task.train(data, output, *SETTINGS)

    return run_forked(main, code=code)


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of the uninterrupted run."""
    output = tmp_path_factory.mktemp("whole") / "run"
    said = run(data, output).words
    assert "from step 6: 16 x 16 pixels in micro-batches of 7 " in said
    return read_result(output)


def rerun(data: Path, output: Path, whole: dict[str, Any]) -> Ended:
    """Rerun the command to the end, and compare the result."""
    ended = run(data, output)
    found = read_result(output)
    assert [name for name in whole if found[name] != whole[name]] == []
    return ended


def at(owner: Any, name: str, call: int, action: Inject, until: float = 0) -> Inject:
    """Return what lets ``action`` be called before call number ``call`` of a function, and before
    those ``until``.
    """

    def inject() -> None:
        function = getattr(owner, name)
        calls = itertools.count(1)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            if call <= next(calls) <= max(call, until):
                action()
            return function(*arguments, **options)

        setattr(owner, name, wrapped)

    return inject


def send(number: int) -> Inject:
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("owner", "name", "call"), [(CheckpointHook, "after_test_iter", 2), (save, "save_file", 7)]
)
def test_kill_9(owner, name, call, data, whole, tmp_path):
    """In an evaluation, and in the middle of the second checkpoint."""
    run(data, tmp_path / "run", at(owner, name, call, send(signal.SIGKILL)), -signal.SIGKILL)
    rerun(data, tmp_path / "run", whole)


def test_a_job_that_is_stopped_and_requeued(data, whole, tmp_path):
    """Slurm warns with SIGUSR1 before the time limit, and ends a job with SIGTERM."""
    for number, name, code in (
        (signal.SIGUSR1, "SIGUSR1", 143),
        (signal.SIGTERM, "SIGTERM", 143),
        (signal.SIGINT, "Ctrl-C", -signal.SIGINT),  # a shell shows it as 130
    ):
        ended = run(
            data, tmp_path / "run", at(CheckpointHook, "after_train_iter", 2, send(number)), code
        )
        newest = list_checkpoints(tmp_path / "run" / "checkpoints")[0]
        assert f"{name}: stopped; rerun the command to resume from {newest}\n" in ended.stdout
    (shutil.copytree(data, tmp_path / "data") / "train/red/04.png").unlink()
    assert "DATA.root differs" in run(tmp_path / "data", tmp_path / "run", code=2).stderr
    rerun(data, tmp_path / "run", whole)


def test_a_full_disk(data, whole, tmp_path):
    def fail() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    ended = run(data, tmp_path / "run", at(save, "save_file", 6, fail, until=float("inf")), 2)
    first = tmp_path / "run" / "checkpoints" / "step-00000003"
    said = f"could not be written (No space left on device); the newest checkpoint is {first}"
    assert (
        f"warning: {first.with_name('step-00000005')} {said}; training continues\n" in ended.stderr
    )
    assert ended.stderr.splitlines()[-1] == f"error: {first.with_name('step-00000010')} {said}"
    assert f"resuming from {first}\n" in rerun(data, tmp_path / "run", whole).stdout
