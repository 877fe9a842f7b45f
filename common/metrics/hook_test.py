from types import SimpleNamespace

import torch
from torch import nn

from common.colossal import Trainer, initialize
from common.config.plan import Plan
from common.metrics import hook
from common.metrics.curves import read_metrics
from common.metrics.hook import MetricsHook
from common.testing.ranks import launched


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
