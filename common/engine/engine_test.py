"""The engine: what crosses ranks in a step, passes of whole steps, and when models are compiled.

parity_test.py and amp_test.py have what it computes.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from common.engine import compiler
from common.engine.compiler import compile_model, should_compile
from common.engine.engine import WholeSteps, initialize
from common.engine.upstream import gpc
from common.optim.build import build_optimizer
from common.planner.step_estimate import Traffic
from common.testing.parity_cases import build_tiny_model
from common.testing.ranks import launched, run_ranks


def count_reductions() -> list[int]:
    """Return the all-reduces of 2 steps with DDP, without and with a static graph; ranks begin with
    other weights.
    """
    counts = []
    with launched(gradient_accumulation=4):
        for options in ({}, {"static_graph": True}):
            gpc.config["torch_ddp"] = options
            model = nn.Linear(3, 1)
            nn.init.constant_(model.weight, gpc.get_global_rank())
            engine, *_ = initialize(
                model, torch.optim.SGD(model.parameters(), lr=0.5), nn.MSELoss()
            )
            assert not model.weight.any()  # those of rank 0
            with Traffic() as traffic:
                for _ in range(8):
                    engine.zero_grad()
                    engine.execute_schedule(iter([(torch.ones(2, 3), torch.ones(2, 1))]))
                    engine.step()
            counts.append(traffic.calls["all_reduce", (0, 1)])
    return counts


def test_gradients_cross_ranks_once_per_step():
    assert (
        run_ranks(2, count_reductions) == [[2, 4]] * 2
    )  # the first pass reduces too, and what it used


class OneShot:
    """An iterator over 8 batches, without an end, that has to be reset before another pass, as
    DALI's.
    """

    position = handed_out = 0

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.position += 1
        self.handed_out += 1
        return self.position

    def reset(self) -> None:
        self.position = 0


@pytest.mark.parametrize(("accumulation", "size"), [(1, 8), (3, 6)])
def test_every_pass_is_whole(accumulation, size):
    steps, expected = WholeSteps(OneShot(), accumulation), list(range(1, size + 1))
    assert (len(steps), list(steps), list(steps)) == (size, expected, expected)
    assert steps.handed_out == 2 * size  # no batch is read and dropped


def test_trains_eagerly_where_code_cannot_be_generated(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    model = build_tiny_model()
    with launched(COMPILE=True):
        initialize(model, build_optimizer(model))
        assert (
            "missing C++ compiler no-such-compiler; install it, or set CXX\n"
            in capsys.readouterr().err
        )
        assert all(block._compiled_call_impl is None for block in model.blocks)
    compile_model(model, "model", "eager")
    assert [part._compiled_call_impl is None for part in (model, *model.blocks)] == [
        False,
        True,
        True,
    ]
    with torch._dynamo.config.patch(recompile_limit=1):
        compile_model(build_tiny_model(depth=9), True, "eager")
        assert torch._dynamo.config.recompile_limit == 36


def test_by_default_a_gpu_compiles_and_a_cpu_does_not(monkeypatch):
    monkeypatch.setattr(compiler, "_missing", lambda _: "")
    with launched():
        asked = [(asked, device) for asked in (None, True, False) for device in ("cuda", "cpu")]
        assert [should_compile(*case) for case in asked] == [True, False, True, True, False, False]
        monkeypatch.setattr(gpc, "get_world_size", lambda _: 2)
        assert not should_compile(None, "cuda")  # tensor-parallel blocks


def test_tf32_is_on_unless_switched_off_and_cudnns_kernels_are_chosen():
    found, cudnn = [], torch.backends.cudnn
    for config in (
        {"TF32": False, "cudnn_benchmark": True},
        {"TF32": False, "cudnn_deterministic": True},
        {},
    ):
        with launched(**config):
            initialize(model := nn.Linear(2, 2), build_optimizer(model))
        found.append(
            (
                torch.get_float32_matmul_precision(),
                cudnn.allow_tf32,
                cudnn.benchmark,
                cudnn.deterministic,
            )
        )
    assert found == [
        ("highest", False, True, False),
        ("highest", False, False, True),
        ("high", True, False, False),
    ]
