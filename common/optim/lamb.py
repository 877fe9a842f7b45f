"""LAMB (You et al., arXiv 1904.00962): Adam's direction, scaled for each tensor by
|parameter| / |direction|.

Shape suffixes: P parameters, 1 and 2 rows of their squared norms.
"""

from collections.abc import Callable
from math import inf, isinf

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

# What four libraries mean by LAMB: `colossalai/nn/optimizer/lamb.py` (0.5.0),
# `csrc/multi_tensor_lamb.cu` of NVIDIA's apex, `csrc/lamb/fused_lamb_cuda_kernel.cu` of DeepSpeed
# (which corrects the moments today; it used to fold the bias correction into the step size),
# `timm/optim/lamb.py` (1.0.31).
VARIANTS = {
    "colossalai": dict(
        eps=1e-6,
        bias_correction=False,
        max_grad_norm=inf,
        always_adapt=True,
        trust_range=(0.0, inf),
    ),
    "apex": dict(
        eps=1e-6,
        bias_correction=True,
        max_grad_norm=1.0,
        always_adapt=False,
        trust_range=(0.0, inf),
    ),
    "deepspeed": dict(
        eps=1e-8,
        bias_correction=True,
        max_grad_norm=inf,
        always_adapt=True,
        trust_range=(0.01, 10.0),
    ),
}
VARIANTS["timm"] = VARIANTS["apex"]  # timm follows apex; its `trust_clip` is trust_range=(0, 1)

# Maps the squared norms of shards [rows, P] to those of full tensors, given the P parameters.
ReduceNorms = Callable[[Tensor, list[Tensor]], Tensor]
# Parameters that are updated together, and the options of their group.
Bucket = tuple[list[Tensor], dict]


