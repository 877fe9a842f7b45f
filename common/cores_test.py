"""Cores of a process: CPU masks, CPU quotas of cgroups, and what the ranks of a host have in common."""

import math
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from common.hardware import CpuLimits, cores, cpu_limits, memory_bytes, share_of_cores

ROOT = Path(__file__).resolve().parent.parent


V1_QUOTA, V1_PERIOD = "cpu.cfs_quota_us", "cpu.cfs_period_us"
CONTAINER = {"v2/cpu.max": "50000 100000"}
IN_V1 = {f"v1/{V1_QUOTA}": "300000", f"v1/{V1_PERIOD}": "100000"}
IN_BOTH = {f"v1/a/{V1_QUOTA}": "-1", f"v1/a/{V1_PERIOD}": "100000", "v2/b/cpu.max": "70000 10000"}


@pytest.mark.parametrize(
    ("mounts", "groups", "files", "quota", "group"),
    [
        ({"v2": "/"}, "0::/", {}, math.inf, ""),
        ({"v2": "/"}, "0::/a/b", {"v2/a/b/cpu.max": "max 100000"}, math.inf, ""),
        ({"v2": "/"}, "0::/a", {"v2/a/cpu.max": "150000 100000"}, 1.5, "v2/a"),
        # lower in the parent
        ({"v2": "/"}, "0::/a/b", {"v2/a/b/cpu.max": "4 1", "v2/a/cpu.max": "200000 100000"}, 2.0, "v2/a"),
        # what a container sees: its own cgroup at the mount point, under its name outside or not
        ({"v2": "/docker/x"}, "0::/docker/x", CONTAINER, 0.5, "v2"),
        ({"v2": "/"}, "0::/../y", CONTAINER, 0.5, "v2"),  # outside the namespace
        ({"v1": "/docker/x"}, "4:cpu,cpuacct:/docker/x\n3:cpuset:/other", IN_V1, 3.0, "v1"),
        ({"v1": "/", "v2": "/"}, "2:cpu:/a\n0::/b", IN_BOTH, 7.0, "v2/b"),
    ],
)
def test_the_quota_of_a_cgroup(tmp_path, mounts, groups, files, quota, group) -> None:
    (tmp_path / "cgroup").write_text(groups + "\n")
    kinds = {"v1": "cgroup cgroup rw,cpu,cpuacct", "v2": "cgroup2 cgroup2 rw,nsdelegate"}
    lines = [f"31 23 0:28 {root} {tmp_path}/{name} rw shared:9 - {kinds[name]}" for name, root in mounts.items()]
    (tmp_path / "mountinfo").write_text("\n".join(["30 23 0:27 / / rw - ext4 /dev/sda rw", *lines]) + "\n")
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content + "\n")
    limits = cpu_limits(tmp_path)
    assert limits.quota == quota
    assert limits.group == (f"{tmp_path}/{group}" if group else "")
    assert limits.cpus == os.sched_getaffinity(0)


@pytest.mark.parametrize(
    ("kind", "group", "file"),
    [
        ("cgroup2 cgroup2 rw", "0::/a", "memory.max"),
        ("cgroup cgroup rw,memory", "5:memory:/a", "memory.limit_in_bytes"),
    ],
)
def test_the_memory_limit_of_a_cgroup(tmp_path, kind, group, file) -> None:
    (tmp_path / "cgroup").write_text(f"9:cpu:/b\n{group}\n")
    (tmp_path / "mountinfo").write_text(f"31 23 0:28 / {tmp_path} rw shared:9 - {kind}\n")
    whole = memory_bytes(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / file).write_text("123456\n")
    assert memory_bytes(tmp_path) == 123456 < whole


def test_without_cgroups_the_mask_counts(tmp_path) -> None:
    assert cpu_limits(tmp_path).quota == math.inf
    assert share_of_cores(cpu_limits(tmp_path)) == len(os.sched_getaffinity(0))


