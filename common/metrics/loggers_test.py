"""Loggers; ``bash scripts/test.sh -m trackers`` runs the test that needs the real package."""

import json
import re
import resource
from pathlib import Path
from unittest.mock import Mock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.errors import UserError
from common.metrics import curves, loggers
from common.metrics.loggers import Guarded, JsonLines, ProgressBar, check_trackers
from common.metrics.metrics_file import read_metrics
from common.testing.commands import run_forked, run_python

TRAIN = {"kind": "train", "step": 2, "epoch": 0.5, "loss": 2.0, "samples_per_s": 10.0, "skipped": 0}
EVAL = dict(kind="eval", step=4, epoch=1.0, loss=1.5, top1=0.25, top5=0.5, samples=8)
WRITE_WANDB = """
import sys
from pathlib import Path
from common.metrics.loggers import open_loggers

folder, start = Path(sys.argv[1]), int(sys.argv[2])
loggers = open_loggers(folder, start, 4, tensorboard=False, trackers=["wandb"])
for step in range(start, start + 2):
    record = {"kind": "train", "step": step, "epoch": 0.1, "loss": step / 2, "skipped": 0}
    for logger in loggers.values():
        logger(record | {"samples_per_s": 1.0})
for logger in loggers.values():
    logger.close()
"""


def write_to_a_full_disk(argv: list[str]) -> None:
    """Limit the size of files: the kernel refuses what is beyond, in the middle of a line too."""
    folder = Path(argv[0])
    file = JsonLines(folder)
    for step in range(50):
        most = 1000 if 0 < step < 49 else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        file(TRAIN | {"step": step, "loss": 1 / 3})
        if step == 48:
            print(file.path.stat().st_size)
    file.close()
    print([line["step"] for line in read_metrics(folder)] == list(range(50)))


def test_a_full_disk_neither_stops_training_nor_loses_a_line(tmp_path):
    child = run_forked(write_to_a_full_disk, [tmp_path])
    assert child.stdout == "1000\nTrue\n"
    words = "File too large; its lines are kept in memory until they can be written"
    assert child.stderr == f"warning: {tmp_path}/metrics.jsonl: {words}\n"


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setattr(loggers, "find_spec", lambda module: None)
    with pytest.raises(UserError, match="wandb'.: wandb is not installed; pip install wandb"):
        check_trackers(["wandb"])


def test_a_logger_that_fails_is_dropped_with_one_warning(capsys):
    fail = Mock(side_effect=RuntimeError("several\nlines"))
    logger = Guarded("tracker", lambda: fail)
    logger(TRAIN)
    logger(EVAL)
    logger.step()
    logger.close()
    fail.assert_called_once_with(TRAIN)
    warning = "warning: tracker: RuntimeError: several lines; training continues without it\n"
    assert capsys.readouterr().err == warning


def test_curves_have_a_gap_where_the_loss_is_not_finite_and_are_not_drawn_often(
    tmp_path, monkeypatch
):
    save = Mock()
    monkeypatch.setattr(curves, "save_figure", save)
    (tmp_path / "config.json").write_text(
        '{"config": {"BCE_THRESHOLD": 0.0, "CUTMIX": 1.0, "CLASS_WEIGHTS": "balanced"}}'
    )
    file = JsonLines(tmp_path)
    logger = curves.Curves(tmp_path)
    for record in (TRAIN, TRAIN | {"loss": float("inf"), "step": 3}, EVAL):
        file(record)
    file.close()
    cases = [
        (99, EVAL, 0),
        (0, TRAIN, 0),
        (0, EVAL, 2),
        (99, EVAL, 2),
    ]
    for seconds, record, drawings in cases:
        monkeypatch.setattr(curves, "DRAWING_EVERY", seconds)
        logger(record)
        assert save.call_count == drawings
    logger.close()
    drawn = {}
    for (figure, path), _ in save.call_args_list[2:]:
        lines = figure.axes[0].lines
        figure.draw_without_rendering()
        legend = figure.legends[0].get_window_extent()
        axes = figure.axes[0].get_window_extent()
        assert legend.x1 < figure.bbox.x1
        assert legend.y1 < axes.y0
        assert axes.width > 0.8 * figure.bbox.width
        drawn[path.name] = [(line.get_label(), line.get_xydata().tolist()) for line in lines]
    assert str(drawn) == (
        "{'loss.jpeg': [('training: binary cross-entropy, cutmix 1.0, class weights balanced', "
        "[[2.0, 2.0], [3.0, nan]]), "
        "('evaluation: cross-entropy', [[4.0, 1.5]])], "
        "'acc.jpeg': [('top-1', [[4.0, 25.0]]), ('top-5', [[4.0, 50.0]])]}"
    )


def test_all_metrics_fit_in_a_terminal_of_80_columns(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loggers.sys.stderr, "isatty", lambda: True)
    progress = ProgressBar(tmp_path, 7000, 28000, best="auroc")
    progress.bar.dynamic_ncols = lambda file: (80, 24)
    progress(TRAIN | {"loss": 6.90775, "samples_per_s": 10480.0, "skipped": 12})
    progress(EVAL)
    progress(EVAL | {"auroc": 0.75})
    line = "epoch 1: top1 0.2500, top5 0.5000, loss 1.5000"
    assert capsys.readouterr().out.split("\n")[:2] == [
        f"{line} on 8 images",
        f"{line}, auroc 0.7500 on 8 images",
    ]
    progress.bar.n = 14000
    progress.bar.start_t = progress.bar.start_t - 10 * 3600
    words = r"50% 14000/28000 20:00:0\d left, loss=6.9078, img/s=10,480, skipped=12, top1=0.250"
    assert re.fullmatch(words, str(progress.bar))
    progress.close()


def test_tensorboard_reads_every_known_metric_once(tmp_path, capsys):
    on_cpu = TRAIN | {"mfu": None}
    # The last is after the checkpoint of step 2.
    interrupted = [on_cpu, EVAL | {"step": 2}, TRAIN | {"step": 3}]
    for start, records in ((0, interrupted), (2, [EVAL])):
        opened = loggers.open_loggers(tmp_path, start, 4, tensorboard=True, trackers=[])
        for logger in opened.values():
            for record in records:
                logger(record)
            logger.close()
    assert "warning" not in capsys.readouterr().err
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    tags = {"train/loss", "train/samples_per_s", "train/skipped", "eval/loss", "eval/top1"}
    assert {*events.Tags()["scalars"]} == tags | {"eval/top5"}
    shown = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert shown == [(2, 2.0)]
    assert [event.step for event in events.Scalars("eval/top1")] == [2, 4]


@pytest.mark.trackers
def test_wandb_continues_under_the_same_id(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"config": {"MODEL": {"depth": 2}}}))
    for start in (1, 3):
        assert "warning" not in run_python(WRITE_WANDB, tmp_path, start, check=True).stderr
    first, second = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert first.name == second.name  # it holds the id
    assert b"train/loss" in first.read_bytes()
