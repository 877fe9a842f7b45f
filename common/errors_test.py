"""Who of a run's processes says what went wrong."""

import socket
import subprocess
import sys

import pytest
import torch

from common.errors import AgreedError, RankError, UserError, run_command


@pytest.mark.parametrize(
    ("error", "rank", "joined", "speaks"),
    [
        (UserError, "0", False, True),
        (UserError, "1", False, False),
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
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: joined)
    with pytest.raises(SystemExit) as ended:
        run_command(main, [])
    assert ended.value.code == 2
    assert capsys.readouterr().err == ("error: KEY=1: choose 2\n" if speaks else "")


def test_an_error_is_one_line_that_does_nothing_to_a_terminal(capsys: pytest.CaptureFixture) -> None:
    def main(argv: list[str]) -> None:
        raise UserError("a\nb\x1b[2J\u2028\udcff: ü漢\u200d")

    with pytest.raises(SystemExit):
        run_command(main, [])
    assert capsys.readouterr().err == "error: a\\nb\\x1b[2J\\u2028\\udcff: ü漢\u200d\n"


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
