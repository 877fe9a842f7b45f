"""Repairs of Colossal-AI's own modules, applied once, on import."""

from common.colossal.upstream import AMP_TYPE, CpuAccelerator, colossalai


def repair_old_paths() -> None:
    """Make `from colossalai.amp import AMP_TYPE` work, as in older releases; 0.5.0 moved it to legacy."""
    colossalai.amp.AMP_TYPE = AMP_TYPE


def repair_cpu_timers() -> None:
    """Make `MultiTimer`, an argument of `Trainer`, work on CPUs: accelerator/cpu_accelerator.py:57 raises."""
    CpuAccelerator.synchronize = lambda self, device=None: None
