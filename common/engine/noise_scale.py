"""The gradient noise scale: how large a batch pays (McCandlish et al., arXiv 1812.06162).

The gradient of B images is the true gradient G plus noise, whose covariance is Sigma / B:

    E |G_B|^2 = |G|^2 + tr(Sigma) / B

A step has K micro-batches of b images, over all data-parallel ranks. ``small`` is the mean of their
squared gradient norms, ``big`` the squared norm of the step's gradient, their mean. With B_small =
b and B_big = K b, the paper's appendix A estimates

    |G|^2     = (K big - small) / (K - 1)
    tr(Sigma) = b (small - big) / (1 - 1 / K)

Neither has a bias. The noise scale, in images, is the ratio of their averages over the steps. All
that is drawn for each image or micro-batch adds to the noise: crops, Mixup and CutMix, dropout.
"""

from collections import defaultdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from common.engine.tensor_parallel.layout import Sharding
from common.engine.tensor_parallel.sharding import named_shards, sum_over
from common.engine.upstream import ParallelMode, all_reduce, gpc

DECAY = 0.99  # a step's factor on the averages: they reach over about 100 steps
UNMEASURED = (
    "the noise scale needs several micro-batches in a step, this one has one: add "
    "--set gradient_accumulation=2"
)


def build_noise_scale(
    model: nn.Module, accumulation: int, wanted: bool | None
) -> "NoiseScale | None":
    """Build what measures the noise scale of ``model``, sharded but not yet in DDP, or return None.

    None if ``wanted`` is False, and where a step has a single micro-batch, that is with the
    greatest ``accumulation`` of the training 1. With ``wanted`` None, also where measuring would
    cost communication.
    """
    if wanted is False or accumulation * gpc.get_world_size(ParallelMode.DATA) == 1:
        return None
    shardings = [
        getattr(parameter, "sharding", Sharding()) for parameter in named_shards(model).values()
    ]
    if wanted is None and any(_is_partial(sharding) for sharding in shardings):
        return None
    return NoiseScale(model)


def _is_partial(sharding: Sharding) -> bool:
    """Return whether this rank has the gradient of a part of the micro-batch's samples."""
    return sharding.summed_over is not None and gpc.get_world_size(sharding.summed_over) > 1


