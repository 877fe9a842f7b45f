"""Mixed precision: what a config asks for, the dtypes of a step, and training near float32."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from common.engine import amp
from common.engine.amp import Cast, build_mixed_precision, compute_dtype
from common.engine.engine import initialize
from common.engine.upstream import AMP_TYPE, gpc
from common.optim.build import build_optimizer
from common.testing.parity_cases import CASES, MODERN, build_engine, fit, launched_clipping
from common.testing.ranks import launched, run_ranks

FLOAT32 = torch.float32
FLOAT16 = torch.float16
BFLOAT16 = torch.bfloat16
OPERATIONS, LAYERS, ALL = Cast
MODES = {
    "TORCH bfloat16": {"mode": AMP_TYPE.TORCH, "dtype": "bfloat16"},
    "TORCH float16": {"mode": AMP_TYPE.TORCH, "dtype": "float16"},
    "NAIVE bfloat16": {"mode": AMP_TYPE.NAIVE, "dtype": torch.bfloat16},
    "NAIVE float16": {"mode": AMP_TYPE.NAIVE, "dtype": torch.float16},
    "APEX O3 bfloat16": {
        "mode": AMP_TYPE.APEX,
        "opt_level": "O3",
        "dtype": "bfloat16",
    },
}


@pytest.mark.parametrize(
    ("fp16", "device", "dtype", "cast", "scale"),
    [
        (
            None,
            "cuda",
            FLOAT32,
            None,
            None,
        ),
        (
            dict(mode=AMP_TYPE.TORCH, dtype=FLOAT16, init_scale=8.0),
            "cpu",
            FLOAT16,
            OPERATIONS,
            8,
        ),
        (
            dict(mode=AMP_TYPE.NAIVE, dtype=FLOAT16, enabled=False),
            "cuda",
            FLOAT16,
            LAYERS,
            None,
        ),
        (
            dict(mode=AMP_TYPE.APEX, init_scale=8.0),
            "cpu",
            BFLOAT16,
            OPERATIONS,
            None,
        ),
        (
            dict(mode=AMP_TYPE.APEX, opt_level="O0"),
            "cuda",
            FLOAT32,
            None,
            None,
        ),
        (
            dict(mode=AMP_TYPE.APEX, opt_level="O2", dtype="float16"),
            "cpu",
            FLOAT16,
            LAYERS,
            2**16,
        ),
        (
            dict(mode=AMP_TYPE.APEX, opt_level="O3", dtype=FLOAT16),
            "cuda",
            FLOAT16,
            ALL,
            None,
        ),
    ],
)
def test_config(fp16, device, dtype, cast, scale, monkeypatch):
    monkeypatch.setattr(amp, "is_fast", lambda name: name == "bfloat16")
    precision = build_mixed_precision(fp16, device)
    assert precision.dtype == dtype
    assert compute_dtype(fp16, device) == dtype
    assert precision.cast == cast
    found_scale = precision.scaler and precision.scaler.get_scale()
    assert found_scale == scale
    takes_hundredfold_time = device == "cpu" and dtype == FLOAT16
    is_warned = precision.warning is not None
    assert is_warned == takes_hundredfold_time


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        ((7, 5), FLOAT16),
        ((8, 0), BFLOAT16),
    ],
)
def test_the_default_of_a_gpu_is_the_type_that_it_has(capability, dtype, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert compute_dtype(dict(mode=AMP_TYPE.TORCH), "cuda") == dtype


def test_weights_that_meet_padding_alone_have_no_gradient():
    """oneDNN's gradient of the other 8 weights of a kernel is what was in memory before."""
    precision = build_mixed_precision(MODES["TORCH bfloat16"], "cpu")
    layer = precision.apply(nn.Conv2d(24, 24, kernel_size=3, stride=2, padding=1))
    with precision.autocast(torch.device("cpu")):
        output = layer(torch.ones(8, 24, 1, 1))
        loss = output.sum()
    # Else what was in memory may be zeros.
    filled = [torch.full((24, 24, 3, 3), 7.0, dtype=BFLOAT16) for _ in range(99)]
    del filled
    loss.backward()
    assert layer.weight.grad.count_nonzero() == 24 * 24


