"""Faults repaired in Colossal-AI's own modules, once, on import."""

from common.colossal.upstream import AMP_TYPE, CpuAccelerator, colossalai


def repair_old_paths() -> None:
    """Let configs written for older releases import `AMP_TYPE` from `colossalai.amp`; 0.5.0 moved it to legacy."""
    colossalai.amp.AMP_TYPE = AMP_TYPE


def repair_cpu_timers() -> None:
    """Let `MultiTimer`, which a script may pass to `Trainer`, run on CPUs: accelerator/cpu_accelerator.py:57 raises."""
    CpuAccelerator.synchronize = lambda self, device=None: None
