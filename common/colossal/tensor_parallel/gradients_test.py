"""Norms of the whole gradient, and of whole tensors, from pieces."""

import pytest
import torch
from torch import Tensor, nn

from common.colossal import build_norm_reducer, gather_whole, shard_model
from common.colossal.tensor_parallel.gradients import global_grad_norm, sum_partial_gradients
from common.testing.parity_cases import CASES, blended_loss, build_tiny_model, micro_batches
from common.testing.ranks import launched, run_ranks

CASES_HERE = ["1d-2", "2d-4", "2.5d-8", "3d-8"]


def norms(case: str) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
    """Return the global norm, the norm of this rank's pieces, each tensor's norm, and the whole gradients."""
    with launched(parallel=CASES[case][1]):
        model = shard_model(build_tiny_model())
        images, labels = next(iter(micro_batches()))
        blended_loss(model(images), **labels).backward()
        parameters = list(model.parameters())
        sum_partial_gradients(parameters)
        squares = torch.stack([parameter.grad.square().sum() for parameter in parameters])[None]
        tensor_norms = build_norm_reducer(model)(squares, parameters)[0].sqrt()
        own = nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        return global_grad_norm(parameters), own, tensor_norms, [gather_whole(p, p.grad) for p in parameters]


@pytest.mark.parametrize("case", CASES_HERE)
def test_norms_are_those_of_whole_tensors(case: str) -> None:
    answers = run_ranks(CASES[case][0], norms, case)
    wholes = answers[0][3]
    for total, own, tensor_norms, _ in answers:
        torch.testing.assert_close(total, nn.utils.get_total_norm(wholes), rtol=1e-6, atol=0)
        expected = torch.stack([whole.norm() for whole in wholes])
        torch.testing.assert_close(tensor_norms, expected, rtol=1e-5, atol=1e-7)
        assert own < 0.95 * total  # what upstream clips by
        assert torch.equal(total, answers[0][0])


def test_a_whole_model_needs_no_reducer() -> None:
    assert build_norm_reducer(build_tiny_model()) is None
