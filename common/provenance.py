"""Where a result is from: command line, commit, versions and hardware."""

import platform
import re
import subprocess
import sys
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from common.hardware import cores, instruction_set

PACKAGES = (
    "torch",
    "torchvision",
    "colossalai",
    "nvidia-dali-cuda130",
    "nvidia-dali-cuda120",
    "timm",
)


def describe_run(argv: list[str]) -> dict[str, Any]:
    """Return start time, command line, commit, versions and hardware of this process."""
    import torch

    cpu = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    return {
        "started": round(time.time(), 2),
        "argv": [sys.argv[0], *argv],
        "commit": _commit(),
        "versions": {"python": platform.python_version()} | package_versions(),
        "hardware": {
            "host": platform.node(),
            "cpu": cpu[1] if cpu else platform.machine(),  # ARM's cpuinfo names no model
            "instruction_set": instruction_set(),
            "cpus": cores(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
    }


def _commit() -> str | None:
    """Return the project's commit, with "-dirty" if files have changed; None outside a clone."""
    # safe.directory: in a container the clone is often another user's.
    # --exclude: the hash alone, not the number of commits since a tag.
    root = Path(__file__).resolve().parents[1]
    command = ["git", "-c", f"safe.directory={root}", "describe", "--always", "--dirty"]
    command += ["--abbrev=12", "--exclude=*"]
    with suppress(OSError):  # git may not be installed, or a folder of PATH not be readable
        answer = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        return answer.stdout.strip() or None
    return None


def package_versions() -> dict[str, str | None]:
    """Return the versions of the packages that compute, None for what is not installed."""
    versions: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions
