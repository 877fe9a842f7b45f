"""Updates that are not finite are skipped by all ranks, leave no trace, and are counted."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from common.engine.amp_test import MODES
from common.engine.engine import Engine, initialize
from common.engine.tensor_parallel.sharding import named_shards
from common.engine.upstream import AMP_TYPE, ParallelMode, gpc
from common.errors import AgreedError
from common.optim.build import build_optimizer
from common.testing.parity_cases import (
    CASES,
    OPTIMIZERS,
    blended_loss,
    build_engine,
    launched_clipping,
    own_batches,
)
from common.testing.ranks import launched, run_ranks

ACCUMULATION = 2
SCALE = 1024.0
Fault = Callable[[Tensor, Tensor], Tensor]
FP16 = {"mode": AMP_TYPE.TORCH, "dtype": "float16", "init_scale": SCALE}


class FaultyLoss:
    """`blended_loss` that is ``fault(loss, shard)`` in the micro-batch number ``at``, from 0."""

    def __init__(self, at: int | None, fault: Fault = lambda loss, _: loss * torch.nan) -> None:
        self.at = at
        self.fault = fault
        self.calls = 0

    def __call__(self, *args: Tensor, **named: Tensor) -> Tensor:
        loss = blended_loss(*args, **named)
        self.calls += 1
        return self.fault(loss, self.shard) if self.calls - 1 == self.at else loss


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
    """Return weights, moments and step counts, bit by bit."""
    tensors = [p for p in named_shards(model).values() if p.requires_grad]
    tensors += [value for p in tensors for value in optimizer.state.get(p, {}).values()]
    return [tensor.detach().flatten().view(torch.uint8).numpy().tobytes() for tensor in tensors]


def skip_one(optimizer_name: str, criterion: FaultyLoss) -> list[bool]:
    """Train for three steps, the second of them bad; return in which of them weights moved."""
    model, optimizer, engine = build_engine(optimizer_name, criterion)
    criterion.shard = model.blocks[1].mlp.fc1.weight
    batches = iter(own_batches(3))
    moved = []
    scaler = engine.optimizer.scaler
    for step in range(3):
        before = state_bytes(model, optimizer)
        # A script's own loop calls these.
        for _ in range(ACCUMULATION):
            engine.zero_grad()
            engine.execute_schedule(batches)
            engine.step()
        after = state_bytes(model, optimizer)
        # before the first step there are no moments
        changed = [old != new for old, new in zip(before, after, strict=False)]
        moved.append(any(changed))
        # in bfloat16 some updates are rounded away
        assert sum(changed) > len(changed) / 2 or not moved[-1]
        assert engine.optimizer.grad_norm.isfinite().item() == (step != 1)
        assert scaler is None or scaler.get_scale() == SCALE / (2 if step else 1)
    assert list(engine.optimizer.counter.state_dict().values()) == [3, 1, 0]
    assert "found_inf" not in vars(optimizer)
    return moved


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("mode", [None, *MODES])
def test_a_skipped_update_leaves_no_trace(mode, optimizer_name):
    fp16 = MODES[mode] | ({"init_scale": SCALE} if " float16" in mode else {}) if mode else None
    with launched_clipping(fp16=fp16):
        assert skip_one(optimizer_name, FaultyLoss(2)) == [True, False, True]


def loss_without_labels(loss: Tensor, _: Tensor) -> Tensor:
    """Return NaN, whose gradient is 0."""
    return nn.functional.cross_entropy(loss.expand(1, 8), torch.tensor([-100]))


def infinite_gradient_of_one_shard(loss: Tensor, shard: Tensor) -> Tensor:
    return loss + (shard - shard.detach()).sum() * 3e38 * 3e38


def update(engine: Engine, gradient: float) -> None:
    """Train on a loss that is ``gradient`` times the sum of the linear model's squared outputs."""
    engine.zero_grad()
    engine.backward(gradient * engine(torch.ones(1, 3)).square().sum())
    engine.step()


def test_batch_norms_do_not_count_what_is_not_finite():
    with launched():
        engine, *_ = initialize(norm := nn.BatchNorm1d(3), build_optimizer(norm))
        engine.zero_grad()
        engine.backward(engine(torch.full((2, 3), torch.inf)).sum())
        engine.step()
    assert torch.equal(norm.running_var, torch.ones(3))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_training_continues_as_if_an_update_had_not_been(momentum, monkeypatch):
    # memory that was used before
    monkeypatch.setattr(torch, "empty_like", lambda tensor, **_: torch.full_like(tensor, 1e9))

    def train(*gradients: float) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        engine, *_ = initialize(model, build_optimizer(model, "sgd", 0.1, momentum=momentum))
        for gradient in gradients:
            update(engine, gradient)
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    with launched():
        assert torch.equal(train(torch.nan, 1.0, torch.inf, 2.0, 3.0), train(1.0, 2.0, 3.0))


def skip_together(config: dict, faulty: int) -> list[list[bool]]:
    """Skip an update because of one rank only, with each optimizer; return what moved."""
    with launched_clipping(**config):
        at = 3 if gpc.get_global_rank() == faulty else None
        names = OPTIMIZERS if gpc.get_world_size(ParallelMode.GLOBAL) == 2 else ["lamb"]
        has_shards = "fp16" in config and "parallel" in config
        fault = infinite_gradient_of_one_shard if has_shards else loss_without_labels
        return [skip_one(name, FaultyLoss(at, fault)) for name in names]


@pytest.mark.parametrize(
    ("processes", "config"),
    [
        *(CASES[case] for case in ("dp2", "1d-2", "2d-4", "zero 1", "zero 3 x 1d-2")),
        *((2, CASES[case][1] | {"fp16": FP16}) for case in ("dp2", "1d-2", "zero 1")),
        (2, CASES["1d-2"][1] | {"fp16": FP16 | {"mode": AMP_TYPE.NAIVE}}),
    ],
)
def test_all_ranks_skip_what_is_not_finite_on_one(processes, config):
    for moved in run_ranks(processes, skip_together, config, processes - 1):
        assert moved == [[True, False, True]] * (len(OPTIMIZERS) if processes == 2 else 1)


def test_too_many_in_a_row_stop_the_run_and_one_that_resumes_it():
    def build() -> Engine:
        model = nn.Linear(3, 2)
        # not fused
        return initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))[0]

    with launched(MAX_SKIPPED=2, fp16=FP16):
        first = build()
        resumed = build()
        schedule = torch.optim.lr_scheduler.LambdaLR(resumed.optimizer.optim, lambda step: 1.0)
        for gradient in (1.0, torch.nan, torch.nan, 1.0, torch.nan, torch.nan):
            update(first, gradient)
        state = first.optimizer.step_state()
        # A run in another dtype has no scaler; one with other options has another interval.
        resumed.optimizer.load_step_state(state | {"scaler": None})
        state["scaler"]["growth_interval"] += 1
        resumed.optimizer.load_step_state(state)
        state["scaler"]["growth_interval"] -= 1
        assert resumed.optimizer.step_state() == state
        resumed.optimizer.counter.every = 8  # a GPU's counters are not read after every update
        update(resumed, torch.nan)
        schedule.step()  # no warning about the skipped first update
        message = "^by step {}, 3 con.*SKIPPED=2.* to 3.2e.01: lower .* float16$"
        with pytest.raises(AgreedError, match=message.format(7)):
            update(first, torch.nan)
        with pytest.raises(AgreedError, match=message.format(8)):
            update(resumed, 1.0)
        first.optimizer.scaler = None
        first.optimizer.load_step_state(state)
