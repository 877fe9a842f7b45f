"""A train record against a clock of which every second is known."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from common.config.plan import Plan
from common.engine.engine import initialize
from common.engine.trainer import Trainer
from common.engine.upstream import BaseHook
from common.errors import UserError
from common.metrics import hook
from common.metrics.hook import MetricsHook
from common.metrics.metrics_file import CHARTS, UNPLOTTED, Metrics, read_metrics
from common.optim.lamb import Lamb
from common.resolutions import Resolution
from common.testing.ranks import launched

CLOCK = SimpleNamespace(now=0.0)


def let_pass(seconds: float) -> None:
    CLOCK.now += seconds


def tick() -> float:
    """Let 1 s pass; the trainer looks at this clock before and after it waits for a batch."""
    let_pass(1)
    return CLOCK.now


SIZES = [
    Resolution(1, 8, 4, 2, 8, 3),
    Resolution(2, 16, 4, 2, 8, 3),
    Resolution(3, 16, 4, 4, 16, 1),  # another batch; not reached
]
PLAN = Plan(
    world_size=1,
    tensor_parallel=1,
    data_parallel=1,
    micro_batch=4,
    accumulation=2,
    total_batch=8,
    epochs=2,
    steps_per_epoch=3,
    warmup_steps=0,
    total_steps=6,
    last_step=4,
    resolutions=SIZES,
)


@dataclass
class Trained:
    records: list[Metrics]
    model: nn.Linear
    losses: list[float]  # of each micro-batch


def fit(folder: Path, monkeypatch: pytest.MonkeyPatch, *hooks: Any) -> Trained:
    """Train for four steps, of which the third is the last of an epoch; record it and the last."""
    clock_of_hook = SimpleNamespace(perf_counter=lambda: CLOCK.now, time=lambda: 0.0)
    clock_of_trainer = SimpleNamespace(perf_counter=tick)
    monkeypatch.setattr(hook, "time", clock_of_hook)
    monkeypatch.setattr("common.engine.trainer.time", clock_of_trainer)
    losses = []

    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(logits, labels)
        losses.append(loss.item())
        return loss

    with launched(gradient_accumulation=2, LOG={"noise_scale": True}):
        model = nn.Linear(3, 2)
        model.register_forward_hook(lambda *_: let_pass(1))
        model.weight.register_hook(lambda _: let_pass(3))  # in the backward pass
        images = torch.randn(4, 3)
        labels = torch.zeros(4, dtype=torch.long)
        batches = list(itertools.repeat((images, labels), 6))
        optimizer = Lamb(model.parameters(), lr=0.1)
        engine, batches, *_ = initialize(model, optimizer, criterion, batches, batches)
        metrics = MetricsHook(
            PLAN,
            folder,
            peak_samples_per_s={8: 8, 16: 16},
            every=3,
            tensorboard=False,
            trackers=[],
            is_main=True,
        )
        trainer = Trainer(engine)
        # An evaluation lies between two records.
        trainer.fit(batches, 2, 4, test_dataloader=batches, hooks=[metrics, *hooks])
    return Trained(lines_of(folder, "train"), model, losses)


def lines_of(folder: Path, kind: str) -> list[Metrics]:
    return [line for line in read_metrics(folder) if line["kind"] == kind]


def test_the_metrics_that_are_described_are_those_that_are_written(tmp_path, monkeypatch):
    """The run has two classes, two sizes of images, and several micro-batches in a step."""
    fit(tmp_path, monkeypatch)
    written = set()
    for record in read_metrics(tmp_path):
        written |= record.keys()
    assert written - {*UNPLOTTED} == CHARTS.keys()


def test_a_record_has_the_means_of_the_steps_since_the_last(tmp_path, monkeypatch):
    trained = fit(tmp_path, monkeypatch)
    third, fourth = trained.records
    assert third["step"] == 3
    assert third["epoch"] == 1
    assert fourth["step"] == 4
    assert fourth["epoch"] == 1.3333
    expected_third = {
        "image_size": 8,
        "mfu": 8 / 12 / 8,
        "loss": fmean(trained.losses[:6]),
    }
    expected_fourth = {
        "image_size": 16,
        "mfu": 8 / 12 / 16,
        "loss": fmean(trained.losses[6:]),
    }
    # of 12 s a step
    of_both = {
        "forward_s": 2,
        "backward_s": 6,
        "samples_per_s": 8 / 12,
        "data_wait": 2 / 12,
    }
    for line, own in ((third, expected_third), (fourth, expected_fourth)):
        expected = own | of_both
        found = {name: line[name] for name in expected}
        assert found == pytest.approx(expected)
        assert 0.1 < line["peak_memory_gb"] < 100
    gradients = [p.grad for p in trained.model.parameters()]
    norm = nn.utils.get_total_norm(gradients).item()
    assert fourth["grad_norm"] == pytest.approx(norm)
    assert fourth["lr"] == 0.1
    assert fourth["skipped"] == 0
    # All micro-batches are equal: there is no noise.
    assert fourth["noise_scale"] == pytest.approx(0, abs=1e-3)
    assert fourth["optimizer_noise_scale"] == pytest.approx(0, abs=1e-3)


class ResumeHook(BaseHook):
    """Calls ``resume`` where a checkpoint would be loaded."""

    def __init__(self, resume: Callable[[Trainer], None]):
        super().__init__(priority=10)
        self.before_train = resume


@pytest.mark.parametrize(
    ("rank", "loss"),
    [
        (1, 8.0),  # of two steps
        (None, 6.0),  # the mean of the ranks'
    ],
)
def test_the_first_record_after_a_resume_counts_earlier_steps_but_not_their_time(
    rank, loss, tmp_path, monkeypatch
):
    of_ranks = [
        {"steps": 2, "micro_batches": 2, "loss": 4.0},
        {"steps": 2, "micro_batches": 2, "loss": 8.0},
    ]

    def resume(trainer: Trainer) -> None:
        after_two_steps = {"step": 2, "epoch": 0, "epoch_step": 2, "evaluated_step": 0}
        trainer.load_state_dict(after_two_steps)
        trainer.hooks[0].load_state_dict(of_ranks, rank)

    trained = fit(tmp_path, monkeypatch, ResumeHook(resume))
    first = trained.records[0]
    own = fmean(trained.losses[:2])
    assert first["loss"] == pytest.approx((loss + own) / 3)
    assert first["samples_per_s"] == pytest.approx(8 / 12)
    assert first["forward_s"] == pytest.approx(2)
    assert first["mfu"] == pytest.approx(8 / 12 / 8)


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (
            1,
            {
                "noise_scale": [1.5, 3.0],
                "tensor_noise_scale": [[3.0, 6.0], [3.0, 6.0], [3.0, 6.0]],
            },
        ),
        (
            None,
            {
                "noise_scale": [1.0, 2.0],
                "tensor_noise_scale": [[2.0, 4.0], [2.0, 4.0], [2.0, 4.0]],
            },
        ),
    ],
)
def test_a_resume_restores_both_noise_scales(rank, expected, tmp_path, monkeypatch):
    """Each state is a rank's; of all of them it is the mean."""
    of_ranks = [
        {
            "noise_scale": [0.5, 1.0],
            "tensor_noise_scale": [[1.0, 2.0], [1.0, 2.0], [1.0, 2.0]],
        },
        {
            "noise_scale": [1.5, 3.0],
            "tensor_noise_scale": [[3.0, 6.0], [3.0, 6.0], [3.0, 6.0]],
        },
    ]
    found = {}

    def resume(trainer: Trainer) -> None:
        metrics = trainer.hooks[0]
        states = [metrics.state_dict() | of_rank for of_rank in of_ranks]
        metrics.load_state_dict(states, rank)
        found.update(metrics.state_dict())

    fit(tmp_path, monkeypatch, ResumeHook(resume))
    assert found["noise_scale"] == expected["noise_scale"]
    assert found["tensor_noise_scale"] == expected["tensor_noise_scale"]


class Figure(BaseHook):
    """A user's, with one figure."""

    def __init__(self, value: object):
        super().__init__(priority=-1)
        self.value = value

    def after_test(self, trainer: Any) -> None:
        trainer.states["figures"] = {"recall": self.value}


@pytest.mark.parametrize(
    "value",
    [
        0.5,
        torch.tensor(0.5),
        torch.tensor([0.5]),
        np.float32(0.5),
    ],
)
def test_a_figure_is_written_as_a_number(tmp_path, monkeypatch, value):
    fit(tmp_path, monkeypatch, Figure(value))
    evaluations = lines_of(tmp_path, "eval")
    types = {type(line["recall"]) for line in evaluations}
    assert types == {float}
    assert evaluations[0]["recall"] == 0.5


@pytest.mark.parametrize(
    "value",
    [
        None,
        "high",
        [0.5],
        np.zeros(2),
        torch.zeros(2),
    ],
)
def test_a_figure_that_is_no_number_is_refused(tmp_path, monkeypatch, value):
    with pytest.raises(UserError, match="^figures: recall is not a number: "):
        fit(tmp_path, monkeypatch, Figure(value))
