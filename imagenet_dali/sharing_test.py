"""Ranks of a tensor-parallel group share the decoding: their batches are those of one process.

python -m imagenet_dali.sharing_test [ROUNDS]    # the CPU time of loading, by rank and mode
"""

import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.config.schema import Data
from common.engine.upstream import ParallelMode, gpc
from common.errors import UserError
from common.resolutions import Resolution
from common.run.run import tensor_sharing
from common.shards.prepare import prepare
from common.testing.commands import forked
from common.testing.parity_cases import CASES
from common.testing.photographs import write_photographs
from common.testing.ranks import free_port, launched, run_ranks, slow
from imagenet_dali.task import build_eval_loader, build_train_loader
from imagenet_dali.testing import make_undecodable, read, spoil_record, train

CPU = torch.device("cpu")
PLACED = {"image_size": 28, "device": CPU}
Batches = list[tuple[Tensor, Tensor]]
# In the first epoch micro-batches of 10 smaller images.
GROWING = Resolution(1, 20, 10, 2), Resolution(9, 28, 5, 4)
# keys of DATA, and arguments of build_train_loader
Ways = list[tuple[dict[str, Any], dict[str, Any]]]
TRAINING: Ways = [
    ({}, {}),
    ({"randaugment": (2, 10), "repeats": 3}, {}),
    ({"sampling": "balanced"}, {}),
    ({"block": 0.004, "window": 2}, {"order": "blocks"}),
    ({}, {"resolutions": GROWING}),
]


def data_keys(root: Path, loader: str) -> dict[str, Any]:
    """Return the keys of DATA for the shards in ``root``, decoded in this process."""
    data = Data(workers=0, loader=loader)
    return data.model_dump() | {"root": str(root)}


def read_everything(
    root: Path, dp_size: int, ways: Ways, config: dict[str, Any], is_shared: bool
) -> Batches:
    """Return this rank's batches of an epoch each way, of a resumed one, and of evaluation."""
    with launched(**config):
        place: dict[str, Any] = dict(
            **PLACED,
            dp_rank=gpc.get_local_rank(ParallelMode.DATA),
            dp_size=dp_size,
        )
        if is_shared:
            place["sharing"] = tensor_sharing()
        batches: Batches = []
        for loader in ("dali", "torchvision"):
            given = data_keys(root, loader)
            for data, options in ways:
                train = build_train_loader(
                    given | data,
                    20 * dp_size,
                    5,
                    seed=1,
                    **options,
                    **place,
                )
                batches += [*train]
                train.load_state_dict({"epoch": 3, "samples": 40 * dp_size})
                batches += read(train)
            # 60 images: the last batch has 4 on one rank, fewer or none on each of two
            batches += read(build_eval_loader(given, 7, **place))
        return batches


@pytest.mark.parametrize("name", ["1d-2", slow("2d-4"), "2.5d-8", "3d-8", "dp2 x 1d-2"])
def test_batches_are_those_of_ranks_that_decode_everything(name, prepared):
    ranks, config = CASES[name]
    dp_size = 2 if "dp2" in name else 1
    # More ranks share as two do: one way shows that their groups are right.
    ways = TRAINING if "1d-2" in name else TRAINING[-1:]
    expected = run_ranks(dp_size, read_everything, prepared, dp_size, ways, {}, False)
    found = run_ranks(ranks, read_everything, prepared, dp_size, ways, config, True)
    for rank, batches in enumerate(found):
        dp_rank = rank * dp_size // ranks
        torch.testing.assert_close(batches, expected[dp_rank], rtol=0, atol=0)


def count_bad(root: Path, loader: str) -> int | str:
    """Return how many images a pass skips, or the error that ends it."""
    _, config = CASES["1d-2"]
    with launched(**config):
        data = data_keys(root, loader)
        split = build_train_loader(data, 8, 4, seed=1, **PLACED, sharing=tensor_sharing())
        skipped = 0
        try:
            for _, labels in read(split):
                skipped += int((labels < 0).sum())
        except UserError as error:
            _, _, reason = str(error).partition("; with it ")
            return reason
        return skipped


