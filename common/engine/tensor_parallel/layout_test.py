"""What is refused before anything starts, and what is said to fit."""

import pytest

from common.engine.tensor_parallel.layout import check_tensor_parallel, resolve_parallel
from common.errors import UserError
from common.testing.parity_cases import MODEL


def tensor(mode: str | None, size: int, **more: int) -> dict:
    return {"pipeline": 1, "tensor": {"mode": mode, "size": size, **more}}


@pytest.mark.parametrize(
    ("given", "resolved"),
    [
        (tensor("2.5d", 1, depth=1), tensor(None, 1)),
        (tensor("3d", 64), tensor("3d", 64)),  # whose cube root is 3.9999999999999996
    ],
)
def test_size_1_is_no_tensor_parallelism_and_a_cube_is_a_cube(given, resolved):
    assert resolve_parallel(given, 64) == resolved


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (
            {"pipeline": 2},
            "parallel.pipeline=2: pipeline parallelism is not supported; set it to 1",
        ),
        (
            tensor(None, 2),
            "^parallel.tensor.size=2 needs parallel.tensor.mode: one of '1d', .*, '3d', not None$",
        ),
        (tensor("2d", 2), "size=2 is not a square with sides of at least 2.*; nearest: 4 or 9"),
        (tensor("3d", 9), "size=9 is not a cube with sides of at least 2.*; nearest: 8 or 27"),
        (tensor("2.5d", 12, depth=2), "size=12 is not depth 2 x a square .*; nearest: 8 or 18"),
        (
            tensor("2d", 4, depth=1),
            "parallel.tensor.depth=1 requires mode '2.5d', not '2d': remove it",
        ),
        (
            tensor("1d", 3),
            "parallel.tensor.size=3 does not divide the 8 processes: start 6 or 9 processes",
        ),
    ],
)
def test_groups_that_are_refused(parallel, message):
    with pytest.raises(UserError, match=message):
        resolve_parallel(parallel, 8)


@pytest.mark.parametrize(
    ("parallel", "model", "message"),
    [
        (
            tensor("1d", 2),
            {"heads": 1},
            "MODEL.heads=1 is not a multiple of 2, .*'1d' of size 2 .*: 2; .* allows: none$",
        ),
        (
            # a side of 4 does not divide the width
            tensor("2d", 25),
            {"width": 36, "heads": 12, "mlp_ratio": 2},
            "MODEL.heads=12 is not a multiple of 5, .*: 10 or 15; .* allows: 4, 9, 16, 36, 144$",
        ),
        (
            tensor("2.5d", 8, depth=2),
            {},
            "micro-batch .MICRO_BATCH_SIZE.=6 is not a multiple of 4, .*: 4 or 8",
        ),
        (
            tensor("3d", 8),
            {"width": 34, "heads": 6},
            "MODEL.width=34 is not a multiple of 12, .*: 24 or 36",
        ),
        (
            tensor("2d", 4),
            {"mlp_ratio": 33 / 32},
            "mlp_ratio=33 is not a multiple of 2, .*: 32 or 34",
        ),
        (
            tensor("3d", 8),
            {"mlp_ratio": 34 / 32},
            "mlp_ratio=34 is not a multiple of 4, .*: 32 or 36",
        ),
        (
            # The gate and the values are split separately.
            tensor("2d", 4),
            {"mlp_ratio": 34 / 32, "mlp": "swiglu"},
            "mlp_ratio=34 is not a multiple of 4, .*: 32 or 36",
        ),
        (
            tensor("3d", 8),
            {},
            "micro-batch .MICRO_BATCH_SIZE.=6 is not a multiple of 4, .*: 4 or 8",
        ),
        (tensor("1d", 2), {"stem": "conv"}, "^a stem of convolutions and "),
    ],
)
def test_shapes_that_are_refused(parallel, model, message):
    with pytest.raises(UserError, match=message):
        check_tensor_parallel(parallel, MODEL | model, micro_batch=6)
