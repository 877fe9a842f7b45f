"""From the command line to a trained run: the data set, one process and two, the recipes."""

import json
from pathlib import Path

import pytest

from caltech101_amp import train
from caltech101_amp.testing import expect_miniature, write_categories
from common.config.load import load_config
from common.errors import UserError
from common.metrics.curves import read_metrics
from common.testing.ranks import run_ranks
from common.tools import evaluate

MODES = ("fp32", "AMP_torch", "AMP_naive", "AMP_apex")
SMALL = ["MODEL.image_size=16", "MODEL.patch_size=8", "MODEL.width=32", "MODEL.depth=2", "MODEL.heads=2",
         "MODEL.num_classes=None", "MODEL.dropout=0.0", "MICRO_BATCH_SIZE=None", "TOTAL_BATCH_SIZE=16",
         "NUM_EPOCHS=6", "WARMUP_EPOCHS=1",
         "LEARNING_RATE=0.1", "WEIGHT_DECAY=0.0", "LOG.every=1", "DATA.workers=0"]  # fmt: skip


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch) -> Path:
    expect_miniature(monkeypatch)
    write_categories(tmp_path / "data")
    return tmp_path / "data"


def arguments(config: str, root: Path, *settings: str) -> list[str]:
    words = [word for setting in (*SMALL, f"DATA.root={root}", *settings) for word in ("--set", setting)]
    return ["--config", f"config/config_{config}.py", "--output", str(root.parent / config), *words]


def losses(root: Path, config: str) -> list[float]:
    return [record["loss"] for record in read_metrics(root.parent / config) if record["kind"] == "train"]


def test_every_mode_learns_the_colours_in_two_processes_as_in_one(root):
    train.main(["--output", str(root.parent / "one"), *arguments("fp32", root)[:2], *arguments("fp32", root)[4:]])
    expected = losses(root, "one")
    assert len(expected) == 18
    for mode in MODES:
        run_ranks(2, train.main, arguments(mode, root))
        assert losses(root, mode) == pytest.approx(expected, rel=1e-4 if mode == "fp32" else 3e-2)
        evaluation = read_metrics(root.parent / mode)[-1]
        assert evaluation["samples"] == 12
        assert evaluation["top1"] > 0.6
        evaluate.main([str(root.parent / mode)])
        (path,) = (root.parent / mode).glob("evaluation/*/evaluation.json")
        found = json.loads(path.read_text())
        assert (found["top1"], found["samples"]) == (evaluation["top1"], evaluation["samples"])


def test_the_configs_say_only_what_differs():
    configs = {mode: load_config(f"config/config_{mode}.py") for mode in MODES}
    assert {configs[mode].pop("fp16", None) and mode for mode in MODES[1:]} == set(MODES[1:])
    configs["fp32"].pop("fp16")
    assert all(config == configs["fp32"] for config in configs.values())


def test_dry_run_of_a_recipe_needs_no_data(capsys, monkeypatch):
    monkeypatch.delenv("DATA", raising=False)
    train.main(["--config", "config/config_AMP_apex.py", "--dry-run"])
    assert "1 GPU x 128 x 1 = 128" in capsys.readouterr().out


def test_what_has_no_effect_is_refused(root):
    with pytest.raises(UserError, match="DATA.loader='torchvision' has no effect in this task: leave it out"):
        train.main(arguments("fp32", root, "DATA.loader=torchvision"))
