"""The optimizers: LAMB, and AdamW and SGD from PyTorch, all of which skip an update on the device (`found_inf`)."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from common.colossal import build_norm_reducer
from common.errors import did_you_mean
from common.optim.lamb import Lamb


class FusedSGD(SGD):
    """torch's fused SGD, whose momentum starts at 0 where the very first update is skipped.

    torch leaves there what was in the memory before: it takes an empty tensor, which only a kernel that is not skipped
    fills, and from the next update on counts it as momentum (torch/optim/sgd.py, `_fused_sgd`).
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, fused=True, **options)

    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        starting = [p for p in trained if self.state.get(p, {}).get("momentum_buffer") is None]
        loss = super().step(closure)
        found_inf = getattr(self, "found_inf", None)
        for p in starting:
            momentum = self.state.get(p, {}).get("momentum_buffer")
            if momentum is not None and found_inf is not None:
                momentum.masked_fill_(found_inf.bool(), 0)
        return loss


NO_DECAY = ("cls_token", "reg_token", "pos_embed")
# Class and default options.
_OPTIMIZERS = {"adamw": (AdamW, {"fused": True}), "lamb": (Lamb, {}), "sgd": (FusedSGD, {"momentum": 0.9})}


def build_optimizer(
    model: nn.Module,
    name: str = "adamw",
    learning_rate: float = 1e-3,
    weight_decay: float = 0.0,
    decay_all: bool = True,
    **options: Any,
) -> Optimizer:
    """Build the optimizer `name` ("adamw", "lamb" or "sgd") of the parameters that are trained, sharded or not.

    Weight decay is on every tensor, unless `decay_all` is false: then not on vectors (biases, norms) and `NO_DECAY`,
    as in timm. `options` are those of `common.optim.lamb.Lamb`, of `torch.optim.AdamW` (betas, eps) or of
    `torch.optim.SGD` (momentum, 0.9 by default, dampening, nesterov).

    Raises ValueError for an unknown name or a value that the optimizer refuses, TypeError for an unknown option.
    """
    if name not in _OPTIMIZERS:
        hint = did_you_mean(name, _OPTIMIZERS)
        raise ValueError(f"name={name!r} is none of {', '.join(_OPTIMIZERS)}{hint}")
    build, defaults = _OPTIMIZERS[name]
    if name == "lamb":
        options["reduce_norms"] = build_norm_reducer(model)
    groups = _parameter_groups(model, decay_all)
    return build(groups, lr=learning_rate, weight_decay=weight_decay, **defaults | options)


def _parameter_groups(model: nn.Module, decay_all: bool) -> list[dict[str, Any]]:
    """Split the parameters that are trained into those with weight decay and those without."""
    decayed: list[Tensor] = []
    plain: list[Tensor] = []
    for name, param in model.named_parameters():
        if param.requires_grad:
            without = not decay_all and (param.ndim <= 1 or name.split(".")[-1] in NO_DECAY)
            (plain if without else decayed).append(param)
    return [{"params": decayed}] + ([{"params": plain, "weight_decay": 0.0}] if plain else [])
