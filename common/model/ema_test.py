"""The moving average of the weights in evaluation; from_timm_test.py and hook_test.py have how it moves."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from common.model.ema import EmaHook


def trainer_at(step: int) -> SimpleNamespace:
    engine = SimpleNamespace(optimizer=SimpleNamespace(grad_norm=torch.tensor(1.0)))
    return SimpleNamespace(step=step, update_done=True, engine=engine)


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