ALL = frozenset(range(64))
LOW, HIGH, MIDDLE = frozenset(range(32)), frozenset(range(32, 64)), frozenset(range(16, 48))


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        ([CpuLimits("a", ALL)], [64]),
        ([CpuLimits("a", ALL)] * 4, [16] * 4),  # torchrun, mpirun --bind-to none
        ([CpuLimits("a", LOW), CpuLimits("a", HIGH)], [32, 32]),  # srun --cpus-per-task 32
        ([CpuLimits("a", LOW), CpuLimits("b", LOW)], [32, 32]),  # a rank on each of two nodes
        ([CpuLimits("a", LOW), CpuLimits("a", MIDDLE)], [24, 24]),
        ([CpuLimits("a", frozenset({0, 1}))] * 8, [1] * 8),
        ([CpuLimits("a", ALL, 4.0, "box")], [4]),
        ([CpuLimits("a", ALL, 4.0, "box")] * 2, [2, 2]),
        ([CpuLimits("a", ALL, 4.0, "one"), CpuLimits("a", ALL, 2.5, "two")], [4, 3]),
        ([CpuLimits("a", ALL, 0.5, "box")] * 2, [1, 1]),
        ([CpuLimits("a", LOW, 80.0, "box")], [32]),
    ],
)
def test_ranks_divide_what_they_have_in_common(processes, expected) -> None:
    assert [share_of_cores(process, processes) for process in processes] == expected


def test_a_real_quota_and_mask_count(tmp_path) -> None:
    """A mask of one CPU, and a cgroup limited to one CPU's time, both count as one core."""

    def count(*prefix: str) -> bytes:
        program = [sys.executable, "-c", "from common.hardware import cores; print(cores())"]
        return subprocess.run([*prefix, *program], cwd=ROOT, stdout=subprocess.PIPE).stdout

    assert count("taskset", "-c", str(min(os.sched_getaffinity(0)))) == b"1\n"
    group = _new_cgroup()
    try:
        assert count("sh", "-c", f'echo $$ >{group}/cgroup.procs; exec "$0" "$@"') == b"1\n"
    finally:
        group.rmdir()
    assert cores() == len(os.sched_getaffinity(0))


def _new_cgroup() -> Path:
    """Make a cgroup of either version with a quota of one CPU."""
    name = f"vit-test-{uuid.uuid4().hex[:8]}"
    for parent, limits in (
        ("/sys/fs/cgroup/cpu", {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "100000"}),
        ("/sys/fs/cgroup", {"cpu.max": "100000 100000"}),
    ):
        group = Path(parent, name)
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            for file, value in limits.items():
                (group / file).write_text(value)
        except OSError:
            group.rmdir()
        else:
            return group
    pytest.skip("no cgroup with a CPU controller can be made here: needs root and a writable /sys/fs/cgroup")


@pytest.mark.parametrize(
    ("given", "others", "expected"),
    [({}, 0, "300000"), ({}, 2, "0"), ({"OMP_WAIT_POLICY": "PASSIVE"}, 0, "0"), ({"GOMP_SPINCOUNT": "7"}, 2, "7")],
)
def test_threads_sleep_at_barriers_where_others_use_the_cores(given, others, expected) -> None:
    """OpenMP prints what it took from the environment when torch loads it, after ours has been set."""
    environ = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    busy = (
        f"import common.hardware as h; h.busy_cores = lambda: {others}; import os; os.environ.pop('OMP_WAIT_POLICY', 0)"
    )
    busy += f"; os.environ.update({given}); h.choose_waiting()"
    program = [sys.executable, "-c", f"{busy}; import sys; assert 'torch' not in sys.modules; import torch"]
    environ |= {"OMP_DISPLAY_ENV": "verbose"}
    said = subprocess.run(program, cwd=ROOT, env=environ, capture_output=True, text=True, check=True).stderr
    assert f"GOMP_SPINCOUNT = '{expected}'" in said


def test_busy_cores_counts_other_programs_on_our_own_cores_only() -> None:
    """A program that never sleeps is pinned to one CPU, and is seen by a process that may use that CPU only."""
    cpu = min(os.sched_getaffinity(0))
    program = f"import os; os.sched_setaffinity(0, {{{cpu}}}); print(flush=True)\nwhile True: pass"
    look = (
        f"import os; os.sched_setaffinity(0, {{{cpu}}}); from common.hardware import busy_cores; print(busy_cores(0.3))"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout
            other.stdout.readline()
            seen = subprocess.run([sys.executable, "-c", look], cwd=ROOT, capture_output=True, text=True, check=True)
        finally:
            other.kill()
    assert 0.5 < float(seen.stdout) <= 1
