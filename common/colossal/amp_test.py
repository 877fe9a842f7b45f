"""Mixed precision: what the config asks for, and updates that overflow."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.colossal import AMP_TYPE, amp, initialize
from common.colossal.amp import Cast, build_mixed_precision, compute_dtype
from common.errors import UserError
from common.testing.parity_cases import build_engine, micro_batches
from common.testing.ranks import launched, run_ranks


@pytest.fixture
def bfloat16_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a CPU with instructions for bfloat16 and none for float16."""
    monkeypatch.setattr(amp, "is_fast", lambda name: name == "bfloat16")


@pytest.mark.parametrize(
    ("fp16", "device", "cast", "dtype", "scale"),
    [
        (None, "cuda", None, torch.float32, None),
        ({}, "cuda", None, torch.float32, None),
        ({"mode": None}, "cuda", None, torch.float32, None),
        ({"mode": AMP_TYPE.TORCH}, "cpu", Cast.OPERATIONS, torch.bfloat16, None),
        ({"mode": AMP_TYPE.TORCH, "init_scale": 8.0}, "cpu", Cast.OPERATIONS, torch.bfloat16, None),
        ({"mode": AMP_TYPE.TORCH, "dtype": "float16"}, "cpu", Cast.OPERATIONS, torch.float16, 2.0**16),
        ({"mode": AMP_TYPE.TORCH, "dtype": torch.float16, "init_scale": 8.0}, "cpu", Cast.OPERATIONS, torch.float16, 8),
        ({"mode": AMP_TYPE.TORCH, "dtype": "bfloat16"}, "cuda", Cast.OPERATIONS, torch.bfloat16, None),
        ({"mode": AMP_TYPE.NAIVE}, "cpu", Cast.LAYERS, torch.bfloat16, None),
        ({"mode": AMP_TYPE.NAIVE, "dtype": "float16", "init_scale": 8.0}, "cpu", Cast.LAYERS, torch.float16, 8),
        ({"mode": AMP_TYPE.APEX, "opt_level": "O0"}, "cuda", None, torch.float32, None),
        ({"mode": AMP_TYPE.APEX}, "cpu", Cast.OPERATIONS, torch.bfloat16, None),
        (
            {"mode": AMP_TYPE.APEX, "opt_level": "O1", "dtype": "float16"},
            "cpu",
            Cast.OPERATIONS,
            torch.float16,
            2.0**16,
        ),
        ({"mode": AMP_TYPE.APEX, "opt_level": "O2", "dtype": "float16"}, "cpu", Cast.LAYERS, torch.float16, 2.0**16),
        ({"mode": AMP_TYPE.APEX, "opt_level": "O3"}, "cuda", Cast.PARAMETERS, torch.float16, None),
    ],
)
def test_config(
    fp16: dict | None, device: str, cast: Cast | None, dtype: torch.dtype, scale: float | None, bfloat16_cpu: None
) -> None:
    precision = build_mixed_precision(fp16, device)
    assert (precision.cast, precision.dtype, compute_dtype(fp16, device)) == (cast, dtype, dtype)
    assert (precision.scaler and precision.scaler.get_scale()) == scale
    assert bool(precision.note) == (bool(fp16) and fp16["mode"] == AMP_TYPE.APEX)


