"""Repairs of Colossal-AI's own modules, applied once, on import."""

import sys

from common.colossal.upstream import AMP_TYPE, CpuAccelerator, colossalai, shard_utils


def repair_old_paths() -> None:
    """Make `from colossalai.amp import AMP_TYPE` work, as in older releases; 0.5.0 moved it to legacy.

    Also `colossalai.zero.shard_utils`, from which configs take what they put into ``zero``.
    """
    colossalai.amp.AMP_TYPE = AMP_TYPE
    sys.modules["colossalai.zero.shard_utils"] = shard_utils


def repair_cpu_timers() -> None:
    """Make `MultiTimer`, an argument of `Trainer`, work on CPUs: accelerator/cpu_accelerator.py:57 raises."""
    CpuAccelerator.synchronize = lambda self, device=None: None
