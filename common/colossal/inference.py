"""Run a model as the engine's evaluation does: in the run's precision, without an optimizer."""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from common.colossal.amp import Cast, build_mixed_precision
from common.colossal.engine import apply_precision
from common.colossal.upstream import get_accelerator
from common.errors import is_first_process
from common.hardware import limit_threads


class Predictor:
    """Call with images to get float32 logits; both may be on any device, the model is on ``device``."""

    def __init__(self, model: nn.Module, fp16: Mapping[str, Any] | None) -> None:
        """Move ``model`` to this process's device and to the precision of the config's ``fp16``, for good."""
        limit_threads()
        self.device = get_accelerator().get_current_device()
        precision = build_mixed_precision(fp16, self.device.type)
        if is_first_process():  # on stderr: stdout is the command's result
            for line in filter(None, (precision.note, precision.warning)):
                print(line, file=sys.stderr, flush=True)
        self._autocast_dtype = precision.dtype if precision.cast is Cast.OPERATIONS else None
        self._model = model.to(self.device).eval()
        apply_precision(self._model, precision)

    @torch.no_grad()
    def __call__(self, images_BCYX: Tensor) -> Tensor:
        enabled = self._autocast_dtype is not None
        with torch.autocast(self.device.type, self._autocast_dtype, enabled=enabled):
            return self._model(images_BCYX.to(self.device)).float()
