from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from common.metrics.hook import MetricsHook, count_correct


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


def test_a_batch_of_nothing_but_padding_counts_nothing():
    assert count_correct(torch.randn(4, 10), torch.full((4,), -100)).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("rank", [None, 1])
def test_a_record_resumed_with_another_accumulation_weighs_all_steps_alike(rank: int | None) -> None:
    hook: Any = SimpleNamespace(plan=SimpleNamespace(accumulation=2), loss=torch.zeros(()))
    states = [{"steps": 3, "micro_batches": 12, "loss": loss} for loss in (24.0, 12.0)]
    MetricsHook.load_state_dict(hook, states, rank)
    assert (hook.micro_batches, hook.loss.item()) == (6, 6.0 if rank else 9.0)
