"""What the machine computes with: cores, memory, instructions.

torch is imported where it is needed, not before: see `prepare_torch`.
"""

import math
import os
import platform
import re
import resource
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from common.process import at_end

# If other programs use more cores than this, threads wait without spinning (docs/performance.md).
BUSY = 0.3
CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc/self")
_processes: list["CpuLimits"] = []  # one for each process of the run


def prepare_torch() -> None:
    """Set what torch reads from the environment while it is loaded; call it before that.

    OpenMP's threads sleep at barriers if other programs use this machine's cores: a thread that
    spins keeps the core from the thread it waits for. On a machine of one's own spinning is faster.
    OMP_WAIT_POLICY or GOMP_SPINCOUNT take precedence. c10d's warnings about a lost rank are stacks
    of C++; ours is one line.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        # Over a tenth of a second, in which this process sleeps.
        busy_cores = sum(psutil.cpu_percent(0.1, percpu=True)) / 100
        if busy_cores >= BUSY:
            os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def instruction_set() -> str:
    """Return the widest instructions for matrix products, as "AMX"; elsewhere ATen's name."""
    import torch

    if is_fast("bfloat16") and platform.machine() == "x86_64":
        return "AMX" if torch.cpu._is_amx_tile_supported() else "AVX512_BF16"
    return torch.backends.cpu.get_cpu_capability()  # follows ATEN_CPU_CAPABILITY


def is_fast(dtype_name: str) -> bool:
    """Return whether this CPU multiplies matrices in "bfloat16" or "float16" by instructions.

    Without them such a product takes up to some hundred times as long as in float32 (pytorch issues
    118499, 146508).
    """
    import torch

    if dtype_name == "float16":
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    # torch's own answer is also true of AVX-512 without them, where oneDNN converts to float32
    has_instructions = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    is_x86 = platform.machine() == "x86_64"
    return torch.ops.mkldnn._is_mkldnn_bf16_supported() and (has_instructions or not is_x86)


def peak_memory() -> int:
    """Return the most bytes that this process has held: on its GPU, else in total.

    Where the kernel's status file lacks it, it is getrusage's, which begins with that of the
    starting process.
    """
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    # VmHWM, the high-water mark of resident memory, in kB.
    status = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())
    kilobytes = status[1] if status else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(kilobytes) * 1024


def limit_threads() -> None:
    """Let torch compute with `rank_cores` threads at most, until the main function ends.

    OMP_NUM_THREADS may say fewer.
    """
    import torch

    before = torch.get_num_threads()
    at_end(torch.set_num_threads, before)
    torch.set_num_threads(min(rank_cores(), before))


@dataclass(frozen=True)
class CpuLimits:
    """The CPUs of a host that a process may use, and the quota of their time, in CPUs.

    The processes of the cgroup ``group`` share the quota.
    """

    host: str
    cpus: frozenset[int]
    quota: float = math.inf
    group: str = ""


def cores() -> int:
    """Return how many cores this process may use, by its CPU mask and its cgroup's quota."""
    return share_of_cores(cpu_limits())


def set_processes(processes: Iterable[CpuLimits]) -> None:
    """Set the processes of the run, this one among them, for `rank_cores`."""
    at_end(_processes.clear)
    _processes[:] = processes


def rank_cores() -> int:
    """Return the cores for this process of the run, for OpenMP's threads or for decoding."""
    return share_of_cores(cpu_limits(), _processes)


def share_of_cores(mine: CpuLimits, processes: Sequence[CpuLimits] = ()) -> int:
    """Return the cores for one of ``processes``; those on its host divide what they share.

    A fraction of a CPU quota counts as a core.
    """
    neighbours = [process for process in processes if process.host == mine.host] or [mine]
    sharing = Counter(cpu for process in neighbours for cpu in process.cpus)
    # 1e-9: the shares of a whole core may add up to slightly less
    share = math.floor(sum(1 / sharing[cpu] for cpu in mine.cpus) + 1e-9)
    if mine.quota < math.inf:
        in_group = sum(process.group == mine.group for process in neighbours)
        share = min(share, math.ceil(mine.quota / in_group))
    return max(1, share)


def cpu_limits() -> CpuLimits:
    """Return the limits of this process, by its CPU mask and the lowest quota of its cgroups."""
    quotas = []
    for folder in _cgroup_folders("cpu"):
        # One file in version 2 of cgroups, two in version 1.
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            with suppress(OSError, ValueError):  # ValueError: "max"
                words = " ".join((folder / name).read_text() for name in names)
                quota, period = map(int, words.split())
                if quota > 0:  # -1 in version 1: none
                    quotas.append((quota / period, str(folder)))
    quota, group = min(quotas, default=(math.inf, ""))
    return CpuLimits(platform.node(), frozenset(os.sched_getaffinity(0)), quota, group)


def memory_bytes() -> int:
    """Return the bytes of memory that this process may use, by machine and cgroup."""
    limits = [psutil.virtual_memory().total]
    for folder in _cgroup_folders("memory"):
        # The file of version 1 has a huge number where there is no limit.
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # ValueError: "max"
                limits.append(int((folder / name).read_text()))
    return min(limits)


def _cgroup_folders(controller: str) -> Iterator[Path]:
    """Yield the folders of the cgroups that may limit this process: its own and those above it.

    In version 1 each ``controller`` has a tree of its own; "0::" is the tree of version 2.
    """
    with suppress(OSError):
        for line in (PROC / "cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" or controller in controllers.split(","):
                folder = CGROUPS / controllers / path.strip("/")
                yield from (folder, *folder.parents)
