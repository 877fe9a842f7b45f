"""A main function called from Python: it raises, and leaves the process as it was."""

import gc
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from tqdm import tqdm

from common import locks
from common.checkpoint.save import list_checkpoints
from common.engine.trainer import Trainer
from common.engine.upstream import gpc
from common.errors import UserError
from common.launch.signals import SIGNALS, stop_signals
from common.metrics.metrics_file import read_metrics
from common.process import Stopped, at_end, ends_cleanly, set_variable
from common.testing.commands import wait_until
from common.testing.tiny_task import train
from common.tools import evaluate, export, predict, report, sweep

IN_STEP_3 = 3


@pytest.fixture(autouse=True)
def _without_garbage() -> None:
    """Close now what the tests of other files have left to the garbage collector."""
    gc.collect()


def describe_process() -> dict[str, Any]:
    """Return what a training changes in its process, by name."""
    cudnn = torch.backends.cudnn
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    opened = [os.readlink(link) for link in links if link.exists()]
    return {
        "threads": threading.enumerate(),
        "processes": psutil.Process().children(recursive=True),
        # Matplotlib keeps its fonts open.
        "files": sorted(path for path in opened if not path.endswith(".ttf")),
        "handlers": [signal.getsignal(number) for number in SIGNALS],
        "environ": dict(os.environ),
        "folder": Path.cwd(),
        "warnings": [*warnings.filters],
        "hooks": (sys.excepthook, threading.excepthook),
        "locks": dict(locks._locks),
        "groups": (dist.is_initialized(), dict(gpc._groups), gpc._config),
        "cudnn": (cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32),
        "precision": (torch.get_float32_matmul_precision(), torch.get_default_dtype()),
        "cores": torch.get_num_threads(),
        "modes": (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")),
    }


def in_step(step: int, action: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ``action`` called at the begin of a step."""
    train_step = Trainer._train_step

    def act(self: Trainer, batches: Any) -> None:
        if self.step == step - 1:
            action()
        train_step(self, batches)

    monkeypatch.setattr(Trainer, "_train_step", act)


def fail() -> None:
    raise RuntimeError("the user's bug")


def interrupt() -> None:
    raise KeyboardInterrupt


def interrupt_exits() -> None:
    """Be interrupted before contexts of torch's have undone what they did."""
    torch.set_grad_enabled(False)
    torch.set_autocast_enabled("cpu", True)
    raise KeyboardInterrupt


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def send_until_recorded(number: int) -> None:
    """Send a signal while a training defers it; return once its thread has recorded it."""
    send(number)()
    wait_until(lambda: stop_signals.received == number)


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; what is imported late is imported now."""
    return train(data, tmp_path_factory.mktemp("first") / "run", "LOG.tensorboard=True")


@pytest.mark.parametrize(
    ("action", "error"),
    [
        (fail, RuntimeError),
        (interrupt, KeyboardInterrupt),
        (interrupt_exits, KeyboardInterrupt),
        (lambda: sys.exit(3), SystemExit),
        (partial(send_until_recorded, signal.SIGINT), Stopped),
        (partial(send_until_recorded, signal.SIGTERM), Stopped),
    ],
    ids=["bug", "KeyboardInterrupt", "in torch", "sys.exit", "Ctrl-C", "SIGTERM"],
)
def test_a_training_that_ends_early_leaves_the_process_as_it_was_and_resumes(
    action, error, trained, data, tmp_path, monkeypatch
):
    monkeypatch.setenv("SLURM_PROCID", "3")  # left over, and overruled by --world_size
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    settings = ("CHECKPOINT_EVERY=1", "DATA.workers=1", "LOG.tensorboard=True")
    flags = ["--world_size=1"]
    before = describe_process()
    with monkeypatch.context() as patch:
        in_step(IN_STEP_3, action, patch)
        with pytest.raises(error):
            train(data, tmp_path / "run", *settings, flags=flags)
    assert describe_process() == before
    # a signal is acted on at the end of the step, an exception within it
    saved = IN_STEP_3 if error is Stopped else IN_STEP_3 - 1
    assert list_checkpoints(tmp_path / "run" / "checkpoints")[0].name == f"step-{saved:08d}"
    train(data, tmp_path / "run", *settings, flags=flags)
    assert describe_process() == before
    assert read_metrics(tmp_path / "run")[-1]["step"] == 10


def test_ctrl_c_while_it_starts_and_a_second_one_raise_at_once(
    trained, data, tmp_path, monkeypatch
):
    """In a notebook the first saves a checkpoint, if the training has begun."""
    before = describe_process()
    with monkeypatch.context() as patch:
        patch.setattr("common.run.train.build_model", lambda **_: send(signal.SIGINT)())
        with pytest.raises(Stopped, match="^stopped by SIGINT$"):
            train(data, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr("common.launch.signals.SAME_PRESS", -1.0)

    def press_twice() -> None:
        send_until_recorded(signal.SIGINT)
        send(signal.SIGINT)()
        pytest.fail("the second has no effect")

    in_step(IN_STEP_3, press_twice, monkeypatch)
    with pytest.raises(Stopped):
        train(data, tmp_path / "run")
    assert describe_process() == before


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        (["LERNING_RATE=1"], []),  # before it starts
        (["INIT=nowhere.pt"], []),  # once the process group has started
        ([], ["--lerning-rate=1"]),
        ([], ["--find-lr=3"]),
        ([], ["--dry-run"]),
    ],
)
def test_what_is_refused_or_does_not_train_leaves_the_process_as_it_was(
    settings, flags, trained, data, tmp_path
):
    before = describe_process()
    if settings or "rning" in "".join(flags):
        with pytest.raises(UserError):
            train(data, tmp_path / "run", *settings, flags=flags)
    else:
        train(data, tmp_path / "run", flags=flags)
    assert describe_process() == before


def test_a_profile_that_fails_can_be_taken_again(trained, data, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        in_step(7, fail, patch)
        with pytest.raises(RuntimeError, match="the user's bug"):
            train(data, tmp_path / "run", flags=["--profile=3"])
    train(data, tmp_path / "run", flags=["--profile=3"])
    assert (tmp_path / "run" / "profile" / "trace.json").is_file()


def test_a_thread_trains_and_a_second_training_at_a_time_is_refused(
    trained, data, tmp_path, monkeypatch
):
    before = describe_process()
    said = []

    def start(name: str) -> None:
        try:
            train(data, tmp_path / name)
        except UserError as error:
            said.append(str(error))

    def start_in_thread(name: str = "second") -> None:
        thread = threading.Thread(target=start, args=(name,))
        thread.start()
        thread.join()

    in_step(IN_STEP_3, start_in_thread, monkeypatch)
    start_in_thread("first")
    (line,) = said
    assert line.startswith("this process trains or evaluates already: wait for its end, or start")
    assert read_metrics(tmp_path / "first")[-1]["step"] == 10
    assert not (tmp_path / "second").exists()
    assert describe_process() == before


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (evaluate.main, ["{run}", "--class-order=z"]),
        (evaluate.main, ["{run}", "--output=/proc/x"]),
        (predict.main, ["{run}", "gone.png"]),
        (predict.main, ["nowhere", "gone.png"]),
        (export.main, []),
        (report.main, ["nowhere"]),
        (sweep.main, ["--output=nowhere"]),
    ],
)
def test_tools_raise_user_errors(main, words, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = describe_process()
    with pytest.raises(UserError):
        main([word.format(run=trained) for word in words])
    assert describe_process() == before


def test_evaluation_and_prediction_leave_the_process_as_it_was(trained, data, capsys):
    before = describe_process()
    evaluate.main([str(trained)])
    predict.main([str(trained), str(data / "test" / "red")])
    assert describe_process() == before
    assert "top1=" in capsys.readouterr().out


def test_a_main_function_within_another_ends_what_is_its_own(monkeypatch):
    monkeypatch.setenv("INNER", "0")
    monkeypatch.delenv("OUTER", raising=False)
    ended = []

    @ends_cleanly
    def inner() -> None:
        set_variable("INNER", None)
        at_end(ended.append, "inner")

    @ends_cleanly
    def outer() -> None:
        set_variable("OUTER", "1")
        at_end(ended.append, "outer")
        inner()
        assert ended == ["inner"]
        assert (os.environ.get("INNER"), os.environ["OUTER"]) == ("0", "1")
        with tqdm(total=1):
            inner()
            assert tqdm.monitor.is_alive()  # of a bar that is left

    outer()
    at_end(ended.append, "nobody")
    assert ended == ["inner", "inner", "outer"]
    assert "OUTER" not in os.environ
    assert not tqdm.monitor.is_alive()