@pytest.mark.parametrize(
    ("fp16", "message"),
    [
        ({"mode": "torch"}, r"fp16.mode='torch' is a string: write AMP_TYPE.TORCH"),
        ({"mode": "naive"}, r"fp16.mode='naive' is a string: write AMP_TYPE.NAIVE"),
        ({"mode": 3}, "fp16.mode=3 is none of AMP_TYPE.TORCH, AMP_TYPE.NAIVE, AMP_TYPE.APEX"),
        ({"mode": AMP_TYPE.TORCH, "dtype": "fp8"}, "fp16.dtype='fp8': write"),
        ({"mode": AMP_TYPE.NAIVE, "dtype": torch.float32}, "fp16.dtype=torch.float32: write"),
        ({"mode": AMP_TYPE.TORCH, "int_scale": 1}, "fp16.int_scale means nothing.*did you mean 'init_scale'"),
        ({"mode": AMP_TYPE.NAIVE, "opt_level": "O1"}, "fp16.opt_level means nothing to AMP_TYPE.NAIVE: leave it out"),
        ({"mode": AMP_TYPE.APEX, "opt_level": "O4"}, "fp16.opt_level='O4' is none of O0, O1, O2, O3"),
        ({"mode": AMP_TYPE.APEX, "keep_batchnorm_fp32": True}, "fp16.keep_batchnorm_fp32 means nothing to.*APEX O1"),
        ({"mode": AMP_TYPE.APEX, "opt_level": "O3", "init_scale": 8}, "fp16.init_scale means nothing to.*APEX O3"),
    ],
)
def test_config_that_is_refused(fp16: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_mixed_precision(fp16, "cpu")


@pytest.mark.parametrize("opt_level", [None, "O1", "O2", "O3"])
@pytest.mark.parametrize("mode", AMP_TYPE)
def test_without_instructions_the_default_is_float32(
    mode: AMP_TYPE, opt_level: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(amp, "is_fast", lambda _: False)
    monkeypatch.setattr(amp, "instruction_set", lambda: "AVX2")
    fp16 = {"mode": mode} | ({"opt_level": opt_level} if mode == AMP_TYPE.APEX and opt_level else {})
    if fp16.get("opt_level") != "O3":
        fp16["init_scale"] = 8.0
    precision = build_mixed_precision(fp16, "cpu")
    assert (precision.cast, precision.dtype, precision.scaler) == (None, torch.float32, None)
    assert precision.warning is None
    assert precision.note.endswith("in float32, because this CPU (AVX2) has no bfloat16 instructions")
    assert compute_dtype(fp16, "cpu") == torch.float32
    assert compute_dtype(fp16, "cuda") == torch.float16  # a GPU's default is its own


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", torch.bfloat16])
def test_an_explicit_type_is_obeyed_with_a_warning(dtype: str | torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    fp16, name = {"mode": AMP_TYPE.NAIVE, "dtype": dtype}, str(dtype).removeprefix("torch.")
    monkeypatch.setattr(amp, "instruction_set", lambda: "AVX2")
    for fast in (True, False):
        monkeypatch.setattr(amp, "is_fast", lambda _, fast=fast: fast)
        precision = build_mixed_precision(fp16, "cpu")
        assert (precision.cast, precision.dtype) == (Cast.LAYERS, getattr(torch, name))
        assert (precision.warning is None) == fast
    assert precision.warning.startswith(f"warning: fp16.dtype='{name}': this CPU (AVX2) has no instructions for it")
    assert precision.warning.endswith("leave dtype out, and this CPU computes in float32")
    assert "\n" not in precision.warning


def test_a_cpu_that_cannot_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def conv2d(*_: Tensor) -> Tensor:
        raise RuntimeError("\"slow_conv2d_cpu\" not implemented for 'Half'")

    monkeypatch.setattr(amp.F, "conv2d", conv2d)
    with pytest.raises(UserError, match="fp16.dtype=torch.float16: this CPU cannot.*not implemented for 'Half'"):
        build_mixed_precision({"mode": AMP_TYPE.NAIVE, "dtype": "float16"}, "cpu")


def test_model_computes_in_half_and_loss_in_float32() -> None:
    seen = []

    class Probe(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            outputs = super().forward(inputs)
            seen.append(outputs.dtype)
            return outputs

    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        seen.append(logits.dtype)
        return F.cross_entropy(logits, labels)

    with launched(fp16={"mode": AMP_TYPE.TORCH, "dtype": "bfloat16"}):
        model = Probe(4, 3)
        engine, *_ = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), criterion)
        batch = (torch.randn(2, 4), torch.tensor([0, 1]))
        engine.execute_schedule(iter([tuple(tensor.to(engine.device) for tensor in batch)]))
    assert seen == [torch.bfloat16, torch.float32]
    assert model.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("mode", AMP_TYPE)
def test_without_instructions_every_layer_computes_in_float32(mode: AMP_TYPE, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amp, "is_fast", lambda _: False)
    assert set(layer_types({"mode": mode}).values()) == {torch.float32}


def layer_types(fp16: dict) -> dict[str, torch.dtype]:
    """Return the types that layers compute in, and those of the loss, the weights and the gradients."""
    seen = {}
    with launched(fp16=fp16):
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 3))
        for name, layer in zip(("first", "norm", "activation", "last"), model, strict=True):
            layer.register_forward_hook(lambda _, inputs, output, name=name: seen.update({name: output.dtype}))
        engine, *_ = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())
        engine.zero_grad()
        batch = (torch.randn(2, 4), torch.tensor([0, 1]))
        _, _, loss = engine.execute_schedule(iter([batch]))
        seen |= {"loss": loss.dtype, "weight": model[0].weight.dtype, "grad": model[0].weight.grad.dtype}
    return seen


