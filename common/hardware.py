"""What the machine computes with. torch is imported where it is needed, so that the rest is available without it."""

import math
import os
import platform
import re
import resource
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

import psutil

# Matrix products run in oneDNN, all else in ATen; each chooses its kernels by itself, and both can be limited.
WIDTHS = ("SSE4.1", "AVX", "AVX2", "AVX-512", "AVX512_BF16", "AMX")
BFLOAT16 = ("AVX512_BF16", "AMX")  # those with instructions for it
# Values of ONEDNN_MAX_CPU_ISA, by the dispatcher control page of oneDNN's documentation; any other is no limit here.
ONEDNN = {
    "SSE41": "SSE4.1",
    "AVX": "AVX",
    **dict.fromkeys(("AVX2", "AVX2_VNNI", "AVX2_VNNI_2"), "AVX2"),
    **dict.fromkeys(("AVX512_CORE", "AVX512_CORE_VNNI"), "AVX-512"),
    **dict.fromkeys(("AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX10_1_512"), "AVX512_BF16"),
}
ATEN = {"DEFAULT": "SSE4.1", "AVX2": "AVX2", "AVX512": "AMX"}  # AMX: it has no kernels wider than AVX-512

BUSY = 0.3  # cores that other programs use, from which on threads wait without spinning; docs/performance.md says why
_processes: list["CpuLimits"] = []  # of the run


def instruction_set() -> str:
    """Return the widest of `WIDTHS` that both oneDNN and ATen may use; other than on x86-64, ATen's name of its own."""
    import torch

    aten = torch.backends.cpu.get_cpu_capability()  # follows ATEN_CPU_CAPABILITY
    if platform.machine() not in ("x86_64", "AMD64"):
        return aten
    return min(_onednn_set(), ATEN.get(aten, "AMX"), key=WIDTHS.index)


def is_fast(dtype_name: str) -> bool:
    """Return whether this CPU has instructions for matrix products in "bfloat16" or "float16", which oneDNN may use.

    Without them such a product takes up to some hundred times as long as in float32 (pytorch issues 118499, 146508).
    """
    import torch

    if dtype_name == "float16":
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    # which is true of AVX-512 without these instructions too, where oneDNN converts to float32 and back
    return platform.machine() not in ("x86_64", "AMD64") or _onednn_set() in BFLOAT16


def is_gpu_older_than_bfloat16() -> bool:
    """Return whether this process's GPU, if it has one, computes in float16 only (before Ampere)."""
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)


