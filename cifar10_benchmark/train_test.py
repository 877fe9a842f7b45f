"""From the command line to a trained run: an image folder, one process and two, the recipes."""

import json
from pathlib import Path

import pytest
from PIL import Image

from cifar10_benchmark import train
from common.metrics.curves import read_metrics
from common.testing.photographs import write_colours
from common.testing.ranks import run_ranks
from common.tools import evaluate, predict

SMALL = ["MODEL.image_size=8", "MODEL.width=32", "MODEL.depth=2", "MODEL.num_classes=None", "MODEL.dropout=0.0",
         "TOTAL_BATCH_SIZE=16"]  # fmt: skip
SHORT = ["NUM_EPOCHS=3", "WARMUP_EPOCHS=1", "LOG.every=1", "LEARNING_RATE=1e-2"]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_colours(folder / "train", 53, 8, 8)
    write_colours(folder / "test", 13, 8, 8, seed=1)
    return folder


def arguments(root: Path, output: Path, *settings: str) -> list[str]:
    words = [word for setting in (*SMALL, *SHORT, f"DATA.root={root}", *settings) for word in ("--set", setting)]
    return ["--config", "vit_lite_vanilla", "--output", str(output), *words]


def test_two_processes_train_as_one_does(root, tmp_path, capfd):
    """One process learns the colours; two take the same losses on the way."""
    train.main(arguments(root, tmp_path / "one"))
    capfd.readouterr()
    run_ranks(2, train.main, arguments(root, tmp_path / "two"))
    printed = capfd.readouterr().out
    one, two = (read_metrics(tmp_path / name) for name in ("one", "two"))
    assert [record["step"] for record in one] == [1, 2, 3, 3, 4, 5, 6, 6, 7, 8, 9, 9]
    assert [record["loss"] for record in one] == pytest.approx([record["loss"] for record in two], rel=1e-4)
    assert one[-1]["top1"] == two[-1]["top1"] > 0.6
    assert one[-1]["samples"] == two[-1]["samples"] == 13
    assert printed.splitlines()[-1] == f"top1={two[-1]['top1']:.4f}"

    evaluate.main([str(tmp_path / "one" / "checkpoints" / "step-00000009")])
    (found,) = (tmp_path / "one").glob("evaluation/*/evaluation.json")
    assert json.loads(found.read_text()).items() >= {name: one[-1][name] for name in ("loss", "top1", "top5")}.items()

    wide = Image.new("RGB", (60, 24), "blue")  # whose centre is brought to the size of the data set
    wide.paste("red", (12, 0, 48, 24))
    wide.save(tmp_path / "wide.png")
    capfd.readouterr()
    predict.main([str(tmp_path / "one"), str(tmp_path / "wide.png"), "--json"])
    assert json.loads(capfd.readouterr().out)["classes"][0]["class"] == "r"


def test_dry_run_of_the_recipes_needs_no_data_and_downloads_nothing(tmp_path, capsys):
    for recipe, batch in (("vit_lite_vanilla", "8 GPUs x 64 x 1 = 512"), ("vit_lite_cct", "1 GPU x 128 x 1 = 128")):
        settings = ["--set", f"DATA.root={tmp_path}", "--set", "DATA.download=True"]
        train.main(["--config", recipe, "--dry-run", "--gpus", batch[0], *settings])
        printed = " ".join(capsys.readouterr().out.split())
        assert batch in printed
        assert "3.7 M" in printed  # arXiv 2104.05704, table 3
        assert "is not on this machine: time for 50,000 images" in printed
    assert not list(tmp_path.iterdir())
