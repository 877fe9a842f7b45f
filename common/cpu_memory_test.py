import os
import subprocess
import sys

import pytest

# Page faults of the tenth time that 64 MiB are taken, written and freed.
FAULTS = """
import resource
from common.cpu_memory import keep_freed_memory
if {keep}:
    keep_freed_memory()
for _ in range(10):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = bytearray(b"x") * (64 << 20)
    del block
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(keep: bool, **environ: str) -> int:
    program = [sys.executable, "-c", FAULTS.format(keep=keep)]
    path = os.pathsep.join(filter(None, sys.path))
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": path} | environ
    return int(subprocess.run(program, env=environ, capture_output=True, text=True, check=True).stdout)


def test_freed_memory_is_used_again() -> None:
    assert faults(keep=False) > 30  # pages of 2 MiB at most
    assert faults(keep=True) < 5


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_"])
def test_the_users_choice_stays(name: str) -> None:
    assert faults(keep=True, **{name: "65536"}) > 30
