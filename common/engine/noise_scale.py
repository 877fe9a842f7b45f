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

LAMB and Muon give the update of a tensor t a fixed length l_t, so that they multiply its gradient
by p_t = l_t / |G_B,t|. Their noise scale is that of the gradient preconditioned by p, tr(p Sigma) /
(G^T p G): docs/noise-scale.md has the derivation.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from common.engine.tensor_parallel.layout import Sharding
from common.engine.tensor_parallel.sharding import named_shards, sum_over
from common.engine.upstream import ParallelMode, all_reduce, gpc

DECAY = 0.99  # a step's factor on the averages: they reach over about 100 steps
UNMEASURED = (
    "the noise scale needs several micro-batches in a step, this one has one: add "
    "--set gradient_accumulation=2"
)


def build_noise_scale(
    model: nn.Module, optimizer: Optimizer, accumulation: int, wanted: bool | None
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
    return NoiseScale(model, getattr(optimizer, "update_norms", None))


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
    ``tensor_averages`` are those of each tensor, and of its |G_B|^2.

    ``update_norms`` returns the norm of each tensor's update, up to a factor common to all, of a
    shard its part. Tensors that it leaves out do not count. It is None for an optimizer whose
    updates have no fixed length.
    """

    def __init__(
        self,
        model: nn.Module,
        update_norms: Callable[[], Mapping[Tensor, Tensor]] | None = None,
    ):
        shards = named_shards(model)
        self.shards = list(shards.values())
        self.update_norms = update_norms
        device = self.shards[0].device
        options: Any = dict(dtype=torch.float64, device=device)
        self.averages = torch.zeros(2, **options)
        self.tensor_averages = torch.zeros(3, len(shards), **options)
        # In the current step: the sum of the squared norms of this rank's micro-batches, by tensor.
        # It and the averages change in place, as a recorded step replays the change.
        self.squares = torch.zeros(len(shards), **options)
        shardings = [getattr(shard, "sharding", Sharding()) for shard in self.shards]
        self.copies = torch.tensor([sharding.copies for sharding in shardings], **options)
        # A rank has the squares of its shards: times the ranks that share the model, the mean over
        # all ranks is that of the full gradient.
        self.ranks = gpc.get_world_size(ParallelMode.TENSOR)
        is_zero = isinstance(model, FSDPModule)
        self.ranks_of_step = gpc.get_world_size(ParallelMode.GLOBAL) if is_zero else self.ranks
        self.missing = torch.zeros((), device=device)  # the norm of no gradient
        # In the current micro-batch: norms of gradients, by the number of the parameter.
        self.norms: dict[int, Tensor] = {}
        # Partial gradients by the group that sums them, then by parameter.
        self.parts: dict[ParallelMode, dict[int, Tensor]] = defaultdict(dict)
        if not is_zero:
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
                take = partial(self._keep, sharding.summed_over, order.index(name))
            else:
                take = partial(self._measure, order.index(name))
            parameter.register_hook(take)

    def _measure(self, number: int, grad: Tensor) -> None:
        self.norms[number] = _norms([grad])[0]

    def _keep(self, group: ParallelMode, number: int, grad: Tensor) -> None:
        # A copy: autograd may add the next micro-batch's gradient to this tensor in place.
        self.parts[group][number] = grad.clone()

    def add_micro_batch(self) -> None:
        """Add the squared norms of the micro-batch whose backward pass has ended."""
        for group, grads in self.parts.items():
            # Hooks may run in another order on another rank, but the sum needs the same on all.
            numbers = sorted(grads)
            norms = _norms(sum_over(group, [grads[number] for number in numbers]))
            self.norms.update(zip(numbers, norms, strict=True))
        self.squares += self._squares(self.norms)
        self.norms.clear()
        self.parts.clear()

    def _squares(self, norms: Mapping[int, Tensor]) -> Tensor:
        """Return the squares of ``norms``, by tensor, of which each copy counts its share."""
        every = [norms.get(number, self.missing) for number in range(len(self.shards))]
        return torch.stack(every).double().square() / self.copies

    def _squares_of_step(self, norms: Mapping[Tensor, Tensor]) -> Tensor:
        """Return the squares by tensor whose mean over all ranks is that of the full tensor.

        ``norms`` are of this rank's shards, by shard.
        """
        known = {n: norms[shard] for n, shard in enumerate(self.shards) if shard in norms}
        return self._squares(known) * self.ranks_of_step

    def add_step(
        self,
        grad_norm: Tensor,
        norms: Mapping[Tensor, Tensor],
        scaler: GradScaler | None,
        accumulation: int,
        micro_batch: int,
    ) -> None:
        """Update the averages with a step, unless its gradient is not finite.

        ``grad_norm`` is that of the step before clipping, ``norms`` those of this rank's shards;
        ``micro_batch`` is in images. A step that is a single micro-batch, as epochs of smaller
        images may have, changes nothing.
        """
        # Each loss was divided by ``accumulation``, so `squares` is the sum of |g|^2 over this
        # rank's micro-batches divided by its square.
        small = self.squares * (accumulation * self.ranks)
        count = accumulation * gpc.get_world_size(ParallelMode.DATA)
        self.squares.zero_()
        # A single gradient does not tell signal and noise apart.
        if count == 1:
            return
        if scaler:
            loss_scale: Any = scaler._get_scale_async()
            small = small / loss_scale.double().square()
        total = grad_norm.double().square()
        estimates = _estimate(small.sum(), total, count, micro_batch)
        # A skipped step changes nothing; decided on the device, for which the host does not wait.
        is_finite = total.isfinite()
        _update(self.averages, estimates, is_finite)
        if self.update_norms:
            big = self._squares_of_step(norms)
            estimates = _estimate(small, big, count, micro_batch)
            _update(self.tensor_averages, torch.cat([estimates, big[None]]), is_finite)

    def value(self) -> Tensor:
        """Return the noise scale in images, a 0-dim tensor on the device; all ranks must call it.

        It is infinite while the average of |G|^2 is not above 0.
        """
        return _divide(*_mean_over_ranks(self.averages).unbind())

    def optimizer_value(self) -> Tensor:
        """Return the noise scale in the norm of the optimizer, as `value`."""
        assert self.update_norms is not None
        squares = self._squares_of_step(self.update_norms())
        rows = _mean_over_ranks(torch.cat([self.tensor_averages, squares[None]]))
        signal, noise, big, squares = rows.unbind()
        weights = torch.where(big > 0, squares / big, 0).sqrt()
        return _divide(weights @ signal, weights @ noise)


def _norms(tensors: list[Tensor]) -> Sequence[Tensor]:
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch._foreach_norm(tensors, 2, dtype)


def _estimate(small: Tensor, big: Tensor, count: int, micro_batch: int) -> Tensor:
    """Return |G|^2 and tr(Sigma) of a step of ``count`` micro-batches."""
    signal = (count * big - small) / (count - 1)
    noise = micro_batch * (small - big) / (1 - 1 / count)
    return torch.stack([signal, noise])


def _update(averages: Tensor, new: Tensor, is_finite: Tensor) -> None:
    averages.copy_(torch.where(is_finite, torch.lerp(averages, new, 1 - DECAY), averages))


def _mean_over_ranks(values: Tensor) -> Tensor:
    mean = values / gpc.get_world_size(ParallelMode.GLOBAL)
    return all_reduce(mean, ParallelMode.GLOBAL)


def _divide(signal: Tensor, noise: Tensor) -> Tensor:
    return torch.where(signal > 0, noise.clamp(min=0) / signal, torch.inf)
