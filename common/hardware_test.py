"""What the machine computes with, and how ranks divide its cores."""

import math
import os
import subprocess

import psutil
import pytest
import torch

from common import hardware
from common.files import ROOT
from common.hardware import CpuLimits, cpu_limits, memory_bytes, share_of_cores
from common.provenance import describe_run
from common.testing.commands import run_python


@pytest.mark.parametrize(
    ("machine", "has", "aten", "name", "fast"),
    [
        ("x86_64", "avx512_bf16", "AVX512", "AVX512_BF16", True),
        ("x86_64", "", "AVX512", "AVX512", False),
        ("aarch64", "", "SVE256", "SVE256", True),
    ],
)
def test_instruction_sets(monkeypatch, machine, has, aten, name, fast):
    for flag in ("amx_tile", "avx512_bf16"):
        monkeypatch.setattr(torch.cpu, f"_is_{flag}_supported", lambda flag=flag: flag == has)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: aten)
    monkeypatch.setattr(hardware.platform, "machine", lambda: machine)
    # torch's own answer, true from AVX-512 on, which is too much
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True, raising=False)
    assert (hardware.instruction_set(), hardware.is_fast("bfloat16")) == (name, fast)


@pytest.mark.parametrize(
    ("groups", "files", "quota", "group"),
    [
        (
            "0::/a/b",
            {"a/b/cpu.max": "max 100000", "a/cpu.max": "200000 100000"},
            2.0,
            "a",
        ),  # in the parent
        # a container, whose own cgroup is the mount point
        ("0::/docker/x", {"cpu.max": "50000 100000", "memory.max": "123456"}, 0.5, ""),
        (
            "4:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n0::/",
            {
                "cpu,cpuacct/cpu.cfs_quota_us": "150000",
                "cpu,cpuacct/cpu.cfs_period_us": "100000",
                "memory/memory.limit_in_bytes": "123456",
            },
            1.5,
            "cpu,cpuacct",
        ),
        (
            "3:cpu:/a",
            {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "9"},
            math.inf,
            "",
        ),
    ],
)
def test_the_quota_of_a_cgroup(tmp_path, monkeypatch, groups, files, quota, group):
    monkeypatch.setattr(hardware, "CGROUPS", tmp_path / "tree")
    monkeypatch.setattr(hardware, "PROC", tmp_path)
    (tmp_path / "cgroup").write_text(groups + "\n")
    for name, content in files.items():
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text(content + "\n")
    limits = cpu_limits()
    assert limits.quota == quota
    assert limits.group == (str(tmp_path / "tree" / group) if quota < math.inf else "")
    assert limits.cpus == os.sched_getaffinity(0)
    assert (memory_bytes() == 123456) == ("memory" in " ".join(files))


ALL, LOW, MIDDLE = (frozenset(range(*ends)) for ends in ((64,), (32,), (16, 48)))


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        (
            [CpuLimits("a", ALL)] * 5 + [CpuLimits("b", LOW)],
            [12] * 5 + [32],
        ),  # torchrun, mpirun --bind-to none
        ([CpuLimits("a", LOW), CpuLimits("a", MIDDLE)], [24, 24]),
        ([CpuLimits("a", ALL, 4.0, "one"), CpuLimits("a", ALL, 2.5, "two")], [4, 3]),
    ],
)
def test_ranks_divide_what_they_have_in_common(processes, expected):
    assert [share_of_cores(process, processes) for process in processes] == expected


def test_a_result_names_its_commit_and_memory_is_in_bytes(monkeypatch, tmp_path):
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True)
    for another_owner in ("0", "1"):
        monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", another_owner)
        assert head.startswith(describe_run([])["commit"][:12])
    resident = psutil.Process().memory_info().rss
    assert resident <= hardware.peak_memory() < psutil.virtual_memory().total


def test_threads_sleep_at_barriers_where_others_use_the_cores(monkeypatch):
    """OpenMP prints what it took from the environment when torch is loaded."""
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hardware.psutil, "cpu_percent", lambda *_, **__: [29.0])
    hardware.prepare_torch()
    assert "OMP_WAIT_POLICY" not in os.environ
    program = "import psutil; psutil.cpu_percent = lambda *_, **__: [30.0]; import common.colossal"
    said = run_python(
        program, cwd=ROOT, env=os.environ | {"OMP_DISPLAY_ENV": "verbose"}, check=True
    ).stderr
    assert "GOMP_SPINCOUNT = '0'" in said
