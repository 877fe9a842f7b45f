"""What a host has and a container may lack: commands, a home, a user's name, /dev/shm."""

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from common.errors import UserError
from common.files import ROOT
from common.shards import writer
from common.testing.commands import run_forked
from imagenet_dali.testing import prepare_data, train

# Says that torch finds a GPU, and prints what it is started with.
PYTHON = """#!/bin/bash
[ "$1" = -c ] || echo "$@"
"""


@pytest.fixture
def container(tmp_path, monkeypatch) -> Path:
    """A project's folder with a script; PATH has only bash and coreutils."""
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").write_text(PYTHON)
    (tmp_path / ".venv/bin/python").chmod(0o755)
    (tmp_path / "bin").mkdir()
    for command in ("bash", "dirname", "readlink", "sed"):
        (tmp_path / "bin" / command).symlink_to(shutil.which(command))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


STEP = {"SLURM_JOB_ID": "3", "SLURM_STEP_ID": "1", "SLURM_JOB_NODELIST": "a[1-2]"}


@pytest.mark.parametrize(
    ("script", "environ", "words"),
    [
        ("train_torchrun.sh", {}, "--nproc_per_node=gpu"),
        ("train_slurm.sh", STEP, "/task/train.py --port=20025 --config c"),
        ("train_slurm.sh", STEP | {"HOST": "b"}, "/task/train.py --host=b --port=20025 --config c"),
    ],
)
def test_the_scripts_need_neither_nvidia_smi_nor_scontrol(container, script, environ, words):
    command = ["bash", ROOT / "scripts" / script, container / "task/train.py", "--config", "c"]
    (container / "task").mkdir()
    answer = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert words in answer.stdout


def test_a_user_without_name_and_home_and_a_host_without_git_train(container, monkeypatch):
    data = prepare_data(container)

    def main(_: list[str]) -> None:
        os.environ.pop("HOME")
        monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # KeyError
        monkeypatch.setattr("pathlib.Path.home", lambda: 1 / 0)
        os.chdir(container)
        settings = f"DATA.root={data}", "DATA.workers=0", "MAX_STEPS=1"
        train(container, "run", *settings, flags=("--output", "~/run"))

    run_forked(main)
    assert (container / "~/run/checkpoints").is_dir()


def test_worker_processes_without_shared_memory_are_refused_by_name(monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(writer, "ProcessPoolExecutor", fail)
    with pytest.raises(UserError, match=r"--workers=2: .* /dev/shm .Read-only file system.*kers 1"):
        list(writer.parallel_map(str, [1], 2))
