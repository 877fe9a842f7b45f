"""What no machine has is refused at once, from the plan."""

import time
from pathlib import Path

import pytest

from common.config.load import load_config
from common.config.plan import build_plan
from common.errors import UserError
from common.planner.limits import check_limits
from common.testing.commands import run_forked
from common.testing.tiny_task import train, write_images


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images"))


@pytest.mark.parametrize(
    ("setting", "words", "is_plan"),
    [
        ("MODEL.width=1000000000", "width=1000000000, depth=2, num_classes=7: 1.6e+19 parameters take 256,000,", False),
        ("MODEL.depth=100000000000", "MODEL.width=32, depth=100000000000, ", False),
        ("TOTAL_BATCH_SIZE=1000000000000000", "more than the 70 training images", False),
        ("MODEL.depth=100000000", "this machine has", True),
        ("DATA.workers=1000000", "DATA.workers=1000000: expected", False),
    ],
)
def test_what_no_machine_has_is_refused_at_once_and_what_this_one_lacks_by_a_start_only(
    data: Path, tmp_path: Path, setting: str, words: str, is_plan: bool
) -> None:
    for flags in ([], ["--dry-run"]):
        started = time.perf_counter()
        ended = run_forked(lambda _, flags=flags: train(data, tmp_path / "run", setting, flags=flags), [])
        if flags and is_plan:
            assert (ended.code, "memory per GPU" in ended.stdout) == (0, True), ended.stderr
        else:
            assert (ended.code, ended.stderr.count("\n"), words in ended.stderr) == (2, 1, True), ended.stderr
        assert not (tmp_path / "run").exists()
        assert time.perf_counter() - started < 20


def test_a_frozen_body_keeps_the_activations_of_one_block() -> None:
    for settings in ([], ["FREEZE=body"]):
        config = load_config(
            "quickstart", ["MODEL.depth=1000", "TOTAL_BATCH_SIZE=1024", "gradient_accumulation=1", *settings]
        )
        plan = build_plan(config, 1, None)
        if settings:
            check_limits(config, plan, 3e9, "a GPU here")
        else:
            with pytest.raises(
                UserError, match="micro-batches of 1,024 images take at least 4.2 GB, a GPU here has 3.0"
            ):
                check_limits(config, plan, 3e9, "a GPU here")
