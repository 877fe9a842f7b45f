"""Provenance of a result: command, commit, versions and hardware."""

import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from common.hardware import cores, instruction_set

PACKAGES = ("torch", "torchvision", "colossalai", "nvidia-dali-cuda130", "timm")


def describe_run(argv: list[str]) -> dict[str, Any]:
    """Return start time, command line, commit, versions and hardware of this process."""
    return {
        "started": round(time.time(), 2),
        "argv": [sys.argv[0], *argv],
        "commit": _commit(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "hardware": {
            "host": platform.node(),
            "cpu": _cpu(),
            "instruction_set": instruction_set(),
            "cpus": cores(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
    }


def result_columns(about: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the columns of a table of results that say where `describe_run`'s result is from."""
    return {
        "date": format_time(about["started"])[:10],
        "hardware": name_hardware(about["hardware"]),
        "versions": " ".join(f"{name}={number}" for name, number in about["versions"].items() if number),
        "commit": about["commit"],
        "command": format_command(about["argv"]),
    }


def format_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def name_hardware(hardware: Mapping[str, Any]) -> str:
    """Return the GPU's name, or for CPUs a text like "2 cores of AMD EPYC, AVX2", as clouds hide the exact model."""
    if hardware["gpu"]:
        return hardware["gpu"]
    instructions = f", {hardware['instruction_set']}" if "instruction_set" in hardware else ""  # not in older records
    return f"{hardware['cpus']} cores of {hardware['cpu']}{instructions}"


def format_command(words: Iterable[str]) -> str:
    """Return a command line, with absolute paths reduced to file names."""
    return shlex.join(re.sub(r"(^|=)/.*/", r"\1", word) for word in words)


@cache  # files written later do not change the running code
def _commit() -> str | None:
    """Return the project's commit, with "-dirty" if files have changed; None outside a clone."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        answer = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git
        return None
    return answer.stdout.strip() or None


def _cpu() -> str:
    found = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
