"""Config files of others, given to the programs as a user does, and what recipes and plans come to."""

import json
import re
from pathlib import Path

import pytest
import timm
import torch

from caltech101_amp import train as train_caltech
from cifar10_benchmark import train as train_cifar10
from common.config.load import load_config
from common.config.originals_test import FILES
from common.testing.commands import run_forked
from common.testing.photographs import write_colours
from imagenet_dali import train_dali

ROOT = Path(__file__).resolve().parent.parent
SMALL = "".join(
    f" --set MODEL.{key}={value}"
    for key, value in dict(image_size=16, patch_size=8, width=32, depth=1, heads=2, num_classes="None").items()
)


def test_an_original_of_the_benchmark_trains_from_its_tasks_folder(tmp_path: Path, monkeypatch) -> None:
    for split in ("train", "test"):
        write_colours(tmp_path / "data" / split, 32, 16, 16)
    text = FILES["cifar/vit_vanilla.py"][1].replace("BATCH_SIZE = 512", "BATCH_SIZE = 16")
    (tmp_path / "vit_vanilla.py").write_text(text.replace("./vit_", f"{tmp_path}/vit_"))
    monkeypatch.chdir(ROOT / "cifar10_benchmark")
    settings = f"--set DATA.root={tmp_path}/data --set MAX_STEPS=2{SMALL}"
    ended = run_forked(train_cifar10.main, f"--config {tmp_path}/vit_vanilla.py {settings}".split())
    assert "BATCH_SIZE as TOTAL_BATCH_SIZE=16, over all GPUs; left out" in " ".join(ended.stdout.split())
    assert ended.stdout.splitlines()[-1].startswith("top1=")
    about = json.loads((tmp_path / "vit_None_cifar10_bs16_lr0.002" / "config.json").read_text())
    assert (about["plan"]["total_batch"], about["config"]["DATA"]["autoaugment"]) == (16, "cifar10")


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        ("deit3_s16", "deit3_small_patch16_224"),
        ("deit3_b16", "deit3_base_patch16_224"),
        ("deit3_l16", "deit3_large_patch16_224"),
        ("deit3_h14", "deit3_huge_patch14_224"),
        ("deit3_h14_finetune", "deit3_huge_patch14_224"),
        ("vit-b32", "vit_base_patch32_224"),
        ("vit-l32", "vit_large_patch32_224"),
    ],
)
def test_a_recipes_dry_run_counts_the_parameters_of_timms_model(recipe: str, name: str, capsys, monkeypatch) -> None:
    monkeypatch.delenv("DATA", raising=False)
    train_dali.main(["--config", recipe, "--dry-run"])
    size = load_config(recipe, [])["MODEL"]["image_size"]
    with torch.device("meta"):
        count = sum(p.numel() for p in timm.create_model(name, img_size=size, num_classes=1000).parameters())
    assert f"{count:,} (" in capsys.readouterr().out


def test_the_flags_of_a_row_start_the_run_that_the_row_describes(capsys, monkeypatch) -> None:
    monkeypatch.delenv("DATA", raising=False)
    command = ["--config", "vit_s16_vanilla", "--dry-run", "--set", "MODEL.depth=2"]
    train_dali.main([*command, "--gpus", "8"])
    lines = capsys.readouterr().out.splitlines()
    for name in ("1d 2", "2.5d 2 x 2 x 2"):
        row = next(line.split("|")[2:] for line in lines if re.match(rf"\| *{name} \|", line))
        flags = next(line.removeprefix(name) for line in lines if line.startswith(f"{name}: "))
        train_dali.main([*command, "--set", "GPUS=8", *flags.removeprefix(": ").split()])
        plan = capsys.readouterr().out
        batch, memory, *_ = (cell.strip() for cell in row)
        groups, micro, accumulation = batch.split("x")
        value, unit = re.search(r"memory per GPU +([\d.]+) (.B) at the peak", plan).groups()
        assert f"{float(value) / {'GB': 1, 'MB': 1e3}[unit]:.2f}" == memory
        assert re.search(rf"{groups} groups? of \d GPUs x {micro} x {accumulation} = 4,096", plan)


def test_the_amp_examples_command_downloads_to_data_or_says_where_to_put_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("caltech101_amp.task.URL", "http://127.0.0.1:9/caltech-101.zip")  # where nobody listens
    ended = run_forked(train_caltech.main, ["--config", "config/config_AMP_torch.py"])
    assert ended.code == 2
    assert "DATA.root is not set: ./data, to which Caltech-101 (137 MB) is downloaded" in " ".join(ended.stdout.split())
    (line,) = ended.stderr.splitlines()
    assert line.endswith(f"; rerun the command, or download the file to {tmp_path}/data/caltech-101.zip")
