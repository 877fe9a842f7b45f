"""The unsharded state of a model and its optimizer under timm's names, as files hold it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from common.colossal import canonical_state, cut_piece, gather_whole, load_canonical_state, whole_shape
from common.errors import UserError

MODEL, OPTIMIZER, EMA = "model.safetensors", "optimizer.safetensors", "ema.safetensors"
SHOWN = 10  # parameters that an error lists

Tensors = dict[str, Tensor]


def copy_state(
    model: nn.Module, optimizer: Optimizer, averages: Mapping[str, Tensor] | None = None
) -> dict[str, Tensors]:
    """Return copies on the CPU of the parameters, their averages and the optimizer's state, by the name of their file.

    The optimizer's are named ``<state>/<parameter>``, e.g. ``exp_avg/head.weight``. Every rank must call it; only rank
    0's result is complete.
    """
    parameters = dict(model.named_parameters())
    moments: dict[str, Tensor | None] = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                moments[f"{key}/{name}"] = gather_whole(parameter, value) if value.shape == parameter.shape else value
    files = {MODEL: _copied(canonical_state(model)), OPTIMIZER: _copied(moments)}
    if averages is not None:
        files[EMA] = _copied({name: gather_whole(parameters[name], value) for name, value in averages.items()})
    return files


def _copied(tensors: Mapping[str, Tensor | None]) -> Tensors:
    """Return copies, which the next optimizer step does not change."""
    copies = {name: t.detach().to("cpu", copy=True) for name, t in tensors.items() if t is not None}
    return {name: tensor.contiguous() for name, tensor in copies.items()}


def load_state(
    path: Path, model: nn.Module, optimizer: Optimizer, averages: Mapping[str, Tensor] | None = None
) -> None:
    """Load the checkpoint folder ``path``, saved in any parallel mode, into a model that is sharded or not.

    ``optimizer`` keeps its own options. Where the checkpoint has no ``averages``, they begin at its weights. Raises
    UserError for the checkpoint of another architecture.
    """
    weights = load_file(path / MODEL)
    check_architecture(path, weights, model)
    load_canonical_state(model, weights)
    _load_moments(path, load_file(path / OPTIMIZER), model, optimizer)
    if averages is not None:
        whole = load_file(path / EMA) if (path / EMA).exists() else weights
        for name, parameter in model.named_parameters():
            averages[name].copy_(cut_piece(parameter, whole[name]))


def check_architecture(path: Path, weights: Mapping[str, Tensor], model: nn.Module) -> None:
    """Raise UserError if ``weights``, read from ``path``, are not the whole parameters of ``model``, or not finite."""
    saved = {name: list(tensor.shape) for name, tensor in weights.items()}
    check_shapes(path, saved, {name: list(whole_shape(parameter)) for name, parameter in model.named_parameters()})
    for name, tensor in weights.items():
        if not tensor.is_meta and not tensor.isfinite().all():
            raise UserError(f"{path}: {name} holds numbers that are not finite: start from other weights")


def check_shapes(path: Path, saved: Mapping[str, list[int]], wanted: Mapping[str, list[int]]) -> None:
    """Raise UserError naming the parameters of ``path`` that are missing, of another shape, or too many."""
    names = [name for name in {**wanted, **saved} if saved.get(name) != wanted.get(name)]
    if names:
        shown = [f"{name} {saved.get(name, 'missing')} (model: {wanted.get(name, 'none')})" for name in names[:SHOWN]]
        more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        raise UserError(
            f"{path} is of another architecture: {', '.join(shown)}{more}; load it with the MODEL it was trained with"
        )


def _load_moments(path: Path, moments: Mapping[str, Tensor], model: nn.Module, optimizer: Optimizer) -> None:
    """Give every parameter its pieces of ``moments``, whose names are ``<state>/<parameter>``."""
    parameters = dict(model.named_parameters())
    state: dict[Tensor, dict[str, Tensor]] = {}
    for place, whole in moments.items():
        key, _, name = place.partition("/")
        if name not in parameters:
            raise UserError(f"{path / OPTIMIZER} does not belong to its model: it has {place}; use another checkpoint")
        parameter = parameters[name]
        is_moment = whole.shape == whole_shape(parameter)
        state.setdefault(parameter, {})[key] = cut_piece(parameter, whole) if is_moment else whole
    # torch's own loading brings every state to the device and the type that the optimizer keeps it in
    ordered: list[Any] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbered = {number: state[parameter] for number, parameter in enumerate(ordered) if parameter in state}
    optimizer.load_state_dict({"state": numbered, "param_groups": optimizer.state_dict()["param_groups"]})
