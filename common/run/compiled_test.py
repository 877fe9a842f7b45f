"""Compiled training, the default on GPUs, against eager training."""

from functools import partial
from pathlib import Path

import pytest
import torch

from common.checkpoint.saved_run import open_run
from common.engine import engine
from common.metrics.metrics_file import read_metrics
from common.testing import tiny_task
from common.testing.commands import run_forked
from common.testing.ranks import run_ranks, slow

# Dynamo looks at the gradient of a parameter's copy
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
SHORT = ("TOTAL_BATCH_SIZE=16", "gradient_accumulation=2", "MAX_STEPS=3", "LOG.every=1")
NAIVE = "fp16=dict(mode=AMP_TYPE.NAIVE, dtype='bfloat16')"
AUTOCAST = "fp16=dict(mode=AMP_TYPE.TORCH, dtype='bfloat16')"
DROPS = ("MODEL.dropout=0.1", "MODEL.drop_path=0.2")
TIMM = "MODEL=dict(timm='{}', image_size=32)"
GROWING = ["IMAGE_SIZES=[(1, 8, 16), (1, 24)]", "NUM_EPOCHS=3", "MAX_STEPS=9"]
# graphs, one of all blocks in training and one in evaluation, and none that is broken
WHOLE = (2, 0)


def train(
    data: Path, output: Path, compiled: str, *settings: str, backend: str = "inductor"
) -> tuple[int, int]:
    """Train; return the number of graphs, and how often one was broken."""
    engine.compile_model = partial(engine.compile_model, backend=backend)
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        tiny_task.train(data, output, *SHORT, *settings, f"COMPILE={compiled}")
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.fixture(scope="module")
def eager(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_task.train(data, tmp_path_factory.mktemp("eager") / "run", *SHORT)


inductor = partial(slow, "inductor")


@pytest.mark.parametrize(
    ("backend", "how", "ranks", "settings", "graphs", "tolerance"),
    [
        slow("aot_eager", "True", 1, [NAIVE], (4, 0), 1e-2),  # copies of the blocks' weights
        ("aot_eager", "True", 1, [AUTOCAST, *DROPS], WHOLE, 0.2),  # random numbers in another order
        ("aot_eager", "True", 1, [TIMM.format("test_resnet")], WHOLE, 1e-4),
        slow("aot_eager", "model", 2, ["MODEL.activation_checkpoint=True"], WHOLE, 1e-5),
        ("aot_eager", "True", 1, GROWING, (4, 0), 1e-5),  # a graph for each of three sizes
        inductor("max-autotune", 1, ["MODEL.init_values=0.1"], WHOLE, 1e-5),
        inductor(
            "True", 1, ["INIT={eager}", "FREEZE=body", "EMA=0.5", "EVAL_EVERY=1"], WHOLE, 1e-5
        ),
        inductor(
            "True", 2, ["zero=dict(stage=1)"], (10, 4), 1e-5
        ),  # cut where FSDP gathers weights
        inductor("True", 2, [AUTOCAST], WHOLE, 1e-2),
        inductor("True", 1, [TIMM.format("test_convnext3")], WHOLE, 1e-4),
    ],
)
def test_losses_names_and_graphs(
    backend, how, ranks, settings, graphs, tolerance, eager, data, tmp_path, capfd
):
    settings = [setting.format(eager=eager) for setting in settings]
    outcomes = []
    for compiled, expected in (("False", (0, 0)), (how, graphs)):
        output = tmp_path / compiled
        work = partial(train, data, output, compiled, *settings, backend=backend)
        assert set(run_ranks(ranks, work)) == {expected}
        outcomes.append([record["loss"] for record in read_metrics(output)])
        assert open_run(str(output)).load_weights()
    assert outcomes[1] == pytest.approx(outcomes[0], rel=tolerance)
    said = 3 if settings == GROWING else 0
    assert capfd.readouterr().out.count(", 1 graph compiled\n") == said


def test_a_compiler_that_fails_is_one_line_with_the_remedy(data, tmp_path):
    def main(argv: list[str]) -> None:
        torch._inductor.config.cpp.cxx = (None, "false")
        tiny_task.train(data, tmp_path / "run", "COMPILE=True")

    ended = run_forked(main, code=2, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    line = (
        "error: the model could not be compiled: --set COMPILE=False trains without a compiler "
        "(InvalidCxxCompiler: "
    )
    assert ended.stderr.splitlines()[-1].startswith(line), ended.stderr