@pytest.mark.parametrize(
    ("fp16", "expected"),
    [
        (
            MODES["TORCH bfloat16"],
            {"output": BFLOAT16, "weight": FLOAT32, "grad": FLOAT32},
        ),
        (
            MODES["NAIVE float16"],
            {"output": FLOAT16, "weight": FLOAT32, "grad": FLOAT32},
        ),
        (
            MODES["APEX O3 bfloat16"],
            {"output": BFLOAT16, "weight": BFLOAT16, "grad": BFLOAT16},
        ),
        (
            # on a CPU without instructions for bfloat16
            dict(mode=AMP_TYPE.NAIVE),
            {"output": FLOAT32, "weight": FLOAT32, "grad": FLOAT32},
        ),
    ],
)
def test_types(fp16, expected, monkeypatch):
    monkeypatch.setattr(amp, "is_fast", lambda _: False)
    linear = nn.Linear(4, 3)
    last = nn.BatchNorm1d(3)
    model = nn.Sequential(linear, nn.LayerNorm(3), last)
    outputs = []
    last.register_forward_hook(lambda _, inputs, output: outputs.append(output))
    with launched(fp16=fp16):
        optimizer = build_optimizer(model, "sgd")
        engine, *_ = initialize(model, optimizer, nn.CrossEntropyLoss())
        batch = torch.randn(2, 4), torch.tensor([0, 1])
        logits, _, loss = engine.execute_schedule(iter([batch]))
    (output,) = outputs
    found = {
        "output": output.dtype,
        "weight": linear.weight.dtype,
        "grad": linear.weight.grad.dtype,
    }
    assert found == expected
    assert logits.dtype == FLOAT32
    assert loss.dtype == FLOAT32


class Scaled(nn.Module):
    """A layer that owns a parameter, and has a batch norm as a child."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.norm(x)


def running_statistics(build_last: Callable[[], nn.Module], fp16: Any) -> torch.Tensor:
    """Return a batch norm's running mean and variance after three steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), build_last())
    labels = torch.arange(8) % 3
    with launched(fp16=fp16):
        optimizer = build_optimizer(model, "sgd")
        engine, *_ = initialize(model, optimizer, nn.CrossEntropyLoss())
        engine.train()
        for _ in range(3):
            images = 3 + torch.randn(8, 4)
            engine.execute_schedule(iter([(images, labels)]))
            engine.step()
            engine.zero_grad()
    mean, variance, _ = model.buffers()
    return torch.stack([mean, variance])


def build_batch_norm() -> nn.Module:
    return nn.BatchNorm1d(3)


@pytest.mark.parametrize("build_last", [build_batch_norm, Scaled])
@pytest.mark.parametrize(
    "fp16",
    [
        MODES["NAIVE bfloat16"],
        dict(mode=AMP_TYPE.APEX, opt_level="O2", dtype="float16"),
    ],
)
def test_running_statistics_are_near_float32s(fp16, build_last):
    """Those of copies in half precision would be lost: an evaluation would see the first, 0, 1."""
    expected = running_statistics(build_last, None)
    mean, variance = expected
    assert mean.abs().min() > 0.1
    assert (variance - 1).abs().min() > 0.1
    found = running_statistics(build_last, fp16)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0)


IN_PARALLEL = (
    "TORCH bfloat16",
    "TORCH float16",
    "NAIVE float16",
    "APEX O3 bfloat16",
)


def allowed(name: str) -> float:
    """Return how far the losses, which fall from 2.3 to 2.1, may be from those in float32."""
    return 2e-3 if name.endswith(" float16") else 1e-2


def train(name: str | None, optimizer_name: str, steps: int = 20, **arguments: Any) -> list[float]:
    """Train in the mode ``name`` and the launch's parallel mode; return the losses."""
    gpc.config["fp16"] = MODES[name] if name else None
    *_, engine = build_engine(optimizer_name, **arguments)
    return fit(engine, steps)


@functools.cache
def in_float32(optimizer_name: str, is_modern: bool = False) -> list[float]:
    arguments = MODERN if is_modern else {}
    with launched_clipping():
        return train(None, optimizer_name, **arguments)


@pytest.mark.parametrize("optimizer_name", ["sgd", "lamb"])
@pytest.mark.parametrize("name", MODES)
def test_stays_near_float32(name, optimizer_name):
    """With LAMB, activations are recomputed in the backward pass."""
    expected = in_float32(optimizer_name)
    recomputes = optimizer_name == "lamb"
    with launched_clipping():
        losses = train(name, optimizer_name, activation_checkpoint=recomputes)
    assert losses != expected
    assert losses == pytest.approx(expected, abs=allowed(name))


def train_as_rank(config: dict[str, Any]) -> list[list[float]]:
    with launched_clipping(**config):
        # Two steps only: one takes long here.
        losses = [train(name, "lamb", steps=2) for name in IN_PARALLEL]
        modern = train("NAIVE float16", "lamb", steps=2, **MODERN)
        return [*losses, modern]


@pytest.mark.parametrize("case", ["dp2", "1d-2", "2d-4", "2.5d-8", "3d-8"])
def test_stays_near_float32_in_parallel(case):
    world_size, config, *_ = CASES[case]
    by_rank = run_ranks(world_size, train_as_rank, config)
    first, *others = by_rank
    for losses in others:
        assert losses == first
    *by_mode, modern = first
    expected = in_float32("lamb")[:4]
    for name, losses in zip(IN_PARALLEL, by_mode, strict=True):
        assert losses == pytest.approx(expected, abs=allowed(name)), name
    expected_of_modern = in_float32("lamb", is_modern=True)[:4]
    assert modern == pytest.approx(expected_of_modern, abs=allowed("NAIVE float16"))
