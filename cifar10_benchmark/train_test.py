"""Recipes from the command line: a plan without data, and steps that are recorded."""

from pathlib import Path

import pytest

from cifar10_benchmark import train
from common.engine.trainer import Trainer
from common.recording import RECORDINGS
from common.testing.checkpoints import read_result
from common.testing.commands import in_words
from common.testing.photographs import write_photographs
from common.testing.ranks import run_ranks
from common.testing.simulated_gpu import Waits, simulate_gpu
from common.testing.tape import TapeRecording


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    for split in ("train", "test"):
        write_photographs(root / split, ("cat", "dog"), count=64, width=32, height=32)
    return root


def run(config: str, data: Path, output: Path, *settings: str) -> None:
    arguments = ["--config", config]
    arguments += ["--output", str(output)]
    arguments += in_words(f"DATA.root={data}", *settings)
    train.main(arguments)


def test_dry_run_of_a_recipe_needs_no_data_and_downloads_nothing(tmp_path, capsys):
    command = ["--config", "vit_lite_vanilla", "--dry-run", "--gpus", "8"]
    settings = in_words(f"DATA.root={tmp_path}", "DATA.download=True")
    train.main([*command, *settings])
    printed = " ".join(capsys.readouterr().out.split())
    assert "8 GPUs x 64 x 1 = 512" in printed
    assert "is not read, as DATA.download may write to it: times assume 50,000 images" in printed
    assert list(tmp_path.iterdir()) == []


# Eight steps an epoch; 16 x 16 pixels, then 24 x 24, then 32 x 32.
GROWING = [
    "TOTAL_BATCH_SIZE=8",
    "MODEL.depth=2",
    "MODEL.width=48",
    "MODEL.heads=1",
    "LOG.every=3",
    "NUM_EPOCHS=3",
    "WARMUP_EPOCHS=1",
    "IMAGE_SIZES=[(1,16),(1,24)]",
]


def run_recorded(data: Path, output: Path, *settings: str) -> None:
    RECORDINGS["cpu"] = TapeRecording
    run("vit_lite_fast", data, output, *GROWING, *settings)


def read_without_best(output: Path) -> dict:
    """Return the result of a run without what its evaluations say of the best one."""
    result = read_result(output)
    for name in ("best_top1", "best_loss", "stale"):
        del result["trainer.json"][name]
    return result


@pytest.mark.parametrize(
    ("batch_sizes", "accumulation"),
    [
        pytest.param("[]", 1, id="batches0"),
        pytest.param("[(1, 4)]", 2, id="batches1"),
    ],
)
def test_recorded_steps_end_as_plain_ones_stopped_in_an_epoch_and_across_sizes(
    batch_sizes, accumulation, data, tmp_path
):
    settings = f"BATCH_SIZES={batch_sizes}", f"gradient_accumulation={accumulation}"
    plain = tmp_path / "plain"
    recorded = tmp_path / "recorded"
    run_ranks(1, run, "vit_lite_fast", data, plain, *GROWING, *settings)
    for stop in ("MAX_STEPS=13", "MAX_STEPS=23", "MAX_STEPS=None"):
        run_ranks(1, run_recorded, data, recorded, *settings, stop)
    # The evaluations where it was stopped are further records, one of which may be the best.
    expected = read_without_best(plain)
    result = read_without_best(recorded)
    assert result.pop("metrics.jsonl") != expected.pop("metrics.jsonl")
    for name, content in expected.items():
        assert result[name] == content, name


def count_launches(config: str, data: Path, output: Path) -> tuple[list[int], Waits]:
    """Return the launches and copies of each step from the trainer's thread, and its waits."""
    gpu = simulate_gpu()
    launches: list[int] = []
    waits: Waits = {}
    step = Trainer._train_step

    def counted(*args: object) -> None:
        before = gpu.kernels[True]
        gpu.waits.clear()
        step(*args)
        launches.append(gpu.kernels[True] - before)
        waits.update(gpu.waits)

    Trainer._train_step = counted
    settings = [
        "TOTAL_BATCH_SIZE=4",
        "MAX_STEPS=6",
        "COMPILE=False",
        "LOG.every=1000",
        "IMAGE_SIZES=[]",
    ]
    run(config, data, output, *settings)
    return launches, waits


@pytest.mark.parametrize(
    ("config", "plain"),
    [
        # PyTorch 2.11 has 507.
        pytest.param("vit_lite_vanilla", 536, id="vit_lite_vanilla"),
        pytest.param("vit_lite_fast", 897, id="vit_lite_fast"),
    ],
)
def test_a_recorded_step_has_five_launches_and_copies(config, plain, data, tmp_path):
    ((launches, waits),) = run_ranks(1, count_launches, config, data, tmp_path / "run")
    # Before the recording.
    assert min(launches[:3]) == pytest.approx(plain, rel=0.1)
    # The batch's images and labels, the rates, two graphs; at the end a record.
    assert launches[3:] == [5, 5, 11]
    assert waits == {}
