from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from common.estimate.memory import TensorMemory


@pytest.mark.parametrize("mode", [nullcontext, FakeTensorMode])
def test_follows_what_autograd_keeps_and_frees(mode):
    with mode(), TensorMemory() as memory:
        x = torch.ones(1000, requires_grad=True)
        y = (x * 2).exp()
        assert memory.live == 2 * 4000  # the product is gone, exp keeps its outcome
        assert memory.peak == 3 * 4000
        view = y[:10]
        del y
        assert memory.live == 2 * 4000
        loss = view.sum()
        del view
        assert memory.live == 2 * 4000 + 4
        memory.restart_peak()
        assert memory.peak == memory.live
        loss.backward()
        assert memory.peak > 2 * 4000 + 4
        assert memory.live == 2 * 4000 + 4  # parameter, gradient, loss