def peak_memory() -> int:
    """Return the most bytes that this process has held since `reset_peak_memory`: on its GPU, else in total.

    Where the kernel's status file lacks it, it is getrusage's, which begins with that of the starting process.
    """
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    found = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())
    return int(found[1] if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024


def reset_peak_memory() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # proc(5)


@cache  # oneDNN, too, reads its variables once
def _onednn_set() -> str:
    """Return the widest of `WIDTHS` that the CPU has and oneDNN may use."""
    import torch

    limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA", "")
    has = {
        "AMX": torch.cpu._is_amx_tile_supported(),
        "AVX512_BF16": torch.cpu._is_avx512_bf16_supported(),
        "AVX-512": torch.cpu._is_avx512_supported(),
        "AVX2": torch.cpu._is_avx2_supported(),
    }
    widest = next((name for name, supported in has.items() if supported), "AVX")
    return min(widest, ONEDNN.get(limit.upper(), "AMX"), key=WIDTHS.index)


def choose_waiting() -> None:
    """Let OpenMP's threads sleep at barriers where other programs use this process's CPUs.

    A thread that spins keeps the core from the one it waits for as soon as another program runs there; on a machine of
    one's own spinning is faster. OMP_WAIT_POLICY or GOMP_SPINCOUNT in the environment take precedence. Call it before
    torch is imported: OpenMP reads the environment when it is loaded.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys() and busy_cores() >= BUSY:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def busy_cores(seconds: float = 0.1) -> float:
    """Return how many of the CPUs that this process may use are busy, while it sleeps for ``seconds``."""
    try:
        percent = dict(enumerate(psutil.cpu_percent(seconds, percpu=True)))
        return sum(percent.get(cpu, 0.0) for cpu in os.sched_getaffinity(0)) / 100
    except (AttributeError, OSError):  # not Linux, or no /proc
        return 0.0


def limit_threads() -> None:
    """Let torch compute with `rank_cores` threads at most, unless the user has set OMP_NUM_THREADS."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(rank_cores(), torch.get_num_threads()))


@dataclass(frozen=True)
class CpuLimits:
    """What a process may use: CPUs of a host, and of their time no more than ``quota`` CPUs in the cgroup ``group``."""

    host: str
    cpus: frozenset[int]
    quota: float = math.inf
    group: str = ""


def cores() -> int:
    """Return the number of cores that this process may use: its CPU mask, or the CPU quota of its cgroup if lower."""
    return share_of_cores(cpu_limits())


def set_processes(processes: Iterable[CpuLimits]) -> None:
    """Let `rank_cores` divide what these processes of a run, this one among them, have in common."""
    _processes[:] = processes


def rank_cores() -> int:
    """Return the cores for this process of the run: for OpenMP's threads, and for decoding threads or workers."""
    return share_of_cores(cpu_limits(), _processes)


def share_of_cores(mine: CpuLimits, processes: Sequence[CpuLimits] = ()) -> int:
    """Return the cores for one of ``processes`` if those on its host divide equally what they have in common.

    A fraction of a CPU quota counts as a core.
    """
    neighbours = [process for process in processes if process.host == mine.host] or [mine]
    in_mask = sum(1 / sum(cpu in process.cpus for process in neighbours) for cpu in mine.cpus)
    in_quota = mine.quota / sum(process.group == mine.group for process in neighbours)
    return max(1, min(math.floor(in_mask + 1e-9), math.ceil(in_quota) if in_quota < math.inf else len(mine.cpus)))


def cpu_limits(proc: Path = Path("/proc/self")) -> CpuLimits:
    """Return the limits of this process, by its CPU mask and its cgroups (version 1 and 2); the lowest quota counts."""
    quotas = [(quota, str(folder)) for folder in _cgroup_folders(proc) if (quota := _quota(folder)) < math.inf]
    quota, group = min(quotas, default=(math.inf, ""))
    return CpuLimits(platform.node(), frozenset(os.sched_getaffinity(0)), quota, group)


def memory_bytes(proc: Path = Path("/proc/self")) -> int:
    """Return the bytes of memory that this process may use: the machine's, or the limit of its cgroup if lower."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for folder in _cgroup_folders(proc, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):  # of version 2 and 1
            with suppress(OSError, ValueError):  # ValueError: "max"
                limits.append(int((folder / name).read_text()))
    return min(limits)


def _cgroup_folders(proc: Path, controller: str = "cpu") -> Iterator[Path]:
    """Yield the folders of the cgroups that may limit what this process uses: its own and those above it."""
    try:
        groups = [line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines()]
        mounts = [line.split() for line in (proc / "mountinfo").read_text().splitlines()]
    except OSError:
        return
    for mount in mounts:
        kind, options = mount[mount.index("-") + 1], mount[-1].split(",")
        if kind != "cgroup2" and not (kind == "cgroup" and controller in options):
            continue
        for _, controllers, path in groups:
            if controllers == "" if kind == "cgroup2" else controller in controllers.split(","):
                root, top = PurePosixPath(mount[3]), Path(mount[4])
                inside = PurePosixPath(path)
                below = top / (inside.relative_to(root) if inside.is_relative_to(root) else "")
                yield from (folder for folder in (below, *below.parents) if folder.is_relative_to(top))


def _quota(cgroup: Path) -> float:
    """Return the CPUs' worth of time that the cgroup may use; infinity without a limit."""
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            quota, period = ((cgroup / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
    except OSError:
        return math.inf
    return math.inf if quota in ("max", "-1") else int(quota) / int(period)
