"""The engine: what crosses ranks in a step, passes of whole steps, and when models are compiled.

parity_test.py and amp_test.py have what it computes.
"""

from collections.abc import Iterator
from itertools import repeat

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from common.engine import compiler
from common.engine.compiler import compile_model, should_compile
from common.engine.engine import WholeSteps, initialize
from common.engine.upstream import gpc
from common.optim.build import build_optimizer
from common.planner.step_estimate import Traffic
from common.testing.parity_cases import build_tiny_model
from common.testing.ranks import launched, run_ranks


def count_reductions() -> list[int]:
    """Return the all-reduces of 2 steps with DDP, without and with a static graph."""
    counts = []
    with launched(gradient_accumulation=4):
        for options in ({}, {"static_graph": True}):
            gpc.config["torch_ddp"] = options
            model = nn.Linear(3, 1)
            nn.init.constant_(model.weight, gpc.get_global_rank())
            engine, *_ = initialize(model, build_optimizer(model, "sgd"), nn.MSELoss())
            assert not model.weight.any()  # those of rank 0
            batches = repeat((torch.ones(2, 3), torch.ones(2, 1)), 8)
            with Traffic() as traffic:
                for _ in range(2):
                    list(engine.train_step(batches))
            counts.append(traffic.calls["all_reduce", (0, 1)])
    return counts


def test_gradients_cross_ranks_once_per_step():
    # a static graph's first pass reduces too, and which parameters it used
    assert run_ranks(2, count_reductions) == [[2, 4], [2, 4]]


class OneShot:
    """An iterator without an end, of 8 batches a pass, that has to be reset, as DALI's."""

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
    steps = WholeSteps(OneShot(), accumulation)
    expected = list(range(1, size + 1))
    assert (len(steps), list(steps), list(steps)) == (size, expected, expected)
    assert steps.loader.handed_out == 2 * size  # no batch is read and dropped


def test_scripts_find_what_their_loader_has():
    loader = DataLoader(TensorDataset(torch.arange(7)), batch_size=2)
    steps = WholeSteps(loader, 3)
    for name in vars(loader):
        assert name.startswith("_") or getattr(steps, name) is getattr(loader, name)
    # absent, so that a checkpoint is refused and nothing is closed
    assert not hasattr(steps, "state_dict")
    assert not hasattr(steps, "close")
    assert steps.loader is loader


def test_trains_eagerly_where_code_cannot_be_generated(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    model = build_tiny_model()
    with launched(COMPILE=True):
        initialize(model, build_optimizer(model))
    missing = "missing C++ compiler no-such-compiler; install it, or set CXX\n"
    assert missing in capsys.readouterr().err
    assert all(block._compiled_call_impl is None for block in model.blocks)


def test_dynamo_may_compile_every_block():
    """Beyond the limit it goes on eagerly."""
    with torch._dynamo.config.patch(recompile_limit=1):
        compile_model(build_tiny_model(depth=9), True, "eager")
        assert torch._dynamo.config.recompile_limit == 36


def test_by_default_a_gpu_compiles_and_a_cpu_does_not(monkeypatch):
    monkeypatch.setattr(compiler, "_missing", lambda _: "")
    with launched():
        on_gpu = {asked: should_compile(asked, "cuda") for asked in (None, True, False)}
        on_cpu = {asked: should_compile(asked, "cpu") for asked in (None, True, False)}
    assert on_gpu == {None: True, True: True, False: False}
    assert on_cpu == {None: False, True: True, False: False}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"TF32": False, "cudnn_benchmark": True, "cudnn_deterministic": True},
            ("highest", False, True, True),
        ),
        ({}, ("high", True, False, False)),
    ],
)
def test_tf32_is_on_unless_switched_off_and_cudnns_kernels_are_chosen(config, expected):
    cudnn = torch.backends.cudnn
    model = nn.Linear(2, 2)
    with launched(**config):
        initialize(model, build_optimizer(model))
    precision = torch.get_float32_matmul_precision()
    assert (precision, cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic) == expected
