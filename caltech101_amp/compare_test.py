"""The comparison of all modes, on a miniature of the data set; and its arithmetic."""

import csv

import pytest
import torch

from caltech101_amp import compare
from caltech101_amp.measure import PHASES
from caltech101_amp.testing import expect_miniature, write_categories
from common.errors import UserError

TINY = ["MODEL.image_size=16", "MODEL.patch_size=8", "MODEL.width=32", "MODEL.depth=1", "MODEL.heads=2",
        "MODEL.num_classes=None", "MICRO_BATCH_SIZE=8", "DATA.workers=0"]  # fmt: skip


@pytest.fixture
def arguments(tmp_path, monkeypatch) -> list[str]:
    expect_miniature(monkeypatch)
    write_categories(tmp_path / "data")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # so that processes are forked
    settings = [word for setting in (*TINY, f"DATA.root={tmp_path}/data") for word in ("--set", setting)]
    return ["--steps", "2", "--rounds", "2", "--output", str(tmp_path / "out"), *settings]


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_table_and_chart(has_bfloat16, arguments, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("common.colossal.amp.is_fast", lambda _: has_bfloat16)
    compare.main(arguments)
    with (tmp_path / "out" / "compare.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["mode"] for row in rows] == list(compare.CONFIGS)
    for row in rows if has_bfloat16 else rows[:1]:
        assert float(row["samples_per_s"]) > 0
        assert sum(float(row[phase].rstrip("%")) for phase in PHASES) == pytest.approx(100, abs=10)
        assert row["settings"].startswith("MODEL.image_size=16 ")
    if not has_bfloat16:
        assert {row["memory_gb"] for row in rows[1:]} == {"not run: this CPU has no bfloat16"}
        assert {row["samples_per_s"] for row in rows[1:]} == {""}
    assert "| AMP_TYPE.APEX O1 |" in capfd.readouterr().out
    assert (tmp_path / "out" / "compare.png").stat().st_size > 1000


def test_measurements_are_medians_and_ratios_of_the_same_round():
    phases = {"data": 0.1, "forward": 0.2, "backward": 0.3, "optimizer": 0.4}
    measurements = {
        "fp32": [{"step": step, "memory": 4e9, "batch": 8, **phases} for step in (1.0, 3.0, 100.0)],
        "half": [{"step": step, "memory": 3e9, "batch": 8, **phases} for step in (0.5, 1.0, 200.0)],
    }
    row = compare.summarise("half", measurements)
    assert row["memory_gb"] == "3.00"
    assert (row["iterations_per_s"], row["samples_per_s"]) == ("1.00", "8.0")
    assert (row["x_fp32_speed"], row["x_fp32_memory"]) == ("2.00", "0.75")
    assert [row[phase] for phase in PHASES] == ["10.0%", "20.0%", "30.0%", "40.0%"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "0"], "--steps 0: at least 1"),
        (["--set", "gradient_accumulation=2"], "gradient_accumulation=2: a comparison needs 1"),
    ],
)
def test_bad_arguments_are_refused(arguments, words, message):
    with pytest.raises(UserError, match=message):
        compare.main([*arguments, *words])


def test_settings_take_precedence_over_defaults():
    assert compare.with_defaults(["A=1"], ["A=2", "B=3"]) == ["A=1", "B=3"]