def test_naive_computes_every_layer_in_half_on_masters() -> None:
    layers = dict.fromkeys(("first", "norm", "activation", "last"), torch.float16)
    masters = dict.fromkeys(("loss", "weight", "grad"), torch.float32)
    assert layer_types({"mode": AMP_TYPE.NAIVE, "dtype": "float16"}) == layers | masters


def test_o3_leaves_nothing_but_the_loss_in_float32() -> None:
    fp16 = {"mode": AMP_TYPE.APEX, "opt_level": "O3", "dtype": "bfloat16"}
    types = layer_types(fp16)
    assert {name for name, dtype in types.items() if dtype != torch.bfloat16} == {"loss"}
    note = build_mixed_precision(fp16, "cpu").note
    assert note == f"AMP_TYPE.APEX O3: by PyTorch instead of apex.amp; in bfloat16: {Cast.PARAMETERS.value}"


def test_a_layer_norm_of_large_values_does_not_overflow() -> None:
    with launched(fp16={"mode": AMP_TYPE.NAIVE, "dtype": "float16"}):
        model = nn.LayerNorm(1024)
        inputs = 3e3 * torch.randn(2, 1024)
        expected = F.layer_norm(inputs, (1024,))
        engine, *_ = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))
        torch.testing.assert_close(engine(inputs), expected, rtol=0, atol=5e-3)


def train_with_overflow(overflowing_rank: int, mode: AMP_TYPE) -> tuple[list[float], list[float], Tensor]:
    """Six steps of tensor-parallel ranks, the first of which overflows on one rank only."""
    fp16 = {"mode": mode, "dtype": "float16", "init_scale": 2.0**10}
    with launched(parallel={"tensor": {"mode": "1d", "size": 2}}, fp16=fp16):
        rank = int(torch.distributed.get_rank())
        model, optimizer, engine = build_engine("sgd")
        before = model.head.bias.detach().clone()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        scales, moved = [], []
        for step, (images, labels) in enumerate(micro_batches()):
            overflows = step == 0 and rank == overflowing_rank
            engine.zero_grad()
            loss = engine.criterion(engine(images), **labels)
            engine.backward(loss * 1e35 if overflows else loss)
            engine.step()
            schedule.step()  # no warning about the skipped first update
            scales.append(engine.optimizer.scaler.get_scale())
            moved.append((model.head.bias - before).abs().max().item())
        return scales, moved, engine.optimizer.grad_norm


@pytest.mark.parametrize("mode", [AMP_TYPE.TORCH, AMP_TYPE.NAIVE, AMP_TYPE.APEX])
def test_all_ranks_skip_an_update_that_overflows_on_one(mode: AMP_TYPE) -> None:
    for scales, moved, grad_norm in run_ranks(2, train_with_overflow, 1, mode):
        assert scales == [2.0**9] * 6
        assert moved[0] == 0.0
        assert moved[1] > 0.0
        assert torch.isfinite(grad_norm)
