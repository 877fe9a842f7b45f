"""Mixed precision: what the config asks for, and updates that overflow."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.colossal import AMP_TYPE, initialize
from common.colossal.amp import build_mixed_precision
from common.errors import UserError
from common.testing import launched, run_ranks


@pytest.mark.parametrize(
    ("fp16", "device", "dtype", "scale"),
    [
        (None, "cuda", None, None),
        ({}, "cuda", None, None),
        ({"mode": None}, "cuda", None, None),
        ({"mode": AMP_TYPE.TORCH}, "cpu", torch.bfloat16, None),
        ({"mode": AMP_TYPE.TORCH, "init_scale": 8.0}, "cpu", torch.bfloat16, None),
        ({"mode": AMP_TYPE.TORCH, "dtype": "float16"}, "cpu", torch.float16, 2.0**16),
        ({"mode": AMP_TYPE.TORCH, "dtype": torch.float16, "init_scale": 8.0}, "cpu", torch.float16, 8.0),
        ({"mode": AMP_TYPE.TORCH, "dtype": "bfloat16"}, "cuda", torch.bfloat16, None),
    ],
)
def test_config(fp16: dict | None, device: str, dtype: torch.dtype | None, scale: float | None) -> None:
    precision = build_mixed_precision(fp16, device)
    assert precision.dtype == dtype
    assert (precision.scaler and precision.scaler.get_scale()) == scale


@pytest.mark.parametrize(
    ("fp16", "message"),
    [
        ({"mode": "torch"}, r"fp16.mode='torch' is a string: write AMP_TYPE.TORCH"),
        ({"mode": AMP_TYPE.NAIVE}, "fp16.mode=AMP_TYPE.NAIVE is not supported"),
        ({"mode": AMP_TYPE.TORCH, "dtype": "fp8"}, "fp16.dtype='fp8': write"),
        ({"mode": AMP_TYPE.TORCH, "int_scale": 1}, "fp16.int_scale is not an option.*did you mean 'init_scale'"),
    ],
)
def test_config_that_is_refused(fp16: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_mixed_precision(fp16, "cpu")


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


def train_with_overflow(overflowing_rank: int) -> tuple[list[float], list[float], Tensor]:
    """Three steps of tensor-parallel ranks, the first of which overflows on one rank only."""
    with launched(parallel={"tensor": {"mode": "1d", "size": 2}}, fp16={"mode": AMP_TYPE.TORCH, "dtype": "float16"}):
        rank = int(torch.distributed.get_rank())
        model = nn.Linear(2, 1)
        before = model.weight.detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        engine, *_ = initialize(model, optimizer, nn.MSELoss())
        scales, moved = [], []
        for step in range(3):
            overflows = step == 0 and rank == overflowing_rank
            engine.zero_grad()
            loss = engine.criterion(engine(torch.ones(1, 2)), torch.zeros(1, 1))
            engine.backward(loss * 1e35 if overflows else loss)
            engine.step()
            schedule.step()  # no warning about the skipped first update
            scales.append(engine.optimizer.scaler.get_scale())
            moved.append((model.weight - before).abs().max().item())
        return scales, moved, engine.optimizer.grad_norm


def test_all_ranks_skip_an_update_that_overflows_on_one() -> None:
    for scales, moved, grad_norm in run_ranks(2, train_with_overflow, 1):
        assert scales == [2.0**15] * 3
        assert moved[0] == 0.0
        assert moved[1] > 0.0
        assert torch.isfinite(grad_norm)
