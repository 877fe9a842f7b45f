from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from common.colossal import Trainer, initialize
from common.config.plan import Plan
from common.metrics import hook
from common.metrics.curves import read_metrics
from common.metrics.hook import MetricsHook, count_correct
from common.testing.ranks import launched


@pytest.mark.parametrize("classes", [3, 10, 3000])
def test_counts_every_sample_once_and_padding_never(classes):
    torch.manual_seed(0)
    logits, labels = torch.randn(40, classes), torch.randint(classes, (40,))
    logits[torch.arange(0, 40, 3), labels[::3]] += 9  # some are right
    padded = torch.cat([logits, torch.randn(5, classes)]), torch.cat([labels, torch.full((5,), -100)])
    loss, top1, top5, samples = count_correct(*padded).tolist()
    rank = (logits > logits.gather(1, labels[:, None])).sum(1)  # how many classes score higher than the right one
    assert samples == 40
    assert top1 == (rank < 1).sum()
    assert top5 == (rank < 5).sum()
    assert loss == pytest.approx(F.cross_entropy(logits, labels).item() * 40, rel=1e-6)


@pytest.mark.parametrize("rank", [None, 1])
def test_a_record_resumed_with_another_accumulation_weighs_all_steps_alike(rank: int | None) -> None:
    metrics: Any = SimpleNamespace(plan=SimpleNamespace(accumulation=2), loss=torch.zeros(()))
    states = [{"steps": 3, "micro_batches": 12, "loss": loss} for loss in (24.0, 12.0)]
    MetricsHook.load_state_dict(metrics, states, rank)
    assert (metrics.micro_batches, metrics.loss.item()) == (6, 6.0 if rank else 9.0)


class Timed(torch.autograd.Function):
    """Let 1 s pass in the forward pass, 3 s in the backward pass."""

    now = 0.0

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        Timed.now += 1
        return x.clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        Timed.now += 3
        return grad


def test_a_record_has_the_times_of_a_steps_forward_and_backward_passes(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(hook, "time", SimpleNamespace(perf_counter=lambda: Timed.now, time=lambda: 0.0))
    plan = Plan(1, 1, 1, 4, 2, 8, 1, 100, 10, 100, 100)
    with launched(gradient_accumulation=2):
        model = nn.Linear(3, 2)
        model.register_forward_hook(lambda module, inputs, output: Timed.apply(output))
        batches = [(torch.randn(4, 3), torch.zeros(4, dtype=torch.long))] * 6
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, batches, *_ = initialize(model, optimizer, nn.CrossEntropyLoss(), batches, batches)
        logging = dict(every=3, tensorboard=False, trackers=[], is_main=True, peak_samples_per_s=1)
        metrics = MetricsHook(plan, tmp_path, **logging)
        Trainer(engine).fit(batches, 2, test_dataloader=batches, hooks=[metrics])  # an evaluation between two records
    lines = [line for line in read_metrics(tmp_path) if line["kind"] == "train"]
    assert [(line["forward_s"], line["backward_s"]) for line in lines] == [(2, 6), (2, 6)]