class Lamb(Optimizer):
    """Optimise with LAMB, without ever waiting for the device.

    `variant` ("colossalai", "apex", "deepspeed" or "timm") sets the defaults of these `options`:

    - eps: added to the root of the second moment.
    - bias_correction: divide the moments by 1 - beta^step, as in the paper's Algorithm 2.
    - max_grad_norm: clip the gradients' norm over all parameters to this, in place; inf for never.
    - always_adapt: whether a tensor without weight decay has a trust ratio too.
    - trust_range: least and greatest trust ratio. It is 1 where the parameter or the direction is
      zero.

    The state is `exp_avg`, `exp_avg_sq` and `step`, all tensors of the parameter's device. As with
    torch's fused optimizers, an attribute `found_inf`, a 0-dim float32 tensor there, makes `step`
    change nothing where it is 1. Under tensor parallelism and ZeRO `reduce_norms` sums the squared
    norms over the shards, once a step for all trust ratios.
    """

    found_inf: Tensor | None = None

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        variant: str = "colossalai",
        reduce_norms: ReduceNorms | None = None,
        **options: object,
    ):
        unknown = options.keys() - VARIANTS[variant].keys()
        if unknown:
            raise TypeError(f"unexpected options of LAMB: {', '.join(sorted(unknown))}")
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        # With it, `load_state_dict` moves `step` to the parameter's device.
        defaults["capturable"] = True
        super().__init__(params, defaults | VARIANTS[variant] | options)
        self._step_supports_amp_scaling = True  # torch's name for: the optimizer reads `found_inf`
        self.reduce_norms = reduce_norms

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient."""
        clip = self._clip_divisor()
        buckets: list[Bucket] = []
        for group in self.param_groups:
            buckets += [(params, group) for params in self._buckets(group["params"])]
        if self.reduce_norms is None:
            for bucket in buckets:
                self._update([bucket], clip)
        # All buckets at once: their norms are reduced in one message.
        elif buckets:
            self._update(buckets, clip)

    def update_norms(self) -> dict[Tensor, Tensor]:
        """Return the norm of each update that has a trust ratio, over the learning rate.

        Of a shard it is that of its part. A limit of the trust ratio is not counted.
        """
        return {
            p: torch.linalg.vector_norm(p.detach(), dtype=torch.float32)
            for group in self.param_groups
            if group["weight_decay"] != 0 or group["always_adapt"]
            for p in group["params"]
        }

    def _buckets(self, params: list[Tensor]) -> list[list[Tensor]]:
        """Group the parameters that have a gradient into buckets that are updated together.

        On a CPU, one tensor at a time, so that its direction is still in the cache when it is
        applied. On a GPU, or with a reduction over ranks, all of them: fewer kernel launches and
        fewer messages.
        """
        params = [p for p in params if p.grad is not None]
        if self.reduce_norms is None and all(p.is_cpu for p in params):
            return [[p] for p in params]
        return [params] if params else []

    def _clip_divisor(self) -> Tensor | None:
        """Return what to divide all gradients by, at least 1, float32; None if they are not
        clipped.
        """
        max_norm = self.param_groups[0]["max_grad_norm"]  # the norm is over all groups
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if isinf(max_norm) or not params:
            return None
        squares_1P = _squared_norms([p.grad for p in params])[None]
        if self.reduce_norms is not None:
            squares_1P = self.reduce_norms(squares_1P, params)
        divisor = (squares_1P.sum().sqrt() / max_norm).clamp(min=1.0)
        return divisor.float()  # the type that the fused kernel takes

    def _update(self, buckets: list[Bucket], clip: Tensor | None) -> None:
        """Update buckets whose norms are reduced together."""
        directions: list[list[Tensor]] = []
        squares: list[Tensor] = []
        for params, group in buckets:
            # Before the direction, because it brings the parameters into a CPU's cache for all that
            # follows.
            param_squares_P = _squared_norms(params)
            directions.append(self._directions(params, group, clip))
            squares.append(torch.stack([param_squares_P, _squared_norms(directions[-1])]))
        squares_2P = torch.cat(squares, dim=1)
        if self.reduce_norms is not None:
            updated = [p for params, _ in buckets for p in params]
            squares_2P = self.reduce_norms(squares_2P, updated)
        split_2P = squares_2P.split([len(params) for params, _ in buckets], dim=1)
        for number, (params, group) in enumerate(buckets):
            self._apply(params, group, directions[number], split_2P[number])

    def _apply(
        self, params: list[Tensor], group: dict, directions: list[Tensor], squares_2P: Tensor
    ) -> None:
        """Step along the directions, each scaled by its trust ratio.

        ``squares_2P`` are the squared norms of the parameters and of the directions.
        """
        if group["weight_decay"] == 0 and not group["always_adapt"]:
            # No trust ratio: the step is Adam's.
            torch._foreach_sub_(params, torch._foreach_mul(directions, group["lr"]))
            return
        param_norms_P, direction_norms_P = squares_2P.sqrt()
        ratios_P = (param_norms_P / direction_norms_P).clamp(*group["trust_range"])
        ratios_P = torch.where((param_norms_P > 0) & (direction_norms_P > 0), ratios_P, 1.0)
        if self.found_inf is not None:
            # In a skipped update the fused kernel adds nothing, and the direction is the weight
            # decay's alone.
            ratios_P = ratios_P * (1 - self.found_inf)
        torch._foreach_addcmul_(params, directions, (-group["lr"] * ratios_P).unbind())

    def _directions(self, params: list[Tensor], group: dict, clip: Tensor | None) -> list[Tensor]:
        """Advance the moments; return moment / (sqrt(second moment) + eps) + weight_decay *
        parameter.
        """
        for p in params:
            if not self.state[p]:
                step = torch.zeros((), dtype=torch.float32, device=p.device)
                self.state[p] = {
                    "step": step,
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }
        states = [self.state[p] for p in params]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        if self.found_inf is not None:
            # A list: of a single tensor PyTorch would read the value on the host.
            torch._foreach_sub_(steps, [self.found_inf] * len(steps))
        if not group["bias_correction"]:
            steps = [torch.full_like(steps[0], inf)] * len(steps)  # 1 - beta^inf = 1
        # PyTorch's fused Adam reads and writes everything once; with a learning rate of -1 it adds
        # its direction to the weight decay's instead of subtracting a step from the parameters.
        directions = list(torch._foreach_mul(params, group["weight_decay"]))
        torch._fused_adam_(
            directions,
            [p.grad for p in params if p.grad is not None],  # all have one
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],  # max_exp_avg_sqs, of amsgrad
            steps,
            lr=-1.0,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=0.0,
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=clip,
            found_inf=self.found_inf,
        )
        return directions


def _squared_norms(tensors: list[Tensor]) -> Tensor:
    """Return the sum of squares of each tensor, [len(tensors)], at least in float32: float16 ends
    at 65,504.
    """
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    if tensors[0].is_cpu and tensors[0].dtype == dtype:
        # On a CPU a dot product takes half the time of a norm.
        return torch.stack([torch.dot(t.flatten(), t.flatten()) for t in tensors])
    return torch.stack(torch._foreach_norm(tensors, 2, dtype)).square()
