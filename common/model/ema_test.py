"""The moving average of weights and of batch norms' statistics, against torch's."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from common.model.ema import EmaHook

SKIPPED = 7  # a step whose gradient is not finite


def update(
    averages: list[Tensor], weights: list[Tensor], step: Tensor, decay: float, warmup: bool
) -> None:
    warm = (1 + step.item()) / (10 + step.item())
    get_ema_multi_avg_fn(min(decay, warm) if warmup else decay)(averages, weights, step)


@pytest.mark.parametrize(("decay", "warmup"), [(0.3, True), (0.9999, True), (0.9, False)])
def test_averages_are_torchs(decay, warmup):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
    hook = EmaHook(model, decay, warmup)
    reference = AveragedModel(
        model, multi_avg_fn=partial(update, decay=decay, warmup=warmup), use_buffers=True
    )
    if warmup:
        reference.update_parameters(model)  # the first one copies
    for step in range(1, 20):
        for parameter in model.parameters():
            parameter.detach().add_(torch.randn_like(parameter))
        model(torch.randn(8, 5))
        norm = torch.tensor(torch.inf if step == SKIPPED else 1.0)
        trainer: Any = SimpleNamespace(step=step, update_done=True)
        trainer.engine = SimpleNamespace(optimizer=SimpleNamespace(grad_norm=norm))
        hook.after_train_iter(trainer)
        if step == SKIPPED:
            reference.n_averaged += 1
        else:
            reference.update_parameters(model)
    expected = reference.module.state_dict()
    assert hook.averages.keys() == expected.keys() - {"1.num_batches_tracked"}
    for name, average in hook.averages.items():
        torch.testing.assert_close(average, expected[name], rtol=1e-6, atol=1e-7)
