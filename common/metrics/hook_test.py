"""A train record against a clock of which every second is known."""

import itertools
from dataclasses import dataclass, replace
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


PLAN = Plan(1, 1, 1, 4, 2, 8, 2, steps_per_epoch=3, warmup_steps=0, total_steps=6, last_step=4)
# The third, with another batch, is not reached.
SIZES = [
    Resolution(1, 8, 4, 2, 8, 3),
    Resolution(2, 16, 4, 2, 8, 3),
    Resolution(3, 16, 4, 4, 16, 1),
]
PLAN = replace(PLAN, resolutions=SIZES)


@dataclass
class Trained:
    records: list[Metrics]
    model: nn.Linear
    losses: list[float]  # of each micro-batch


def fit(folder: Path, monkeypatch: pytest.MonkeyPatch, *hooks: Any) -> Trained:
    """Train for four steps, of which the third is the last of an epoch; record it and the last."""
    monkeypatch.setattr(
        hook, "time", SimpleNamespace(perf_counter=lambda: CLOCK.now, time=lambda: 0.0)
    )
    monkeypatch.setattr("common.engine.trainer.time", SimpleNamespace(perf_counter=tick))
    losses = []

    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(logits, labels)
        losses.append(loss.item())
        return loss

    with launched(gradient_accumulation=2, LOG={"noise_scale": True}):
        model = nn.Linear(3, 2)
        model.register_forward_hook(lambda *_: let_pass(1))
        model.weight.register_hook(lambda _: let_pass(3))  # in the backward pass
        batch = torch.randn(4, 3), torch.zeros(4, dtype=torch.long)
        batches = list(itertools.repeat(batch, 6))
        optimizer = Lamb(model.parameters(), lr=0.1)
        engine, batches, *_ = initialize(model, optimizer, criterion, batches, batches)
        logging = dict(every=3, tensorboard=False, trackers=[], is_main=True)
        metrics = MetricsHook(PLAN, folder, peak_samples_per_s={8: 8, 16: 16}, **logging)
        # An evaluation lies between two records.
        Trainer(engine).fit(batches, 2, 4, test_dataloader=batches, hooks=[metrics, *hooks])
    lines = [line for line in read_metrics(folder) if line["kind"] == "train"]
    return Trained(lines, model, losses)


def test_the_metrics_that_are_described_are_those_that_are_written(tmp_path, monkeypatch):
    """The run has two classes, two sizes of images, and several micro-batches in a step."""
    fit(tmp_path, monkeypatch)
    written = {name for record in read_metrics(tmp_path) for name in record}
    assert written - {*UNPLOTTED} == CHARTS.keys()


def test_a_record_has_the_means_of_the_steps_since_the_last(tmp_path, monkeypatch):
    trained = fit(tmp_path, monkeypatch)
    lines = trained.records
    assert [(line["step"], line["epoch"]) for line in lines] == [(3, 1), (4, 1.3333)]
    seconds = dict(forward_s=2, backward_s=6, samples_per_s=8 / 12, data_wait=2 / 12)
    for line, size in zip(lines, (8, 16), strict=True):
        expected = seconds | {"mfu": 8 / 12 / size, "image_size": size}
        assert {name: line[name] for name in expected} == pytest.approx(expected)
        assert 0.1 < line["peak_memory_gb"] < 100
    losses = [fmean(trained.losses[:6]), fmean(trained.losses[6:])]
    assert [line["loss"] for line in lines] == pytest.approx(losses)
    norm = torch.cat([p.grad.flatten() for p in trained.model.parameters()]).norm().item()
    assert lines[-1]["grad_norm"] == pytest.approx(norm)
    assert (lines[-1]["lr"], lines[-1]["skipped"]) == (0.1, 0)
    # All micro-batches are equal: there is no noise.
    for name in ("noise_scale", "optimizer_noise_scale"):
        assert lines[-1][name] == pytest.approx(0, abs=1e-3)


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
    states = [{"steps": 2, "micro_batches": 2, "loss": loss} for loss in (4.0, 8.0)]

    def resume(trainer: Trainer) -> None:
        trainer.load_state_dict({"step": 2, "epoch": 0, "epoch_step": 2, "evaluated_step": 0})
        trainer.hooks[0].load_state_dict(states, rank)

    checkpoint = BaseHook(priority=10)
    checkpoint.before_train = resume
    trained = fit(tmp_path, monkeypatch, checkpoint)
    first = trained.records[0]
    assert first["loss"] == pytest.approx((loss + fmean(trained.losses[:2])) / 3)
    assert first["samples_per_s"] == pytest.approx(8 / 12)
    assert (first["forward_s"], first["mfu"]) == pytest.approx((2, 8 / 12 / 8))


@pytest.mark.parametrize(("rank", "share"), [(1, 3.0), (None, 2.0)])
def test_a_resume_restores_both_noise_scales(rank, share, tmp_path, monkeypatch):
    """Each state is a rank's; of all of them it is the mean."""
    found = {}

    def resume(trainer: Trainer) -> None:
        metrics = trainer.hooks[0]
        states = [
            metrics.state_dict()
            | {"noise_scale": [0.5 * own, own], "tensor_noise_scale": [[own, 2 * own]] * 3}
            for own in (1.0, 3.0)
        ]
        metrics.load_state_dict(states, rank)
        found.update(metrics.state_dict())

    checkpoint = BaseHook(priority=10)
    checkpoint.before_train = resume
    fit(tmp_path, monkeypatch, checkpoint)
    assert found["noise_scale"] == [0.5 * share, share]
    assert found["tensor_noise_scale"] == [[share, 2 * share]] * 3


class Figure(BaseHook):
    """A user's, with one figure."""

    def __init__(self, value: object):
        super().__init__(priority=-1)
        self.value = value

    def after_test(self, trainer: Any) -> None:
        trainer.states["figures"] = {"recall": self.value}


@pytest.mark.parametrize("value", [0.5, torch.tensor(0.5), torch.tensor([0.5]), np.float32(0.5)])
def test_a_figure_is_written_as_a_number(tmp_path, monkeypatch, value):
    fit(tmp_path, monkeypatch, Figure(value))
    evaluations = [line for line in read_metrics(tmp_path) if line["kind"] == "eval"]
    assert {type(line["recall"]) for line in evaluations} == {float}
    assert evaluations[0]["recall"] == 0.5


@pytest.mark.parametrize("value", [None, "high", [0.5], np.zeros(2), torch.zeros(2)])
def test_a_figure_that_is_no_number_is_refused(tmp_path, monkeypatch, value):
    with pytest.raises(UserError, match="^figures: recall is not a number: "):
        fit(tmp_path, monkeypatch, Figure(value))
