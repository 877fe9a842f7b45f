"""REPLAY_EVERY finds what is computed differently twice, and leaves no trace in a run."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from common.engine import repeated_pass
from common.engine.upstream import gpc
from common.errors import AgreedError
from common.recording import RECORDINGS
from common.testing.bit_flips import BITS, PLACES, find_flips
from common.testing.checkpoints import read_result
from common.testing.parity_cases import CASES
from common.testing.ranks import run_ranks, slow
from common.testing.simulated_gpu import simulate_gpu
from common.testing.tape import TapeRecording
from common.testing.tiny_task import train, write_images

SETTINGS = ["TOTAL_BATCH_SIZE=16", "LOG.every=1", "EMA=0.9", "MIXUP=0.5", "CHECKPOINT_EVERY=2"]
HALF = "fp16=dict(mode=AMP_TYPE.TORCH, dtype='float16')"
DROPOUT = "MODEL.dropout=0.1"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images"))


@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("none", [HALF, DROPOUT, "gradient_accumulation=2", "IMAGE_SIZES=[(1, 8)]"]),
        ("none", ["GRAPHS=True", "NUM_EPOCHS=2"]),
        ("none", ["OPTIMIZER.name=lamb", "OPTIMIZER.variant=apex"]),
        ("none", ["OPTIMIZER.name=muon"]),
        ("dp2", ["MODEL=dict(timm='resnet10t', image_size=16)"]),  # batch norms
        slow("dp2", [DROPOUT, "gradient_accumulation=2"]),
        slow("zero 1", [DROPOUT, "gradient_accumulation=2"]),
        slow("zero 3", [DROPOUT]),
        slow("2d-4", [DROPOUT, "gradient_accumulation=2", "OPTIMIZER.name=lamb"]),
        slow("3d-8", [DROPOUT, "OPTIMIZER.name=muon"]),
    ],
)
def test_a_run_has_the_same_bits_with_it(mode, settings, images, tmp_path, monkeypatch):
    monkeypatch.setitem(RECORDINGS, "cpu", TapeRecording)
    gpus, options = CASES[mode]
    settings = [*SETTINGS, *settings, *(f"{key}={value}" for key, value in options.items())]
    results = []
    for every in (0, 3):
        run = tmp_path / str(every)
        calls = run_ranks(gpus, count_checks, images, run, [*settings, f"REPLAY_EVERY={every}"])
        # Of eight steps, the second, third and sixth have two passes and two updates more.
        assert calls == [(6, 6) if every else (0, 0)] * gpus
        results.append(read_result(run))
    assert results[0] == results[1]


def count_checks(images: Path, run: Path, settings: Sequence[str]) -> tuple[int, ...]:
    with (
        mock.patch.object(
            repeated_pass, "_sum_gradients", wraps=repeated_pass._sum_gradients
        ) as passes,
        mock.patch.object(repeated_pass, "_sum_update", wraps=repeated_pass._sum_update) as updates,
    ):
        train(images, run, *settings)
    return passes.call_count, updates.call_count


@pytest.mark.parametrize("mode", ["dp2", slow("zero 3"), slow("1d-2"), slow("2d-4")])
def test_each_flip_that_changes_a_result_is_found_and_none_else(mode):
    flips = 2 * len(BITS) * len(PLACES)
    by_rank = run_ranks(CASES[mode][0], find_flips, mode, flips, 1, False)
    found = [bool(row.ranks) for row in by_rank[0]]
    assert found == [any(row.changed for row in rows) for rows in zip(*by_rank, strict=True)]
    assert sum(found) > flips / 2
    if mode == "dp2":  # elsewhere ranks exchange what the flip has changed
        assert {tuple(row.ranks) for row in by_rank[0]} == {(), (1,)}


def test_a_flip_that_stays_is_not_found():
    rows, _ = run_ranks(2, find_flips, "dp2", len(BITS), 1, True)
    assert not any(row.ranks for row in rows)


def start_faulty(
    images: Path, run: Path, settings: Sequence[str], faulty: int = 1, part: str = "gradients"
) -> None:
    """Train; in each third check of a part, the second result of a rank differs in two tensors."""
    name = {"gradients": "_sum_gradients", "update": "_sum_update"}[part]
    compute = getattr(repeated_pass, name)
    results = []

    def compute_wrongly(*args: object) -> Tensor:
        sums_P2 = compute(*args)
        results.append(sums_P2)
        if gpc.get_global_rank() == faulty and len(results) % 6 == 0:
            sums_P2[3:5, 1] += 1
        return sums_P2

    with mock.patch.object(repeated_pass, name, compute_wrongly):
        train(images, run, *settings)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("gradients", r"passes from .* on rank 1 \(\S+, CPU\): 2 of 32 gradients; "),
        ("update", r"updates from .* on rank 1 \(\S+, CPU\): 2 of 128 tensors; "),
    ],
)
def test_a_difference_ends_the_run_with_its_rank_or_is_counted(
    part, words, images, tmp_path, capfd
):
    settings = [*SETTINGS, "REPLAY_EVERY=3"]
    words = rf"step 6: two {words}"
    with pytest.raises(RuntimeError, match=rf"{words}.*\(MAX_REPLAY_FAULTS=0\); "):
        run_ranks(2, start_faulty, images, tmp_path / "run", settings, 1, part)
    capfd.readouterr()
    counted = [*settings, "MAX_REPLAY_FAULTS=1"]
    run_ranks(2, start_faulty, images, tmp_path / "counted", counted, 1, part)
    said = " ".join(capfd.readouterr().err.split())
    assert re.search(f"warning: {words}", said)
    assert len(read_result(tmp_path / "counted")["metrics.jsonl"]) > 8


def start_on_gpu(*args: Any) -> None:
    simulate_gpu()
    start_faulty(*args, faulty=0)


@pytest.mark.parametrize("graphs", [False, True])
def test_a_gpu_computes_the_same_bits_and_is_named_as_its_driver_does(
    graphs, images, tmp_path, capfd
):
    settings = [*SETTINGS, DROPOUT, "COMPILE=False", f"GRAPHS={graphs}", "MAX_REPLAY_FAULTS=9"]
    results = []
    for every in (0, 3):
        run = tmp_path / str(every)
        run_ranks(1, start_on_gpu, images, run, [*settings, f"REPLAY_EVERY={every}"])
        results.append(read_result(run))
    assert results[0] == results[1]
    said = " ".join(capfd.readouterr().err.split())
    assert re.search(r"warning: step 6: .* rank 0 \(\S+, GPU-8a6d\): 2 of 32 gradients", said)


def test_operations_without_a_deterministic_kernel_are_refused_by_name():
    """A GPU is not needed: torch raises it in the pass."""
    reason = "upsample_bicubic2d_backward_out_cuda does not have a deterministic implementation"

    def compute() -> None:
        with repeated_pass._deterministic(torch.device("cuda")):
            assert torch.are_deterministic_algorithms_enabled()
            raise RuntimeError(f"{reason}, but you set torch.use_deterministic_algorithms(True)")

    with pytest.raises(AgreedError, match=f"REPLAY_EVERY: {reason}"):
        compute()
    assert not torch.are_deterministic_algorithms_enabled()
