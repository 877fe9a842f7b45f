"""The moving average of the weights: equal to torch's, and used in evaluation."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from common.model.ema import EmaHook


def trainer_at(step: int, update_done: bool = True) -> SimpleNamespace:
    engine = SimpleNamespace(optimizer=SimpleNamespace(grad_norm=torch.tensor(1.0)))
    return SimpleNamespace(step=step, update_done=update_done, engine=engine)


def update(averages: list[Tensor], weights: list[Tensor], step: Tensor, decay: float) -> None:
    """Update as torch does, with the decay of this step."""
    get_ema_multi_avg_fn(min(decay, (1 + step.item()) / (10 + step.item())))(averages, weights, step)


@pytest.mark.parametrize("decay", [0.3, 0.9999])
def test_averages_are_torchs(decay: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    hook, reference = EmaHook(model, decay), AveragedModel(model, multi_avg_fn=partial(update, decay=decay))
    reference.update_parameters(model)  # the first one copies
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(1, 30):
        optimizer.zero_grad()
        model(torch.randn(8, 5)).square().mean().backward()
        hook.after_train_iter(trainer_at(step, update_done=False))  # a micro-batch that ends no step
        optimizer.step()
        hook.after_train_iter(trainer_at(step))
        reference.update_parameters(model)
    expected = dict(reference.module.named_parameters())
    assert hook.averages.keys() == expected.keys()
    for name, average in hook.averages.items():
        torch.testing.assert_close(average, expected[name].detach(), rtol=1e-6, atol=1e-7)
        assert not torch.allclose(average, dict(model.named_parameters())[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ends_with", ["after_test", "after_train"])
def test_evaluation_sees_the_averages_and_training_the_weights(dtype: torch.dtype, ends_with: str) -> None:
    model = nn.Linear(3, 2).to(dtype)
    hook = EmaHook(model, 0.9)
    with torch.no_grad():
        model.weight.mul_(2), model.bias.mul_(2)
    hook.after_train_iter(trainer_at(1))
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    hook.before_test(trainer_at(1))
    for name, p in model.named_parameters():
        assert torch.equal(p, hook.averages[name].to(dtype))
        assert not torch.equal(p, weights[name])
    getattr(hook, ends_with)(trainer_at(1))
    hook.after_train(trainer_at(1))
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    assert {average.dtype for average in hook.averages.values()} == {torch.float32}
