"""All imports from Colossal-AI, in one place, and the repairs that these need."""

import sys
from typing import Any

from common.colossal.import_stubs import check_version, quiet_import

check_version()
with quiet_import():
    import colossalai.amp
    from colossalai.accelerator import auto_set_accelerator, get_accelerator
    from colossalai.accelerator.cpu_accelerator import CpuAccelerator
    from colossalai.context import Config
    from colossalai.interface import OptimizerWrapper
    from colossalai.legacy import get_default_parser, launch_from_openmpi, launch_from_slurm, launch_from_torch
    from colossalai.legacy import launch as upstream_launch
    from colossalai.legacy.amp import AMP_TYPE
    from colossalai.legacy.builder.builder import build_gradient_handler
    from colossalai.legacy.communication import all_gather, all_reduce
    from colossalai.legacy.context import ParallelMode
    from colossalai.legacy.context.parallel_context import ParallelContext
    from colossalai.legacy.core import global_context
    from colossalai.legacy.engine import Engine as UpstreamEngine
    from colossalai.legacy.engine.gradient_accumulation import GradAccumGradientHandler
    from colossalai.legacy.global_variables import tensor_parallel_env
    from colossalai.legacy.nn.layer.parallel_1d._utils import gather_forward_split_backward, reduce_grad, reduce_input
    from colossalai.legacy.nn.layer.parallel_2d._operation import Matmul_AB_2D
    from colossalai.legacy.nn.layer.parallel_2p5d._operation import Matmul_AB_2p5D
    from colossalai.legacy.nn.layer.parallel_3d._operation import _Linear3D as Matmul3D
    from colossalai.legacy.nn.layer.parallel_3d._utils import register_async_grad_hook
    from colossalai.legacy.trainer import Trainer as UpstreamTrainer
    from colossalai.legacy.trainer.hooks import BaseHook
    from colossalai.legacy.utils import sync_model_param
    from colossalai.legacy.zero import shard_utils
    from colossalai.nn.lr_scheduler import LinearWarmupLR

gpc: Any = global_context  # Any: upstream does not annotate attributes set by a launch


def repair_old_paths() -> None:
    """Make `from colossalai.amp import AMP_TYPE` and `colossalai.zero.shard_utils` work, as configs import them.

    0.5.0 moved them to legacy/amp/amp_type.py:7 and legacy/zero/shard_utils, and left amp/__init__.py empty.
    """
    colossalai.amp.AMP_TYPE = AMP_TYPE
    sys.modules["colossalai.zero.shard_utils"] = shard_utils


def repair_cpu_timers() -> None:
    """Make `MultiTimer`, an argument of `Trainer`, work on CPUs: accelerator/cpu_accelerator.py:57 raises."""
    CpuAccelerator.synchronize = lambda self, device=None: None


repair_old_paths()
repair_cpu_timers()
