"""Ranks of a tensor-parallel group share the decoding: their batches are those of one process."""

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
from common.testing.parity_cases import CASES
from common.testing.ranks import launched, run_ranks
from imagenet_dali.task import build_eval_loader, build_train_loader
from imagenet_dali.testing import read, spoil_record

PLACED = {"image_size": 28, "device": torch.device("cpu")}
Batches = list[tuple[Tensor, Tensor]]
# keys of DATA, and arguments of build_train_loader
TRAINING: list[tuple[dict[str, Any], dict[str, Any]]] = [
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


def read_everything(root: Path, dp_size: int, config: dict[str, Any], is_shared: bool) -> Batches:
    """Return this rank's batches of two epochs each way, of a resumed one, and of evaluation."""
    with launched(**config):
        ranks: dict[str, Any] = dict(dp_rank=gpc.get_local_rank(ParallelMode.DATA))
        if is_shared:
            ranks["sharing"] = tensor_sharing()
        place = dict(**PLACED, **ranks, dp_size=dp_size)
        batches: Batches = []
        for loader in ("dali", "torchvision"):
            given = Data(workers=0, loader=loader).model_dump() | {"root": str(root)}
            for data, options in TRAINING:
                train = build_train_loader(
                    given | data, 20 * dp_size, 5, seed=1, **options, **place
                )
                batches += [*train]
                train.load_state_dict({"epoch": 3, "samples": 40 * dp_size})
                batches += read(train)
            # 60 images: the last batch has 4 on one rank, fewer or none on each of two
            batches += read(build_eval_loader(given, 7, **place))
        return batches


@pytest.mark.parametrize("name", ["1d-2", "2d-4", "2.5d-8", "3d-8", "dp2 x 1d-2"])
def test_batches_are_those_of_ranks_that_decode_everything(name, prepared):
    ranks, config = CASES[name]
    dp_size = 2 if "dp2" in name else 1
    expected = run_ranks(dp_size, read_everything, prepared, dp_size, {}, False)
    found = run_ranks(ranks, read_everything, prepared, dp_size, config, True)
    for rank, batches in enumerate(found):
        of_group = expected[rank * dp_size // ranks]
        torch.testing.assert_close(batches, of_group, rtol=0, atol=0)


def count_bad(root: Path, loader: str) -> int | str:
    """Return how many images a pass skips, or the error that ends it."""
    with launched(**CASES["1d-2"][1]):
        data = Data(workers=0, loader=loader).model_dump() | {"root": str(root)}
        train = build_train_loader(data, 8, 4, seed=1, **PLACED, sharing=tensor_sharing())
        try:
            return int(sum((labels < 0).sum() for _, labels in read(train)))
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
