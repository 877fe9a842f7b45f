"""The originals' hooks, repaired, here and in `colossalai.legacy.trainer.hooks`."""

from copy import deepcopy
from typing import Any

import torch

# Importing them logs nothing: `upstream` has imported these modules before.
from colossalai.legacy.trainer.hooks import *  # noqa: F403
from colossalai.legacy.trainer.hooks import _checkpoint_hook, _log_hook, _metric_hook
from torch import nn

from common.engine.tensor_parallel.sharding import full_model_state
from common.engine.upstream import gpc
from common.hardware import peak_memory


def report_memory_usage(message: str, logger: Any) -> None:
    """Log the peak of this process; upstream's (legacy/utils/memory.py:94) needs a GPU."""
    logger.info(f"{message}: peak memory {peak_memory() / 1e6:,.0f} MB")


def save_checkpoint(file: str, epoch: int, model: nn.Module, *_: Any) -> None:
    """Write the epoch and the full model.

    Upstream's (legacy/utils/checkpointing.py:165) writes rank 0's shards.
    """
    # DDP's names would begin with "module.".
    model = getattr(model, "module", model)
    full = dict(full_model_state(model))
    if gpc.get_global_rank() == 0:
        torch.save({"epoch": epoch, "model": full}, file)


def repair_hooks() -> None:
    """Let upstream's hooks call the functions above, and read metrics more than once."""
    _log_hook.report_memory_usage = report_memory_usage
    _checkpoint_hook.save_checkpoint = save_checkpoint
    LossHook.needs_test_loss = True  # noqa: F405
    # Their totals change when they are read (legacy/trainer/hooks/_metric_hook.py:110,374).
    for metric in (_metric_hook.LossMetric, _metric_hook.ThroughputMetric):
        read = metric.get_accumulated_value
        metric.get_accumulated_value = lambda self, read=read: read(deepcopy(self))


repair_hooks()
