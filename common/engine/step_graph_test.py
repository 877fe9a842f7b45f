"""Recorded steps against plain ones, to the bit: a tape takes the place of a CUDA graph."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.optim import AdamW, Optimizer

from common.data.mixup import MixupLoss
from common.engine.engine import Engine, initialize
from common.engine.step_optimizer import StepOptimizer
from common.engine.upstream import AMP_TYPE, gpc
from common.errors import AgreedError, UserError
from common.optim.build import OPTIMIZERS
from common.optim.schedules import build_lr_scheduler
from common.recording import RECORDINGS
from common.testing.ranks import launched, run_ranks
from common.testing.tape import TapeRecording
from common.training import build_training

MODEL = dict(
    image_size=16,
    patch_size=8,
    width=16,
    depth=2,
    heads=2,
    num_classes=5,
    dropout=0.1,
    drop_path=0.1,
)
STEPS = 10
BAD = 6  # the step whose images are not finite; it is replayed
CONFIG: dict[str, Any] = dict(
    MODEL=MODEL,
    LEARNING_RATE=1e-2,
    WEIGHT_DECAY=0.1,
    OPTIMIZER={"name": "adamw"},
    clip_grad_norm=1.0,
    TF32=False,
)
# Optimizers whose rates differ among groups, or which scale them.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "lamb": [{}, {"variant": "timm", "decay_all": False}],
    "muon": [{"decay_all": False, "adamw_lr_scale": 0.5}],
    "adamw": [{"layer_decay": 0.7}],
    "sgd": [{}, {"nesterov": True, "momentum": 0.8}],
}


@pytest.fixture(autouse=True)
def tape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECORDINGS, "cpu", TapeRecording)


THREE = dict(gradient_accumulation=3, LOG=dict(noise_scale=True))
CASES: dict[str, dict[str, Any]] = {
    f"{name} {options}": {"OPTIMIZER": {"name": name, **options}}
    for name, several in OPTIONS.items()
    for options in several
}
CASES |= {
    "three micro-batches": THREE,
    "lamb, three": dict(OPTIMIZER={"name": "lamb"}, **THREE),
    "bfloat16": dict(
        fp16=dict(mode=AMP_TYPE.TORCH, dtype="bfloat16"),
    ),
    "float16": dict(
        fp16=dict(mode=AMP_TYPE.TORCH, dtype="float16", growth_interval=2),
    ),
    "float16, three": dict(
        fp16=dict(mode=AMP_TYPE.TORCH, dtype="float16"),
        **THREE,
    ),
    "NAIVE": dict(
        fp16=dict(mode=AMP_TYPE.NAIVE, dtype="bfloat16"),
    ),
    "O3": dict(
        fp16=dict(mode=AMP_TYPE.APEX, dtype="bfloat16", opt_level="O3"),
    ),
    "one weight is frozen": dict(FREEZE="body"),
    "batch norms": dict(
        MODEL=dict(timm="resnet10t", image_size=32, num_classes=5),
    ),
}


def batches(config: Mapping[str, Any], step: int) -> Iterator[Any]:
    """Yield the micro-batches of a step, with two labels an image."""
    random = torch.Generator().manual_seed(step)
    size = config["MODEL"]["image_size"]
    for _ in range(config.get("gradient_accumulation", 1)):
        images = torch.randn(4, 3, size, size, generator=random)
        if step == BAD:
            images[0] = torch.nan
        target = torch.randint(5, (4,), generator=random)
        labels = {
            "target": target,
            "other": target.flip(0),
            "lam": torch.tensor(step / STEPS),
        }
        yield images, labels


@dataclass
class Trained:
    """What a training leaves, and its state after step 5."""

    said: list[Any] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    weights: Tensor = field(default_factory=lambda: torch.empty(0))


def noise_averages(engine: Engine) -> list[Tensor]:
    noise_scale: Any = engine.noise_scale
    return [noise_scale.averages, noise_scale.tensor_averages]


def state_of(engine: Engine, model: torch.nn.Module) -> dict[str, Any]:
    state = {
        "model": model.state_dict(),
        "optimizer": engine.optimizer.state_dict(),
        "step": engine.optimizer.step_state(),
        "noise": engine.noise_scale and noise_averages(engine),
        "random": torch.get_rng_state(),
    }
    return copy.deepcopy(state)


def load_state(engine: Engine, model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    model.load_state_dict(state["model"])
    engine.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
    engine.optimizer.load_step_state(state["step"])
    if engine.noise_scale:
        for averages, saved in zip(noise_averages(engine), state["noise"], strict=True):
            averages.copy_(saved)
    torch.set_rng_state(state["random"])


def train(config: Mapping[str, Any], state: Mapping[str, Any] | None = None, **more: Any):
    """Train for ten steps with a schedule, or from ``state`` on; note what each step says."""
    config = CONFIG | config | more
    found = Trained()
    with launched(**config):
        torch.manual_seed(0)
        model, optimizer, engine = build_training(gpc.config, MixupLoss(0.1))
        schedule = build_lr_scheduler(optimizer, "cosine", STEPS, 3)
        engine.train()
        start = 0
        if state:
            load_state(engine, model, state)
            start = state["step"]["updates"]
            optimizer._opt_called = True
            for _ in range(start):
                schedule.step()
        said = found.said
        for step in range(start, STEPS):
            rates = [group["lr"] for group in optimizer.param_groups]
            results = engine.train_step(batches(config, step))
            for output, _, loss in results:
                said.append([loss.item(), output.tolist(), engine.optimizer.accumulated])
            said.append([engine.optimizer.grad_norm.item(), rates])
            schedule.step()
            if step == 4:
                found.state = state_of(engine, model)
        said.append(engine.total_loss.item())
        said.append(engine.optimizer.step_state())
        said.append(engine.noise_scale and [a.tolist() for a in noise_averages(engine)])
        said.append([buffer.tolist() for buffer in model.buffers()])
        if engine.graphs:
            parts = {"first", "update"}
            if engine.optimizer.accumulation > 1:
                parts.add("next")
            assert engine.graphs.parts.keys() == parts
        found.weights = parameters_to_vector(model.parameters()).detach()
    return found


def test_every_optimizer_has_a_case():
    assert OPTIONS.keys() == OPTIMIZERS.keys()


@pytest.mark.parametrize("case", CASES)
def test_recorded_steps_have_the_bits_of_plain_steps_and_resume(case):
    plain = train(CASES[case])
    recorded = train(CASES[case], GRAPHS=True)
    assert str(recorded.said) == str(plain.said)  # NaN is not equal to itself
    assert torch.equal(recorded.weights, plain.weights)
    assert plain.weights.isfinite().all()
    resumed = train(CASES[case], recorded.state, GRAPHS=True)
    assert torch.equal(resumed.weights, plain.weights)
    assert str(resumed.said[-3:]) == str(plain.said[-3:])


@pytest.mark.parametrize("case", [case for case in CASES if "{" in case])
def test_rates_in_float32_differ_little_from_numbers(case, monkeypatch):
    """A rate that is scaled in place would be wrong in plain and recorded steps alike."""
    found = train(CASES[case])
    monkeypatch.setattr(StepOptimizer, "_rates_on_device", lambda _: nullcontext())
    expected = train(CASES[case])
    torch.testing.assert_close(found.weights, expected.weights, rtol=0, atol=1e-5)


def test_an_option_that_changes_is_not_kept_by_the_recording():
    """A user's schedule of weight decay, say."""

    def run(**config: Any) -> Tensor:
        with launched(**CONFIG, **config):
            torch.manual_seed(0)
            model, optimizer, engine = build_training(gpc.config, MixupLoss())
            for step in range(9):
                if step == 5:
                    optimizer.param_groups[0]["weight_decay"] = 50.0
                list(engine.train_step(batches(CONFIG, step)))
            return model.head.weight.detach()

    recorded = run(GRAPHS=True)
    plain = run()
    assert torch.equal(recorded, plain)


