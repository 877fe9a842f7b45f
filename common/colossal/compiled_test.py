"""Compiled models and blocks: the same training, the same names, and refused where they cannot be."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

from common.colossal import AMP_TYPE, Predictor, compiled, initialize, shard_model
from common.colossal import engine as engine_module
from common.colossal.compiled import compile_model, should_compile
from common.errors import UserError
from common.model.vit import build_model
from common.optim.build import build_optimizer
from common.testing.ranks import launched, run_ranks

# Dynamo looks at the gradient of a parameter's copy
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

MODEL = dict(image_size=16, patch_size=8, width=16, depth=3, heads=2, num_classes=3)
STEPS, ACCUMULATION = 3, 2


def train(config: dict[str, Any], model_arguments: dict[str, Any]) -> tuple[list[float], list[str], int]:
    """Return the losses of a few steps on the same samples, the names of the state, and how often a gradient moved."""
    with launched(gradient_accumulation=ACCUMULATION, clip_grad_norm=1.0, **config):
        torch.manual_seed(0)
        model = build_model(**MODEL | model_arguments)
        images, labels = torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 2, 0])
        engine, *_ = initialize(model, build_optimizer(model, learning_rate=1e-2), nn.CrossEntropyLoss())
        engine.train()
        losses, places = [], set()
        for _ in range(STEPS * ACCUMULATION):
            engine.zero_grad()
            losses.append(engine.criterion(engine(images), labels))
            engine.backward(losses[-1])
            places.add(model.head.weight.grad.data_ptr())
            engine.step()
        return [loss.item() for loss in losses], list(model.state_dict()), len(places) - 1


def train_compiled(config: dict[str, Any], model_arguments: dict[str, Any]) -> tuple[Any, ...]:
    """Return the same of a compiled model, how many graphs it is, how often one was broken, and the compiler's mode.

    Without code generation, and with the lowest limit of recompilations.
    """
    modes = set()

    def backend(graph: Any, inputs: Any, mode: str | None = None) -> Any:
        modes.add(mode)
        return aot_eager(graph, inputs)

    compiled._missing = lambda _: ""
    engine_module.compile_model = partial(compile_model, backend=backend)
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        results = train(config, model_arguments)
    counters = torch._dynamo.utils.counters
    return *results, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), modes


NAIVE, AUTOCAST = ({"mode": mode, "dtype": "bfloat16"} for mode in (AMP_TYPE.NAIVE, AMP_TYPE.TORCH))


@pytest.mark.parametrize(
    ("how", "ranks", "fp16", "model_arguments", "tolerance"),
    [
        (True, 2, None, {}, 1e-5),
        (True, 1, None, {"activation_checkpoint": True}, 1e-5),
        (True, 1, NAIVE, {}, 1e-2),
        # compiled code may draw its random numbers in another order
        (True, 1, AUTOCAST, {"dropout": 0.1, "drop_path": 0.2}, 0.2),
        ("model", 1, None, {"activation_checkpoint": True}, 1e-5),
        pytest.param("graphs", 2, None, {}, 1e-5, marks=pytest.mark.slow),
        ("graphs", 1, AUTOCAST, {"dropout": 0.1, "drop_path": 0.2}, 0.2),
    ],
)
def test_compiled_training_is_the_same(how, ranks, fp16, model_arguments, tolerance) -> None:
    # in forked processes: after torch.compile a process cannot fork others that train
    eager, names, _ = train({"fp16": fp16}, model_arguments)
    for outcome in run_ranks(ranks, train_compiled, {"fp16": fp16, "COMPILE": how}, model_arguments):
        losses, same_names, moves, graphs, breaks, modes = outcome
        assert losses == pytest.approx(eager, rel=tolerance)
        assert names == same_names
        assert graphs == 1 or how is True
        assert graphs > 0
        assert breaks == 0
        assert modes == ({"reduce-overhead"} if how == "graphs" else {None})
        assert how != "graphs" or moves == ranks - 1  # DDP moves them once, to its own buckets


def compile_sharded() -> str:
    with launched(parallel={"tensor": {"mode": "1d", "size": 2}}, COMPILE=True):
        model = shard_model(build_model(**MODEL))
        with pytest.raises(UserError) as error:
            initialize(model, build_optimizer(model))
        return str(error.value)


def test_refuses_a_model_that_is_cut_over_ranks() -> None:
    assert all("omit COMPILE or the tensor mode" in message for message in run_ranks(2, compile_sharded))


def test_trains_eagerly_where_code_cannot_be_generated(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    model = build_model(**MODEL)
    with launched(COMPILE=True):
        initialize(model, build_optimizer(model))
        assert "the model is not compiled: missing C++ compiler no-such-compiler" in capsys.readouterr().err
        assert all(block._compiled_call_impl is None for block in model.blocks)
        monkeypatch.setenv("CXX", "true")
        monkeypatch.setattr(compiled.sysconfig, "get_path", lambda _: "/nowhere")
        assert not should_compile(True, "cpu")
        assert "missing /nowhere/Python.h; install" in capsys.readouterr().err


def test_by_default_a_gpu_compiles_and_a_cpu_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_missing", lambda _: "")
    with launched():
        asked = [(asked, device) for asked in (None, True, False) for device in ("cuda", "cpu")]
        assert [should_compile(*case) for case in asked] == [True, False, True, True, False, False]


def test_tf32_is_on_unless_switched_off() -> None:
    precisions = []
    for config in ({"TF32": False}, {}, {"TF32": False}):
        with launched(**config):
            model = nn.Linear(2, 2)
            initialize(model, build_optimizer(model))
            precisions.append((torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32))
            Predictor(model, {"fp16": None, "TF32": "TF32" in config})  # the other
            precisions.append((torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32))
    full, fast = ("highest", False), ("high", True)
    assert precisions == [full, fast, fast, full, full, fast]
