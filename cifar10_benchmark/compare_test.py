import csv
import json
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from cifar10_benchmark import compare
from cifar10_benchmark.formulas import expected_bytes
from common.config.execute import FOLDER
from common.errors import UserError
from common.testing.photographs import write_colours
from common.testing.ranks import run_ranks

SMALL = ["MODEL.width=32", "MODEL.depth=2", "TOTAL_BATCH_SIZE=8"]


@pytest.fixture
def folder(tmp_path):
    write_colours(tmp_path / "data" / "train", 40, 32, 32)
    write_colours(tmp_path / "data" / "test", 8, 32, 32)
    return tmp_path / "data"


def fork_ranks(processes, words, threads):
    run_ranks(processes, compare.main, words)
    return True


def test_modes_learn_alike_and_send_what_the_formula_says(folder, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(compare, "start_ranks", fork_ranks)
    settings = [word for setting in [*SMALL, f"DATA.root={folder}"] for word in ("--set", setting)]
    configs = ["vit_lite_vanilla", str(FOLDER / "vit_lite_1d.py")]
    compare.main(["--steps", "4", "--configs", *configs, "--output", str(tmp_path / "out"), *settings])
    rows = list(csv.DictReader((tmp_path / "out" / "compare.csv").read_text().splitlines()))
    assert [(row["config"], row["processes"], row["steps"]) for row in rows] == [
        ("vit_lite_vanilla", "1", "4"),
        (configs[1], "2", "4"),
    ]
    assert float(rows[1]["loss_difference"]) < 1e-5
    assert float(rows[0]["sent_mb"]) == 0
    assert rows[1]["sent_mb"] == rows[1]["formula_mb"] == rows[1]["all_reduce_mb"] != "0.00"
    assert rows[0]["command"].startswith("python -m cifar10_benchmark.compare --steps 4 --configs ")
    assert int(rows[1]["parameters"]) < int(rows[0]["parameters"])
    with Image.open(tmp_path / "out" / "compare.png") as picture:
        assert picture.format == "PNG"
    assert " vit_lite_vanilla |" in capfd.readouterr().out


@pytest.mark.parametrize(("threads", "others"), [("1", "2"), ("4", "2")])
def test_the_control_is_the_first_config_on_another_number_of_threads(threads, others, monkeypatch, tmp_path):
    started = []

    def run(command, env, check):
        started.append((command[command.index("--configs") + 1], env["OMP_NUM_THREADS"]))
        figures = {"losses": [2.0, 1.5, 1.0 + len(started) / 100], "seconds": [1, 1, 1], "sent": {}, "parameters": 1}
        figures |= {"memory": 1, "batch": 8, "model": MODEL, "parallel": {"tensor": {"mode": None, "size": 1}}}
        Path(command[command.index("--measure") + 1], "rank.json").write_text(json.dumps(figures))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    monkeypatch.setattr(compare.subprocess, "run", run)
    compare.main(["--steps", "3", "--control", "--configs", "vit_lite_vanilla", "vit_lite_1d", f"--output={tmp_path}"])
    assert started == [("vit_lite_vanilla", threads), ("vit_lite_1d", threads), ("vit_lite_vanilla", others)]
    rows = list(csv.DictReader((tmp_path / "compare.csv").read_text().splitlines()))
    expected = {"vit_lite_vanilla": 0, f"vit_lite_vanilla, {others} threads": 0.02, "vit_lite_1d": 0.01}
    assert {row["config"]: float(row["loss_difference"]) for row in rows} == pytest.approx(expected)


MODEL = {"image_size": 32, "patch_size": 4, "width": 8, "depth": 1, "mlp_ratio": 2.0, "pool": "cls"}
ROWS = 2 * 65  # of a batch of two
A_AND_B = ROWS * 8 * 3 + ROWS * 16 + 8 * 24 + 8 * 8 + 8 * 16 + 16 * 8  # inputs and weights of the four products
C = ROWS * (24 + 8 + 16 + 8)


@pytest.mark.parametrize(
    ("tensor", "numbers"),
    [
        ({"mode": None, "size": 1}, 0),
        ({"mode": "1d", "size": 2}, 4 * ROWS * 8),  # of a pair, each all-reduce sends its message once
        ({"mode": "2d", "size": 4}, 3 / 4 * A_AND_B),
        ({"mode": "2.5d", "size": 4, "depth": 1}, 3 / 4 * A_AND_B),
        ({"mode": "3d", "size": 8}, 2 / 8 * (A_AND_B + C)),
    ],
)
def test_formulas_by_hand(tensor, numbers):
    assert expected_bytes(tensor, 2, MODEL) == pytest.approx(4 * numbers)


def test_too_few_steps_are_refused():
    with pytest.raises(UserError, match="--steps 2"):
        compare.main(["--steps", "2"])