def test_too_many_skipped_updates_end_recorded_steps_too():
    with launched(**CONFIG, GRAPHS=True, MAX_SKIPPED=3):
        _, _, engine = build_training(gpc.config, MixupLoss())
        engine.optimizer.counter.every = 10  # not read while they are skipped, as on a GPU
        for step in (0, 1, 2, 3, 4, BAD, BAD, BAD, BAD):
            list(engine.train_step(batches(CONFIG, step)))
        with pytest.raises(AgreedError, match="^by step 10, 4 consecutive updates were skipped"):
            list(engine.train_step(batches(CONFIG, 5)))


FusedAdamW = partial(AdamW, fused=True)


def build_engine(build_optimizer: Callable[..., Optimizer], **config: Any) -> Engine:
    model = nn.Linear(3, 2)
    optimizer = build_optimizer(model.parameters(), lr=0.1)
    engine, *_ = initialize(model, optimizer, **config)
    return engine


def start(**config: Any) -> None:
    """Launch with ``config``, and build an engine."""
    with launched(GRAPHS=True, **config):
        build_engine(FusedAdamW)


def test_steps_run_plainly_where_they_cannot_be_recorded(monkeypatch, capfd):
    said = "training runs without CUDA graphs: "
    with launched(GRAPHS=True):
        build_engine(AdamW)
    assert capfd.readouterr().out == f"{said}AdamW cannot skip an update on the device\n"
    run_ranks(2, start)
    assert capfd.readouterr().out == f"{said}2 processes\n"
    start()
    assert capfd.readouterr().out == ""
    monkeypatch.delitem(RECORDINGS, "cpu")
    start()
    assert capfd.readouterr().out == f"{said}no GPU\n"


def test_a_step_that_waits_for_the_device_is_refused():
    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        return logits.sum() * logits.mean().item()

    batch = torch.ones(2, 3), torch.ones(2)
    with launched(GRAPHS=True):
        engine = build_engine(FusedAdamW, criterion=criterion)
        for _ in range(3):
            list(engine.train_step(repeat(batch)))
        with pytest.raises(UserError, match="^GRAPHS=True: .*_local_scalar.*GRAPHS=False$"):
            list(engine.train_step(repeat(batch)))
