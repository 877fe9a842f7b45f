import runpy
import sys
from pathlib import Path

from common.config.load import load_config
from common.config.plan import DataSummary, build_plan


def test_the_benchmarks_script_plans_its_recipe(capsys, monkeypatch):
    monkeypatch.delenv("DATA", raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py", "--config=vit_s16_2p5d", "--dry-run"])
    runpy.run_path(str(Path(__file__).parent / "train.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "8 GPUs = 2 data parallel x 4 tensor parallel" in printed
    assert "22.1 M" in printed  # ViT-S/16 in arXiv 2012.12877, table 1


def test_the_plain_recipe_is_planned_as_its_source():
    imagenet = DataSummary(1_281_167, 50_000, 1000, fingerprint="")
    plan = build_plan(load_config("vit_s16_plain"), 8, imagenet)
    assert (plan.total_batch, plan.warmup_steps, plan.total_steps) == (1024, 10_000, 90 * 1251)
