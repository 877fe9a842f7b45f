"""Steps in each mode of mixed precision, in one process and in parallel, stay close to those in float32."""

import functools
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from common.colossal import AMP_TYPE, ParallelMode, canonical_state, gpc
from common.testing.parity_cases import ACCUMULATION, CASES, build_engine, fit, micro_batches
from common.testing.ranks import launched, run_ranks

STEPS = 20
FEW_STEPS = 3  # where a step takes long: in parallel, or recomputing
MAX_NORM = 0.3
MODES = {
    "TORCH bfloat16": {"mode": AMP_TYPE.TORCH, "dtype": "bfloat16"},
    "TORCH float16": {"mode": AMP_TYPE.TORCH, "dtype": "float16"},
    "NAIVE bfloat16": {"mode": AMP_TYPE.NAIVE, "dtype": torch.bfloat16},
    "NAIVE float16": {"mode": AMP_TYPE.NAIVE, "dtype": torch.float16},
    "APEX O0": {"mode": AMP_TYPE.APEX, "opt_level": "O0"},
    "APEX O1 float16": {"mode": AMP_TYPE.APEX, "dtype": "float16"},
    "APEX O2 float16": {"mode": AMP_TYPE.APEX, "opt_level": "O2", "dtype": "float16"},
    "APEX O3 bfloat16": {"mode": AMP_TYPE.APEX, "opt_level": "O3", "dtype": "bfloat16"},
    "APEX O3 float16": {"mode": AMP_TYPE.APEX, "opt_level": "O3", "dtype": "float16"},
}
IN_PARALLEL = ("TORCH bfloat16", "TORCH float16", "NAIVE float16", "APEX O3 bfloat16")
Curve = tuple[list[float], dict[str, Tensor]]  # losses, weights


def allowed(name: str) -> float:
    """Return how far the losses, which fall from 2.3 to 2.1, may be from those in float32."""
    return 0.0 if name == "APEX O0" else 2e-3 if name.endswith(" float16") else 1e-2


def train(name: str | None, optimizer_name: str, steps: int = STEPS, **arguments: Any) -> Curve:
    """Train in the mode ``name`` and the launch's parallel mode."""
    gpc.config["fp16"] = MODES[name] if name else None
    place = gpc.get_local_rank(ParallelMode.DATA), gpc.get_world_size(ParallelMode.DATA)
    model, _, engine = build_engine(optimizer_name, **arguments)
    return fit(engine, list(micro_batches(steps, *place))), dict(canonical_state(model))


def launched_here(**config: Any) -> AbstractContextManager[None]:
    return launched(**config, clip_grad_norm=MAX_NORM, gradient_accumulation=ACCUMULATION)


@functools.cache
def in_float32(optimizer_name: str) -> Curve:
    with launched_here():
        return train(None, optimizer_name)


def distance(curve: Curve, expected: Curve) -> float:
    return max(abs(a - b) for a, b in zip(curve[0], expected[0], strict=False))


NO_ROOM = ("APEX O3 float16", "lamb")  # for LAMB's second moments


@pytest.mark.parametrize(
    ("name", "optimizer_name"), [(m, o) for m in MODES for o in ("sgd", "lamb") if (m, o) != NO_ROOM]
)
def test_stays_near_float32(name: str, optimizer_name: str) -> None:
    expected = in_float32(optimizer_name)
    with launched_here():
        curve = train(name, optimizer_name)
    assert distance(curve, expected) <= allowed(name)
    assert (distance(curve, expected) > 0) == (name != "APEX O0")
    has_masters = {weight.dtype for weight in curve[1].values()} == {torch.float32}
    assert has_masters == ("O3" not in name)


def train_as_rank(config: dict[str, Any]) -> list[Curve]:
    with launched_here(**config):
        return [train(name, "lamb", FEW_STEPS) for name in IN_PARALLEL]


@pytest.mark.parametrize("case", ["dp2", "1d-2", "2d-4", "2.5d-8", "3d-8"])
def test_stays_near_float32_in_parallel(case: str) -> None:
    by_rank = run_ranks(CASES[case][0], train_as_rank, CASES[case][1])
    for number, name in enumerate(IN_PARALLEL):
        assert all(curves[number][0] == by_rank[0][number][0] for curves in by_rank)
        assert distance(by_rank[0][number], in_float32("lamb")) <= allowed(name), name


@pytest.mark.parametrize("name", ["TORCH bfloat16", "NAIVE bfloat16", "APEX O3 bfloat16"])
def test_checkpointed_activations_change_nothing(name: str) -> None:
    with launched_here():
        losses = [train(name, "sgd", FEW_STEPS, activation_checkpoint=on)[0] for on in (False, True)]
    assert losses[0] == losses[1]
