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

PLACED = {"image_size": 28, "device": torch.device("cpu")}
Batches = list[tuple[Tensor, Tensor]]
# keys of DATA, and arguments of build_train_loader
Ways = list[tuple[dict[str, Any], dict[str, Any]]]
TRAINING: Ways = [
    ({}, {}),
    ({"randaugment": (2, 10), "repeats": 3}, {}),
    ({"sampling": "balanced"}, {}),
    ({"block": 0.004, "window": 2}, {"order": "blocks"}),
    (
        {},
        # the first epoch has micro-batches of 10 smaller images
        {"resolutions": (Resolution(1, 20, 10, 2), Resolution(9, 28, 5, 4))},
    ),
]


def read_everything(
    root: Path, dp_size: int, ways: Ways, config: dict[str, Any], is_shared: bool
) -> Batches:
    """Return this rank's batches of an epoch each way, of a resumed one, and of evaluation."""
    with launched(**config):
        ranks: dict[str, Any] = dict(dp_rank=gpc.get_local_rank(ParallelMode.DATA))
        if is_shared:
            ranks["sharing"] = tensor_sharing()
        place = dict(**PLACED, **ranks, dp_size=dp_size)
        batches: Batches = []
        for loader in ("dali", "torchvision"):
            given = Data(workers=0, loader=loader).model_dump() | {"root": str(root)}
            for data, options in ways:
                train = build_train_loader(
                    given | data, 20 * dp_size, 5, seed=1, **options, **place
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
        of_group = expected[rank * dp_size // ranks]
        torch.testing.assert_close(batches, of_group, rtol=0, atol=0)


def count_bad(root: Path, loader: str) -> int | str:
    """Return how many images a pass skips, or the error that ends it."""
    with launched(**CASES["1d-2"][1]):
        data = Data(workers=0, loader=loader).model_dump() | {"root": str(root)}
        split = build_train_loader(data, 8, 4, seed=1, **PLACED, sharing=tensor_sharing())
        try:
            return int(sum((labels < 0).sum() for _, labels in read(split)))
        except UserError as error:
            return str(error).partition("; with it ")[2]


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
    settings = f"DATA.root={data}", "DATA.workers=1", "MODEL.num_classes=2", "TIMEOUT=60"
    tensor = "TENSOR_PARALLEL_SIZE=2", "TENSOR_PARALLEL_MODE='1d'"

    def main(_: object) -> None:
        train(tmp_path, "run", *settings, *tensor)

    port = str(free_port())
    place = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    ranks = [partial(forked, main, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2)]
    with ranks[0](**place) as first, ranks[1](**place) as second:
        said = []
        for process, _, stderr in (first, second):
            process.join(120)
            assert process.exitcode == 2
            (line,) = [text for text in stderr.read_text().splitlines() if "error:" in text]
            said.append(line)
    # one decodes the record's row, the other waits for it
    (missing,) = [line for line in said if "is missing, see its output" in line]
    (named,) = {*said} - {missing}
    assert "record 4 of train" in named
    assert "waiting for data" in missing


def load_times(root: Path, config: dict[str, Any], loader: str) -> tuple[float, float]:
    """Return the CPU time of this process per image of a micro-batch: decoding alone, and all."""
    with launched(**config):
        data = Data(workers=0, loader=loader).model_dump() | {"root": str(root)}
        place = dict(image_size=224, device=torch.device("cpu"), sharing=tensor_sharing())
        split = build_train_loader(data, 256, 128, seed=1, **place)
        list(split)  # warms up
        began = time.process_time()
        decoded = sum(1 for _ in split.reader.read(split.sampler.draws(1)))
        decoding = time.process_time() - began
        began = time.process_time()
        samples = sum(len(labels) for _, labels in split)
        loading = time.process_time() - began
        split.close()
        assert samples == 128 * decoded
        return 1e3 * decoding / samples, 1e3 * loading / samples


def print_load_times(rounds: int) -> None:
    """Print the least CPU time of interleaved rounds, in ms, of the rank that needs most."""
    names = ("none", "1d-2", "2d-4", "2.5d-8", "3d-8")
    with tempfile.TemporaryDirectory() as folder:
        write_photographs(Path(folder, "images/train"), "ab", 512, 500, 400)
        write_photographs(Path(folder, "images/val"), "ab", 4, 500, 400)
        prepare(Path(folder, "images"), Path(folder, "shards"))
        for loader in ("dali", "torchvision"):
            least: dict[str, list[float]] = {}
            for _ in range(rounds):
                for name in names:
                    ranks, config = CASES[name]
                    times = run_ranks(ranks, load_times, Path(folder, "shards"), config, loader)
                    most = [max(each) for each in zip(*times, strict=True)]
                    least[name] = [*map(min, most, least.get(name, most))]
            _, alone = least["none"]
            for name, (decoding, loading) in least.items():
                shares = decoding / alone, loading / alone
                print(
                    f"{loader} {name}: decoding {decoding:.3f} ms ({shares[0]:.3f} of one "
                    f"process's all), all {loading:.3f} ms ({shares[1]:.3f})",
                    flush=True,
                )


if __name__ == "__main__":
    print_load_times(int((*sys.argv, 5)[1]))
