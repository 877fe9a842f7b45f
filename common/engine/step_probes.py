"""What tells later where in a step the first value arose that is not finite."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from common.engine.step_optimizer import StepOptimizer


@dataclass
class StepProbe:
    """Small tensors of a step on this rank, kept on the device until the host looks.

    The cost is a sum of the model's output in each micro-batch. ``step`` counts from 1.
    """

    step: int
    losses: list[Tensor] = field(default_factory=list)  # of the micro-batches
    sums: list[Tensor] = field(default_factory=list)  # [B], of each sample's outputs
    norms: dict[Tensor, Tensor] = field(default_factory=dict)  # of the gradients, by parameter
    scale: Tensor | None = None  # float16's loss scale

    def add_micro_batch(self, optimizer: StepOptimizer, output: Any, loss: Tensor) -> None:
        if optimizer.scaler:
            scale: Any = optimizer.scaler._get_scale_async()
            self.scale = scale.clone()  # the update changes it
        sums = loss.new_empty(0)
        if isinstance(output, Tensor) and output.dim() > 1:
            sums = output.detach().flatten(1).sum(1)
        self.losses.append(loss.detach())
        self.sums.append(sums)

    def find_micro_batch(self) -> int | None:
        """Return the first micro-batch with a loss or an output that is not finite."""
        for number, values in enumerate(zip(self.losses, self.sums, strict=True)):
            if not all(value.isfinite().all() for value in values):
                return number
        return None

    def is_bad(self) -> bool:
        """Return whether something is not finite, beyond an overflow that halves the loss scale."""
        if self.find_micro_batch() is not None:
            return True
        if self.scale is not None and self.scale > 1:
            return False
        return not all(norm.isfinite() for norm in self.norms.values())