@pytest.mark.parametrize("loader", ["dali", "torchvision"])
def test_all_ranks_count_the_damaged_images_of_the_group(data, loader):
    for number in range(8):
        spoil_record(data, "train", number)
    assert run_ranks(2, count_bad, data, loader) == [8, 8]
    spoil_record(data, "train", 8)
    more = "9 of the 240 images that this process reads in a pass are bad, more than 1%"
    assert run_ranks(2, count_bad, data, loader) == [more, more]


def test_a_rank_that_cannot_decode_ends_the_others_with_a_line(data, tmp_path):
    make_undecodable(data, 4)
    settings = [
        f"DATA.root={data}",
        "DATA.workers=1",
        "MODEL.num_classes=2",
        "TIMEOUT=60",
        "TENSOR_PARALLEL_SIZE=2",
        "TENSOR_PARALLEL_MODE='1d'",
    ]

    def main(_: object) -> None:
        train(tmp_path, "run", *settings)

    place = dict(
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
    )
    start = partial(forked, main, **place)
    errors = []
    with (
        start(RANK="0", LOCAL_RANK="0") as first,
        start(RANK="1", LOCAL_RANK="1") as second,
    ):
        for process, _, stderr in (first, second):
            process.join(120)
            assert process.exitcode == 2
            lines = stderr.read_text().splitlines()
            (error,) = [line for line in lines if "error:" in line]
            errors.append(error)
    # one decodes the record's row, the other waits for it
    (missing,) = [error for error in errors if "is missing, see its output" in error]
    (named,) = {*errors} - {missing}
    assert "record 4 of train" in named
    assert "waiting for data" in missing


def load_times(root: Path, config: dict[str, Any], loader: str) -> tuple[float, float]:
    """Return the CPU time of this process per image of a micro-batch: decoding alone, and all."""
    with launched(**config):
        split = build_train_loader(
            data_keys(root, loader),
            256,
            128,
            seed=1,
            image_size=224,
            device=CPU,
            sharing=tensor_sharing(),
        )
        list(split)  # warms up
        began = time.process_time()
        batches = sum(1 for _ in split.reader.read(split.sampler.draws(1)))
        decoding = time.process_time() - began
        began = time.process_time()
        samples = sum(len(labels) for _, labels in split)
        loading = time.process_time() - began
        split.close()
        assert samples == 128 * batches
        return 1e3 * decoding / samples, 1e3 * loading / samples


def least_load_times(shards: Path, loader: str, rounds: int) -> dict[str, list[float]]:
    """Return the least CPU times of interleaved rounds, of the rank that needs most, by mode."""
    least: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name in ("none", "1d-2", "2d-4", "2.5d-8", "3d-8"):
            ranks, config = CASES[name]
            times = run_ranks(ranks, load_times, shards, config, loader)
            most = [max(of_ranks) for of_ranks in zip(*times, strict=True)]
            least[name] = [*map(min, most, least.get(name, most))]
    return least


def print_load_times(rounds: int) -> None:
    """Print the times in ms an image, and as shares of all that one process needs."""
    with tempfile.TemporaryDirectory() as folder:
        images = Path(folder, "images")
        shards = Path(folder, "shards")
        write_photographs(images / "train", "ab", count=512, width=500, height=400)
        write_photographs(images / "val", "ab", count=4, width=500, height=400)
        prepare(images, shards)
        for loader in ("dali", "torchvision"):
            least = least_load_times(shards, loader, rounds)
            _, alone = least["none"]
            for name, (decoding, loading) in least.items():
                print(
                    f"{loader} {name}: decoding {decoding:.3f} ms ({decoding / alone:.3f} of one "
                    f"process's all), all {loading:.3f} ms ({loading / alone:.3f})",
                    flush=True,
                )


if __name__ == "__main__":
    rounds = 5
    if len(sys.argv) > 1:
        rounds = int(sys.argv[1])
    print_load_times(rounds)
