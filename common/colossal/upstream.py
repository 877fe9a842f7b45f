"""Everything of Colossal-AI that the door uses, imported in one place."""

from common.colossal.standins import check_version, quiet_import

check_version()
with quiet_import():
    import colossalai.amp
    from colossalai.accelerator import auto_set_accelerator, get_accelerator
    from colossalai.accelerator.cpu_accelerator import CpuAccelerator
    from colossalai.context import Config
    from colossalai.interface import OptimizerWrapper
    from colossalai.legacy import (
        get_default_parser,
        launch,
        launch_from_openmpi,
        launch_from_slurm,
        launch_from_torch,
    )
    from colossalai.legacy.amp import AMP_TYPE
    from colossalai.legacy.builder.builder import build_gradient_handler
    from colossalai.legacy.context import ParallelMode
    from colossalai.legacy.context.parallel_context import ParallelContext
    from colossalai.legacy.context.random import _helper as random_state
    from colossalai.legacy.context.random.seed_manager import SeedManager
    from colossalai.legacy.core import global_context as gpc
    from colossalai.legacy.engine import Engine as UpstreamEngine
    from colossalai.legacy.engine.gradient_accumulation import GradAccumGradientHandler
    from colossalai.legacy.global_variables import tensor_parallel_env
    from colossalai.legacy.trainer import Trainer as UpstreamTrainer
    from colossalai.legacy.trainer.hooks import BaseHook
    from colossalai.legacy.trainer.hooks import _metric_hook as metrics
    from colossalai.legacy.utils import sync_model_param
    from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR, LinearWarmupLR, delayed

__all__ = [
    "AMP_TYPE",
    "BaseHook",
    "Config",
    "CosineAnnealingWarmupLR",
    "CpuAccelerator",
    "GradAccumGradientHandler",
    "LinearWarmupLR",
    "OptimizerWrapper",
    "ParallelContext",
    "ParallelMode",
    "SeedManager",
    "UpstreamEngine",
    "UpstreamTrainer",
    "auto_set_accelerator",
    "build_gradient_handler",
    "colossalai",
    "delayed",
    "get_accelerator",
    "get_default_parser",
    "gpc",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
    "metrics",
    "random_state",
    "sync_model_param",
    "tensor_parallel_env",
]
