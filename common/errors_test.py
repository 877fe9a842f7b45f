"""How a command ends: who of a run's processes says what went wrong, and with which exit status."""

import multiprocessing
import os
import signal
import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch

from common.errors import AgreedError, RankError, UserError, run_command
from common.files import ROOT


@pytest.mark.parametrize(
    ("error", "rank", "joined", "speaks"),
    [
        (UserError, "0", False, True),
        (UserError, "1", False, True),  # the first has not ended it
        (UserError, "2", False, True),  # one of two processes
        (UserError, "1", True, True),
        (RankError, "1", False, True),
        (AgreedError, "0", True, True),
        (AgreedError, "1", True, False),
    ],
)
def test_who_speaks(error, rank, joined, speaks, monkeypatch, capsys):
    first, size = (
        ("SLURM_PROCID", "SLURM_NTASKS")
        if joined
        else ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    )
    monkeypatch.setenv(first, rank)
    monkeypatch.setenv(size, "2")
    monkeypatch.setattr("common.errors.PATIENCE", 0.01)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: joined)
    with pytest.raises(SystemExit, match="^2$"):
        run_command(Mock(side_effect=error("KEY=1: choose 2")), [])
    assert capsys.readouterr().err == ("error: KEY=1: choose 2\n" if speaks else "")


@pytest.mark.parametrize(
    ("error", "code", "printed"),
    [
        (
            UserError("a\nb\x1b\u2028\u202e\udcff: ü漢\u200d"),
            2,
            "error: a\\nb\\x1b\\u2028\\u202e\\udcff: ü漢\u200d\n",
        ),
        (
            FileNotFoundError(2, "No such file or directory", "a\nb"),
            2,
            "error: a\\nb: No such file or directory\n",
        ),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_an_end_without_a_traceback(error, code, printed, capsys):
    main = Mock(side_effect=error)
    with pytest.raises(SystemExit, match=f"^{code}$"):
        run_command(main, [])
    assert capsys.readouterr().err == printed
    with pytest.raises(type(error) if code == 2 else SystemExit):
        run_command(main, ["--debug"])


def test_semaphores_that_cannot_be_written_are_explained(monkeypatch, capsys):
    denied = Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr("_multiprocessing.SemLock", denied)
    with pytest.raises(SystemExit, match="^2$"):
        run_command(lambda _: multiprocessing.Lock(), [])
    assert capsys.readouterr().err.startswith("error: /dev/shm: Permission denied: worker ")


def test_a_closed_standard_output_ends_quietly():
    program = (
        "from common.errors import run_command; run_command(lambda argv: print('line\\n' * 80))"
    )
    command = f'"{sys.executable}" -c "{program}" | true; exit ${{PIPESTATUS[0]}}'
    ended = subprocess.run(["bash", "-c", command], capture_output=True)
    assert (ended.returncode, ended.stderr) == (141, b"")


MEASUREMENTS = "gpu.py", "testing.py"
SCRIPTS = [
    str(path)
    for path in sorted([*ROOT.glob("scripts/*.py"), *ROOT.glob("*/train*.py")])
    if "__main__" in path.read_text() and path.name not in MEASUREMENTS and "_test" not in path.name
]
COMMANDS = [[path] for path in SCRIPTS]
COMMANDS += [["-m", "imagenet_dali.prepare"], ["-m", "common.launch.signals"]]


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_while_a_script_imports_ends_it_quietly(command, tmp_path):
    for name in ("torch", "sklearn", "pydantic"):  # each script imports one of them
        interrupt = f"import os; os.kill(os.getpid(), {signal.SIGINT.value})"
        (tmp_path / f"{name}.py").write_text(interrupt)
    environ = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ended = subprocess.run([sys.executable, *command], env=environ, capture_output=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, b"", b"")


def test_a_program_that_imports_the_project_keeps_its_handler():
    program = (
        "import signal, common.errors; print(signal.getsignal(2) is signal.default_int_handler)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.stdout == "True\n"
