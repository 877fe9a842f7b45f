"""The line before a run on a CPU: an old driver, and recipes for GPUs."""

import re
from pathlib import Path

import pytest
import torch

from common.config.load import load_config
from common.run.on_cpu import explain_cpu

# as the proprietary and the open kernel module write it
PROPRIETARY = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\nGCC version:  11\n"
)
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs)\n"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a GPU that torch, built for CUDA 13, does not find."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(("text", "driver"), [(PROPRIETARY, "535.129.03"), (OPEN, "570.86.15")])
def test_an_old_driver_is_named_with_the_one_needed(machine, text, driver) -> None:
    (machine / "proc/driver/nvidia/version").write_text(text)
    line = explain_cpu(load_config("quickstart"), 128, 1, machine)
    assert f"the NVIDIA driver is {driver}, torch is built for CUDA 13.0, which needs driver 580 or later" in line
    assert "README.md" in line
    assert "\n" not in line


def test_a_gpu_without_a_driver(machine) -> None:
    assert "the NVIDIA driver is not loaded" in explain_cpu(load_config("quickstart"), 128, 1, machine)


def test_gpus_that_the_user_hides_are_not_missed(machine, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert explain_cpu(load_config("quickstart"), 128, 1, machine) is None


@pytest.mark.parametrize("recipe", ["vit-b16", "vit_s16_plain", "config_fp32"])
def test_a_recipe_for_gpus_says_how_long_a_step_takes(recipe, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("common.model.flops.peak_flops", lambda device, dtype: 1e12)
    line = explain_cpu(load_config(recipe, ["GPUS=1"]), 32_768, 1, tmp_path)
    assert "GPUS=1" not in line  # it would not silence the warning
    assert "the recipe is written for GPUs, and there is none" in line
    minutes = int(re.search(r"32,768 images takes at least (\d+) min", line)[1])
    # 4.6 (ViT-S) and 17.6 (ViT-B) x 10^9 multiply-adds forward, as timm's tables have them, 2 FLOPs each, times 3
    adds = 4.6e9 if "s16" in recipe else 17.6e9
    assert minutes == pytest.approx(32_768 * adds * 6 / 1e12 / 60, rel=0.05)


@pytest.mark.parametrize("recipe", ["quickstart", "vit_lite_vanilla"])
def test_small_recipes_need_no_word(recipe, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert explain_cpu(load_config(recipe, ["GPUS=1"]), 512, 1, tmp_path) is None
    line = explain_cpu(load_config(recipe, ["GPUS=8"]), 512, 1, tmp_path)
    assert "written for GPUs, and there is none (GPUS=8; set GPUS=1 if it is not)" in line
