"""On a simulated GPU: where the host waits, exact resume, loaders, modes on groups of NCCL."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.config.load import load_config
from common.data.batch_augment import BatchAugment
from common.metrics import curves
from common.metrics.metrics_file import read_metrics
from common.testing import tiny_task
from common.testing.checkpoints import read_result
from common.testing.parity_cases import CASES
from common.testing.ranks import run_ranks, slow
from common.testing.simulated_gpu import Waits, read_on_gpu, simulate_gpu

SETTINGS = ("COMPILE=False", "TOTAL_BATCH_SIZE=16", "MODEL.heads=4", "EVAL_EVERY=1")
# The host may wait in these: once a run, an evaluation, a checkpoint.
ALLOWED = {
    "common/engine/groups.py:join_groups",
    "common/engine/engine.py:initialize",
    "common/engine/noise_scale.py:NoiseScale.__init__",
    "common/run/bad_step.py:BadStepHook.after_train",
    "common/data/crops.py:Normalizer.__init__",
    "common/metrics/hook.py:MetricsHook.state_dict",
    "common/metrics/hook.py:MetricsHook.load_state_dict",
    "common/metrics/hook.py:MetricsHook.before_test",
    "common/metrics/evaluation.py:Counts.sum_over_ranks",
    "common/checkpoint/save.py:full_state_dict",
    "common/checkpoint/save.py:load_full_state_dict",
    "common/engine/tensor_parallel/sharding.py:load_full_optimizer_state",
    "common/engine/tensor_parallel/sharding.py:load_full_model_state",
    "common/engine/step_optimizer.py:SkipCounter.state_dict",
    "common/engine/step_optimizer.py:StepOptimizer.step_state",
    "common/engine/zero.py:_apply_fsdp",
}


@pytest.fixture(scope="module")
def losses(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Those of one process without a GPU."""
    output = tmp_path_factory.mktemp("plain") / "run"
    run_ranks(1, tiny_task.train, data, output, *SETTINGS, "EMA=0.9")
    return [record["loss"] for record in read_metrics(output)]


def records(output: Path) -> list[Any]:
    return [record for record in read_metrics(output) if record["kind"] == "train"]


def train(data: Path, output: Path, *settings: str) -> Waits:
    """Train on a simulated GPU; return where the host has waited."""
    gpu = simulate_gpu()
    curves.draw_curves = lambda *_: None  # drawing takes longer than training here
    tiny_task.train(data, output, *SETTINGS, *settings)
    return gpu.waits


@pytest.mark.parametrize(
    ("dtype", "optimizer", "graphs", "epochs"),
    [
        ("", "adamw", False, 3),
        ("bfloat16", "lamb", False, 3),
        slow("float16", "sgd", False, 6),  # more than CHECK_EVERY steps
        ("float16", "muon", True, 6),
    ],
)
def test_a_run_waits_where_it_may_and_resumes(dtype, optimizer, graphs, epochs, data, tmp_path):
    precision = f"fp16=dict(mode=AMP_TYPE.TORCH, dtype={dtype!r})" if dtype else "fp16=None"
    settings = [
        precision,
        f"OPTIMIZER.name={optimizer!r}",
        "MODEL.dropout=0.1",
        "EMA=0.9",
        "gradient_accumulation=2",
        f"NUM_EPOCHS={epochs}",
        f"GRAPHS={graphs}",
    ]
    (waits,) = run_ranks(1, train, data, tmp_path / "whole", *settings)
    run_ranks(1, train, data, tmp_path / "pieces", *settings, "MAX_STEPS=6")
    (resumed,) = run_ranks(1, train, data, tmp_path / "pieces", *settings)
    waits |= resumed
    assert sorted(waits.keys() - ALLOWED) == []
    unseen = {"common/engine/zero.py:_apply_fsdp"}
    assert dtype != "float16" or waits.keys() | unseen == ALLOWED
    # Two micro-batches, each phase of which takes 1 ms here; graphs are not timed.
    phases = [
        (line.get("forward_s"), line.get("backward_s")) for line in records(tmp_path / "whole")
    ]
    phase = None if graphs else pytest.approx(2e-3)
    assert phases == [(phase, phase)] * len(phases)
    whole, found = (read_result(tmp_path / name) for name in ("whole", "pieces"))
    assert [file for file in whole if found[file] != whole[file]] == [
        "metrics.jsonl"
    ]  # one more evaluation


@pytest.mark.parametrize(
    "mode",
    [
        "1d-2",
        slow("zero 3"),
        slow("2d-4"),
        slow("2.5d-4"),
        "3d-8",
        slow("zero 1"),
        slow("zero 1 x 1d-2"),
    ],
)
def test_a_mode_trains_on_groups_of_nccl_as_one_process_does(mode, losses, data, tmp_path):
    world_size, options = CASES[mode]
    settings = ["EMA=0.9", *(f"{key}={value}" for key, value in options.items())]
    waits, *_ = run_ranks(world_size, train, data, tmp_path / "run", *settings)
    assert sorted(waits.keys() - ALLOWED) == []
    assert [record["loss"] for record in read_metrics(tmp_path / "run")] == pytest.approx(
        losses, rel=1e-5
    )


@pytest.mark.parametrize("mode", ["const", "pixel"])
def test_loaders_and_augmentation_do_not_wait_after_the_first_batch(mode, data):
    config = load_config("quickstart", [f"DATA.root={data}", "DATA.workers=1"])
    augment = BatchAugment(
        config["SEED"],
        config["DATA"]["mean"],
        config["DATA"]["std"],
        three_augment=True,
        color_jitter=0.3,
        erasing=0.5,
        erasing_mode=mode,
        mixup=0.8,
        cutmix=1.0,
    )

    def build(device: torch.device) -> Iterator[tuple[Tensor, Any]]:
        place = dict(image_size=32, device=device)
        train_loader = tiny_task.TASK.build_train_loader(config["DATA"], 14, 7, seed=0, **place)
        eval_loader = tiny_task.TASK.build_eval_loader(config["DATA"], 7, **place)
        train_loader.augment = augment
        for loader in (eval_loader, train_loader):
            for _ in range(2):
                yield from loader
            loader.close()

    ((images, waits, kernels),) = run_ranks(1, read_on_gpu, build)
    assert waits == {}
    assert sum(kernels.values()) <= 45  # in the mean with evaluation, which has 6
    assert all(map(torch.equal, images, (images for images, _ in build(torch.device("cpu")))))
