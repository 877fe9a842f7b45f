"""Who of a run's processes says what went wrong."""

import io
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common.errors import AgreedError, RankError, UserError, run_command
from common.testing.commands import wait_until


@pytest.mark.parametrize(
    ("error", "rank", "joined", "speaks"),
    [
        (UserError, "0", False, True),
        (UserError, "1", False, False),
        (UserError, "7", False, True),  # which no process can be
        (UserError, "x", False, True),
        (UserError, "1", True, True),
        (RankError, "1", False, True),
        (AgreedError, "0", True, True),
        (AgreedError, "1", True, False),
    ],
)
def test_who_speaks(error: type, rank: str, joined: bool, speaks: bool, monkeypatch, capsys) -> None:
    def main(argv: list[str]) -> None:
        raise error("KEY=1: choose 2")

    monkeypatch.setenv("SLURM_PROCID", rank)
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: joined)
    with pytest.raises(SystemExit) as ended:
        run_command(main, [])
    assert ended.value.code == 2
    assert capsys.readouterr().err == ("error: KEY=1: choose 2\n" if speaks else "")


def test_an_error_is_one_line_that_does_nothing_to_a_terminal(capsys: pytest.CaptureFixture) -> None:
    def main(argv: list[str]) -> None:
        raise UserError("a\nb\x1b[2J\u2028\u202e\udcff: ü漢\u200d")

    with pytest.raises(SystemExit):
        run_command(main, [])
    assert capsys.readouterr().err == "error: a\\nb\\x1b[2J\\u2028\\u202e\\udcff: ü漢\u200d\n"


def open_loop(argv: list[str]) -> None:
    raise RuntimeError("Symlink loop from '/loop'")  # as Path.resolve until Python 3.12


@pytest.mark.parametrize(
    ("main", "line"),
    [
        (lambda argv: Path("x" * 5000).is_file(), f"{'x' * 100}...: File name too long; choose another path (--debug "),
        (open_loop, "Symlink loop from '/loop'; remove the link or choose another path"),
    ],
)
def test_a_path_that_the_system_refuses_is_one_line(main, line: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_command(main, [])
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: {line}")


def test_what_the_encoding_of_standard_output_lacks_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", output)
    run_command(lambda argv: print("ü"), [])
    assert output.buffer.getvalue() == b"\\xfc\n"


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_stream_that_the_shell_has_closed_ends_no_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, name, None)  # as Python has it after `>&-`
    run_command(lambda argv: getattr(sys, name).write("text"), [])
    getattr(sys, name).close()


def test_a_line_is_one_write_where_python_does_not_buffer() -> None:
    program = """
from common.errors import UserError, run_command
def main(argv): raise UserError("KEY=1: choose 2")
run_command(main, [])
"""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # keeps writes apart
    with ours, theirs:
        subprocess.run([sys.executable, "-u", "-c", program], stderr=theirs, check=False)
        assert ours.recv(4096) == b"error: KEY=1: choose 2\n"


def test_ctrl_c_while_a_script_imports_torch_prints_nothing() -> None:
    script = Path(__file__).parents[1] / "imagenet_dali/train_dali.py"
    process = subprocess.Popen([sys.executable, str(script), "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_until(lambda: "libtorch" in Path(f"/proc/{process.pid}/maps").read_text())
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == (b"", b"")
    assert process.returncode == -signal.SIGINT


def test_ctrl_c_in_a_command_is_exit_status_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    handlers = []

    def main(argv: list[str]) -> None:
        handlers.append(signal.getsignal(signal.SIGINT))
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as ended:
            run_command(main, [])
    finally:
        signal.signal(signal.SIGINT, previous)
    assert (ended.value.code, handlers) == (130, [signal.default_int_handler])
    assert capsys.readouterr().err == ""


def test_ctrl_c_while_python_shuts_down_prints_nothing() -> None:
    program = """
import os, signal, threading, time
from common.errors import run_command
threading.Thread(target=lambda: (time.sleep(0.5), os.kill(os.getpid(), signal.SIGINT), time.sleep(0.2))).start()
run_command(lambda argv: None)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_program_that_imports_ours_keeps_its_handler_of_ctrl_c(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import signal, common\nassert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n")
    subprocess.run([sys.executable, str(program)], check=True, env={"PYTHONPATH": str(Path(__file__).parents[1])})
