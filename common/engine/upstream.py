"""Imports from Colossal-AI 0.5.0, without its log lines and heavy unused dependencies.

The last functions are the repairs that need no subclass, applied on import. `hooks` and
`upstream_layers` have more.
"""

import io
import logging
import os
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from unittest import mock

import torch

from common.errors import UserError

VERSION = "0.5.0"
# Modules that Colossal-AI imports, and nothing here uses.
STUBBED = (
    *("peft", "peft.utils", "peft.utils.other", "peft.utils.save_and_load"),
    *("galore_torch", "bitsandbytes", "bitsandbytes.optim", "bitsandbytes.optim.optimizer"),
    "colossalai._analyzer._subclasses._meta_registration",
)


def check_version() -> None:
    """Raise `UserError` for another Colossal-AI than that for which the repairs are written."""
    try:
        installed = version("colossalai")
    except PackageNotFoundError:
        installed = "missing"
    if installed != VERSION:
        raise UserError(
            f"colossalai is {installed}, this project needs {VERSION}: pip install --no-deps "
            f"colossalai=={VERSION}"
        )


@contextmanager
def quiet_import() -> Iterator[None]:
    """Context for importing Colossal-AI; undoes the import's side effects on exit.

    - `peft` (interface/model.py:6), `galore_torch` (nn/optimizer/__init__.py:1) and `bitsandbytes`
      (nn/optimizer/galore.py:7) are replaced by stubs, installed or not. So is a module
      (lazy/lazy_init.py:16) that replaces PyTorch's meta kernels by those of release 1.12, with
      which `torch.compile` fails on a convolution.
    - `torch.compile` is the identity: decorating unused functions (quantization/fp8.py) loads the
      whole compiler, two thirds of the import time.
    - Neither fp8.py:16 nor gemini_optimizer.py:578 queries the GPU: that would initialize CUDA
      before the device is set, and prevent forking.
    - About 60 warnings, log lines and prints are dropped.
    - The environment is restored (initialize.py:10 sets `CUDA_DEVICE_MAX_CONNECTIONS`).
    """
    disabled = logging.root.manager.disable
    stubs = {name: _Stub(name) for name in STUBBED if name not in sys.modules}
    with (
        mock.patch.dict(os.environ),
        mock.patch.object(torch, "compile", return_value=lambda function: function),
        mock.patch.object(torch.cuda, "get_device_capability", side_effect=RuntimeError),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        warnings.catch_warnings(),
        # Some of its modules print.
        redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        # `logging.disable` also holds for loggers that are created during the import.
        logging.disable(logging.WARNING)
        sys.modules.update(stubs)
        yield
    for name in stubs:
        # A program that uses Colossal-AI's optional modules can then import the real ones.
        del sys.modules[name]
    logging.disable(disabled)


class _Stub(types.ModuleType):
    """A module that has a class for every attribute."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            # Python asks modules for __path__ and __spec__: a class would be a wrong answer.
            raise AttributeError(name)
        return type(name, (), {})


check_version()
# All that the project uses of Colossal-AI, but for the names of `hooks`.
with quiet_import():
    import colossalai.amp
    from colossalai.accelerator import auto_set_accelerator, get_accelerator
    from colossalai.accelerator.cpu_accelerator import CpuAccelerator
    from colossalai.context import Config
    from colossalai.interface import OptimizerWrapper
    from colossalai.legacy import (
        get_default_parser,
        launch_from_openmpi,
        launch_from_slurm,
        launch_from_torch,
    )
    from colossalai.legacy import launch as upstream_launch
    from colossalai.legacy.amp import AMP_TYPE
    from colossalai.legacy.communication import all_gather, all_reduce
    from colossalai.legacy.context import ParallelMode
    from colossalai.legacy.context import random as upstream_random
    from colossalai.legacy.context.parallel_context import ParallelContext
    from colossalai.legacy.core import global_context
    from colossalai.legacy.engine import Engine as UpstreamEngine
    from colossalai.legacy.global_variables import tensor_parallel_env
    from colossalai.legacy.nn import loss as upstream_loss
    from colossalai.legacy.nn import metric as upstream_metric
    from colossalai.legacy.nn.layer.base_layer import ParallelLayer
    from colossalai.legacy.nn.layer.colossalai_layer._utils import (
        _parallel_split_batch as split_batch_of_mode,
    )
    from colossalai.legacy.nn.layer.parallel_1d import _utils as operations_1d
    from colossalai.legacy.nn.layer.parallel_1d import layers as layers_1d
    from colossalai.legacy.nn.layer.parallel_1d._utils import (
        gather_forward_split_backward,
        reduce_grad,
        reduce_input,
        split_forward_gather_backward,
    )
    from colossalai.legacy.nn.layer.parallel_2d import _operation as operations_2d
    from colossalai.legacy.nn.layer.parallel_2d import layers as layers_2d
    from colossalai.legacy.nn.layer.parallel_2d._operation import Matmul_AB_2D
    from colossalai.legacy.nn.layer.parallel_2p5d import _operation as operations_2p5d
    from colossalai.legacy.nn.layer.parallel_2p5d import layers as layers_2p5d
    from colossalai.legacy.nn.layer.parallel_2p5d._operation import Matmul_AB_2p5D
    from colossalai.legacy.nn.layer.parallel_3d import _operation as operations_3d
    from colossalai.legacy.nn.layer.parallel_3d import layers as layers_3d
    from colossalai.legacy.nn.layer.parallel_3d._operation import _Linear3D as Matmul3D
    from colossalai.legacy.nn.layer.parallel_3d._utils import register_async_grad_hook
    from colossalai.legacy.nn.metric import Accuracy
    from colossalai.legacy.trainer import Trainer as UpstreamTrainer
    from colossalai.legacy.trainer.hooks import BaseHook, LRSchedulerHook
    from colossalai.legacy.utils import get_dataloader
    from colossalai.legacy.utils.data_sampler import DataParallelSampler
    from colossalai.logging import disable_existing_loggers, get_dist_logger
    from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR, LinearWarmupLR
    from colossalai.nn.lr_scheduler.delayed import WarmupScheduler
    from colossalai.nn.optimizer import Lamb as UpstreamLamb
    from colossalai.nn.optimizer import Lars as UpstreamLars
    from colossalai.utils import MultiTimer

gpc: Any = global_context  # Any: upstream does not annotate attributes set by a launch


def rebind(old: Any, new: Any) -> None:
    """Let ``new`` take the place of ``old`` in all modules of Colossal-AI's that import it."""
    for name, module in list(sys.modules.items()):
        if name.startswith("colossalai.legacy"):
            for key in [key for key, value in vars(module).items() if value is old]:
                setattr(module, key, new)


def repair_old_paths() -> None:
    """Make `from colossalai.amp import AMP_TYPE` work, which configs have.

    0.5.0 moved it to legacy/amp/amp_type.py:7.
    """
    colossalai.amp.AMP_TYPE = AMP_TYPE


def repair_cpu_timers() -> None:
    """Make `MultiTimer`, an argument of `Trainer`, work on CPUs.

    accelerator/cpu_accelerator.py:57 raises.
    """
    CpuAccelerator.synchronize = lambda self, device=None: None


def repair_warmup() -> None:
    """Let schedules after a warm-up begin at the full rate.

    nn/lr_scheduler/delayed.py:117 asks torch's cosine for its rate outside a step, which raises all
    rates from there on, by a third if three steps follow.
    """
    get_lr = WarmupScheduler.get_lr

    def begin_at_full_rate(schedule: Any) -> Any:
        if schedule.last_epoch < schedule.warmup_epochs or schedule.finished:
            return get_lr(schedule)
        # As upstream does here, but for `after_scheduler.get_lr()`.
        schedule.after_scheduler.base_lrs = schedule.base_lrs
        schedule.finished = True
        return list(schedule.base_lrs)

    WarmupScheduler.get_lr = begin_at_full_rate


# On import: nobody gets an upstream that is not repaired.
repair_old_paths()
repair_warmup()
repair_cpu_timers()