class NoiseScale:
    """Average the estimates of |G|^2 and tr(Sigma) over the steps of a training.

    A hook on each parameter takes the norm of a micro-batch's gradient, before it is added to those
    of other micro-batches and exchanged between ranks. So the result is the same however the
    micro-batches of a step are shared out between accumulation and data-parallel ranks; nothing is
    stored or sent. Only the tensor-parallel modes that split the samples (2d, 2.5d, 3d) sum the
    partial gradients in every micro-batch, with one all-reduce per group.

    ``averages``, [|G|^2, tr(Sigma)], are of this rank's micro-batches: the mean over all ranks is
    that of the training. Both begin at 0 and have the same weights, whose sum cancels in the ratio.
    Where images change size they go on: for about 100 steps they mix both sizes.
    """

    def __init__(self, model: nn.Module):
        shards = named_shards(model)
        device = next(iter(shards.values())).device
        self.averages = torch.zeros(2, dtype=torch.float64, device=device)
        # In the current step: the sum of the squared norms of this rank's micro-batches. It and the
        # averages change in place, as a recorded step replays the change.
        self.squares = torch.zeros_like(self.averages[0])
        # In the current micro-batch: norms of gradients, by the number of ranks with the same.
        self.norms: dict[int, list[Tensor]] = defaultdict(list)
        # Partial gradients by that number and the group that sums them, then by parameter.
        self.parts: dict[tuple[int, ParallelMode], dict[int, Tensor]] = defaultdict(dict)
        if not isinstance(model, FSDPModule):
            self._watch(dict(model.named_parameters()), shards)
            return
        for prefix, layer in model.named_modules():
            if isinstance(layer, FSDPModule):
                # A hook on the full parameters sees the gradients before they are reduced.
                layer.unshard()
                full = {
                    f"{prefix}.{name}".lstrip("."): parameter
                    for name, parameter in layer.named_parameters()
                    if not isinstance(parameter, DTensor)
                }
                self._watch(full, shards)
                layer.reshard()

    def _watch(self, parameters: dict[str, nn.Parameter], shards: dict[str, nn.Parameter]) -> None:
        """Take each gradient of ``parameters``, by name; ``shards`` are those of the optimizer."""
        order = list(shards)
        for name, parameter in parameters.items():
            if not parameter.requires_grad:
                continue
            sharding = getattr(shards[name], "sharding", Sharding())
            if _is_partial(sharding):
                take = partial(
                    self._keep, (sharding.copies, sharding.summed_over), order.index(name)
                )
            else:
                dtype = torch.promote_types(parameter.dtype, torch.float32)
                take = partial(self._measure, sharding.copies, dtype)
            parameter.register_hook(take)

    def _measure(self, copies: int, dtype: torch.dtype, grad: Tensor) -> None:
        self.norms[copies].append(torch.linalg.vector_norm(grad, dtype=dtype))

    def _keep(self, key: tuple[int, ParallelMode], number: int, grad: Tensor) -> None:
        # A copy: autograd may add the next micro-batch's gradient to this tensor in place.
        self.parts[key][number] = grad.clone()

    def add_micro_batch(self) -> None:
        """Add the squared norm of the micro-batch whose backward pass has ended."""
        for (copies, group), grads in self.parts.items():
            # Hooks may run in another order on another rank, but the sum needs the same on all.
            ordered = [grad for _, grad in sorted(grads.items())]
            dtype = torch.promote_types(ordered[0].dtype, torch.float32)
            self.norms[copies] += torch._foreach_norm(sum_over(group, ordered), 2, dtype)
        for copies, norms in self.norms.items():
            self.squares += torch.stack(norms).double().square().sum() / copies
        self.norms.clear()
        self.parts.clear()

    def add_step(
        self, grad_norm: Tensor, scaler: GradScaler | None, accumulation: int, micro_batch: int
    ) -> None:
        """Update the averages with a step, unless its gradient is not finite.

        ``grad_norm`` is that of the step before clipping; ``micro_batch`` is in images. A step that
        is a single micro-batch, as epochs of smaller images may have, changes nothing.
        """
        # Each loss was divided by ``accumulation``, so `squares` is the sum of |g|^2 over this
        # rank's micro-batches divided by its square. A tensor-parallel rank has the squares of its
        # shards: times the ranks of the group, their mean is that of the full gradient.
        small = self.squares * (accumulation * gpc.get_world_size(ParallelMode.TENSOR))
        count = accumulation * gpc.get_world_size(ParallelMode.DATA)
        self.squares.zero_()
        # A single gradient does not tell signal and noise apart.
        if count == 1:
            return
        if scaler:
            loss_scale: Any = scaler._get_scale_async()
            small = small / loss_scale.double().square()
        big = grad_norm.double().square()
        signal = (count * big - small) / (count - 1)
        noise = micro_batch * (small - big) / (1 - 1 / count)
        averages = torch.lerp(self.averages, torch.stack([signal, noise]), 1 - DECAY)
        # A skipped step changes nothing; decided on the device, for which the host does not wait.
        self.averages.copy_(torch.where(big.isfinite(), averages, self.averages))

    def value(self) -> Tensor:
        """Return the noise scale in images, a 0-dim tensor on the device; all ranks must call it.

        It is infinite while the average of |G|^2 is not above 0.
        """
        mean = self.averages / gpc.get_world_size(ParallelMode.GLOBAL)
        signal, noise = all_reduce(mean, ParallelMode.GLOBAL).unbind()
        return torch.where(signal > 0, noise.clamp(min=0) / signal, torch.inf)
