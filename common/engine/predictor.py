"""Inference in the precision of a config."""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from common.engine.amp import build_mixed_precision
from common.engine.engine import set_backends
from common.engine.upstream import get_accelerator
from common.hardware import limit_threads
from common.launchers import is_first_process


class Predictor:
    """Map images on any device to float32 logits on ``device``."""

    def __init__(self, model: nn.Module, config: Mapping[str, Any]):
        """Move ``model`` to this process's device and the precision of ``config``, in place."""
        # A training does both before its first step.
        limit_threads()
        set_backends(config)
        self.device = get_accelerator().get_current_device()
        self._precision = build_mixed_precision(config["fp16"], self.device.type)
        # On stderr: stdout is the result.
        if config["fp16"] and is_first_process():
            print(self._precision.warning or self._precision.note, file=sys.stderr, flush=True)
        self._model = self._precision.apply(model.to(self.device).eval())

    @torch.no_grad()
    def __call__(self, images_BCYX: Tensor) -> Tensor:
        with self._precision.autocast(self.device):
            return self._model(images_BCYX.to(self.device)).float()
