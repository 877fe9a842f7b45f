"""Sweeps over a training script that only writes a run's files; one at the end over a task's own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from common.errors import UserError
from common.testing.commands import run_forked
from common.testing.photographs import write_colours
from common.testing.tiny_task import CONFIG
from common.tools import report, sweep, sweep_results
from common.tools.report import FinishedRun
from common.tools.sweep_results import chosen_points, draw

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, os, pathlib, signal, sys, time

words = sys.argv[1:]
output = pathlib.Path(words[words.index("--output") + 1])
settings = dict(word.split("=", 1) for flag, word in zip(words, words[1:]) if flag == "--set")
rate, batch = float(settings["LEARNING_RATE"]), int(settings.get("TOTAL_BATCH_SIZE", 14))
if rate == 13:
    sys.exit(2)
output.mkdir(parents=True, exist_ok=True)
log = open(output.parent / "log.txt", "a")
print(output.name, file=log, flush=True)

def stop(number, _):
    print("stopped by", number, file=log, flush=True)
    sys.exit(143)

signal.signal(signal.SIGTERM, stop)
config = {"LEARNING_RATE": rate, "TOTAL_BATCH_SIZE": batch, "SEED": int(settings.get("SEED", 1))}
about = {"argv": sys.argv, "config": config, "plan": {"last_step": 20}}
(output / "config.json").write_text(json.dumps(about))
while (output.parent / "hold").exists():
    time.sleep(0.01)
if rate == 7:
    sys.exit(1)
top1 = 0.5 + rate / 100 + batch / 1e4 + config["SEED"] / 1e3
evaluations = [dict(step=10 * n, epoch=n, loss=2.0 / n, top1=top1 * n / 2) for n in (1, 2)]
records = [dict(kind="eval", top5=1.0, samples=8) | evaluation for evaluation in evaluations]
(output / "metrics.jsonl").write_text("".join(json.dumps(record) + "\\n" for record in records))
"""


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "tiny.py").write_text(CONFIG)
    return [f"--config={tmp_path}/tiny.py", f"--train={tmp_path}/train.py", f"--output={tmp_path}/sweep"]


def trained(folder: Path) -> list[str]:
    """Return what the training script has logged since the last call."""
    log = folder / "log.txt"
    lines = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return lines


def table(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def test_every_combination_is_trained_once(words: Sequence[str], tmp_path: Path, capsys) -> None:
    folder = tmp_path / "sweep"
    grid = ["--grid", "TOTAL_BATCH_SIZE=14,70", "--grid", "LEARNING_RATE=1,2"]
    sweep.main([*words, *grid])
    names = [f"TOTAL_BATCH_SIZE={batch},LEARNING_RATE={rate}" for batch in (14, 70) for rate in (1, 2)]
    assert trained(folder) == names
    header, _, *rows = table(capsys.readouterr().out)
    assert header == ["TOTAL_BATCH_SIZE", "LEARNING_RATE", "top1", "best", "loss", "steps"]
    assert rows[0] == ["14", "1.0", "51.24%", "51.24%", "1.000", "20"]
    assert [row[:2] for row in rows] == [["14", "1.0"], ["14", "2.0"], ["70", "1.0"], ["70", "2.0"]]
    with Image.open(folder / "sweep.png") as picture:
        assert len(picture.convert("RGB").getcolors(2**24)) > 50  # lines, not an empty page

    (folder / names[2] / "metrics.jsonl").unlink()  # as one that was stopped
    sweep.main([*words, *grid])
    assert trained(folder) == [names[2]]
    sweep.main([*words, "--grid", "TOTAL_BATCH_SIZE=28", "--grid", "LEARNING_RATE=1"])  # joins the others
    assert trained(folder) == ["TOTAL_BATCH_SIZE=28,LEARNING_RATE=1"]
    capsys.readouterr()
    with pytest.raises(UserError, match="--best LERNING_RATE: none of the .*did you mean 'LEARNING_RATE'"):
        sweep.main([*words, *grid, "--output", str(tmp_path / "new"), "--best", "LERNING_RATE"])
    assert not (tmp_path / "new").exists()
    sweep.main(["--output", str(folder), "--best", "LEARNING_RATE"])
    assert trained(folder) == []
    assert len(table(capsys.readouterr().out)) == 2 + 5

    report.main([str(folder)])
    page = (folder / "report.html").read_text()
    assert all(name in page for name in names)


def finished_run(batch: int, rate: float, seed: int, top1: float, last_step: int = 20) -> FinishedRun:
    config = {"TOTAL_BATCH_SIZE": batch, "LEARNING_RATE": rate, "SEED": seed}
    name = ",".join(f"{key}={value}" for key, value in config.items())
    record = {"kind": "eval", "step": 20, "epoch": 1, "loss": 1.0, "top1": top1}
    return FinishedRun(name, {"config": config, "plan": {"last_step": last_step}}, [record])


def legend_of(axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_points_are_means_over_seeds_and_the_best_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [finished_run(14, 0.1, 1, 0.5), finished_run(14, 0.1, 2, 0.7)]  # 60 % on average
    runs += [finished_run(14, 0.2, 1, 0.65), finished_run(14, 0.3, 1, 0.9, last_step=40)]  # the last is unfinished
    assert chosen_points(runs, None) == {
        (14, (("LEARNING_RATE", 0.1),)): runs[:2],
        (14, (("LEARNING_RATE", 0.2),)): runs[2:3],
    }
    assert chosen_points(runs, "LEARNING_RATE") == {(14, ()): runs[2:3]}
    drawn = []
    monkeypatch.setattr(sweep_results, "save_figure", lambda figure, path: drawn.append(figure))
    assert draw(runs, tmp_path / "sweep.png", "LEARNING_RATE")
    left, right = drawn.pop().axes
    assert left.lines[0].get_ydata() == pytest.approx([65])
    assert [line.get_ydata() for line in right.lines if len(line.get_ydata())] == [pytest.approx([65])]
    runs[-1].about["config"]["TOTAL_BATCH_SIZE"] = 28
    assert draw(runs, tmp_path / "sweep.png")
    left, right = drawn[0].axes
    assert legend_of(left) == ["LEARNING_RATE=0.1", "LEARNING_RATE=0.2"]
    assert len(left.containers) == 1  # a bar where seeds differ
    assert legend_of(right) == ["TOTAL_BATCH_SIZE=14", "TOTAL_BATCH_SIZE=28"]
    colors = [tuple(line.get_color()) for line in right.lines[:4]]
    assert colors[0] == colors[1] == colors[2] != colors[3]
    assert all(tick == int(tick) for tick in right.get_xticks())
    with pytest.raises(UserError, match="--best LERNING_RATE: none of the keys .*did you mean 'LEARNING_RATE'"):
        draw(runs, tmp_path / "sweep.png", "LERNING_RATE")


def test_values_that_are_no_numbers_are_places_without_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs = []
    for top1, fp16 in ((0.5, None), (0.7, {"mode": "AMP_TYPE.APEX", "opt_level": "O1"})):
        run = replace(finished_run(14, 0.1, 1, top1), name=f"fp16={fp16}")
        run.about["config"]["fp16"] = fp16
        runs.append(run)
    drawn = []
    monkeypatch.setattr(sweep_results, "save_figure", lambda figure, path: drawn.append(figure))
    assert draw(runs, tmp_path / "sweep.png")
    left, right = drawn[0].axes
    names = ["None", "mode=APEX, opt_level=O1"]
    assert [str(place) for place in left.lines[0].get_xdata()] == names
    assert left.lines[0].get_linestyle() == "None"
    assert legend_of(right) == [f"fp16={name}" for name in names]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--grid", "LEARNING_RATE=1", "--grid", "LERNING_RATE=2"], "LERNING_RATE: unknown key; did you mean 'LEARN"),
        (["--grid", "LEARNING_RATE=1,fast"], "LEARNING_RATE='fast'"),
        (["--grid", "LEARNING_RATE=1", "--grid", "gradient_accumulation=1,3"], "TOTAL_BATCH_SIZE=14 is not divisible"),
        (["--grid", "LEARNING_RATE=1,1"], "write it as KEY=VALUE,VALUE with values that differ"),
        (["--grid", "LEARNING_RATE"], "write it as KEY=VALUE,VALUE"),
        (["--grid", "LEARNING_RATE=1", "--set", "LEARNING_RATE=2"], "LEARNING_RATE: named twice"),
        (["--grid", "INIT=a/b,a_b"], "two combinations would share the folder INIT=a_b"),
        (["--grid", "LEARNING_RATE=1", "--processes", "0"], "--processes 0: choose 1 or more"),
        (["--grid", "LEARNING_RATE=1", "--train", "none.py"], "--train none.py: no such file"),
    ],
)
def test_mistakes_are_refused_before_the_first_run(words: list[str], tmp_path: Path, arguments, message: str) -> None:
    with pytest.raises(UserError, match=message):
        sweep.main([*words, *arguments])
    assert not (tmp_path / "sweep").exists()


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "read_sweep", lambda folder: [])
    monkeypatch.setattr(sweep, "tabulate", lambda runs, failed: [{"run": "a"}])
    monkeypatch.setattr(sweep, "draw", lambda runs, path, best: path.open("w"))
    with pytest.raises(UserError, match=r"sweep.png: No such file or directory; free space"):
        sweep.report(tmp_path / "gone", None, {})


def test_a_finished_run_of_other_settings_is_not_taken_for_this_one(words: Sequence[str], tmp_path: Path) -> None:
    sweep.main([*words, "--grid", "LEARNING_RATE=1"])
    with pytest.raises(UserError, match=r"LEARNING_RATE=1 holds a run of other settings \(NUM_EPOCHS=3\)"):
        sweep.main([*words, "--grid", "LEARNING_RATE=1", "--set", "NUM_EPOCHS=3"])


def test_a_run_that_fails_is_shown_and_does_not_end_the_others(words: Sequence[str], tmp_path: Path) -> None:
    ended = run_forked(sweep.main, [*words, "--grid", "LEARNING_RATE=7,1"])
    assert ended.code == 1
    assert trained(tmp_path / "sweep") == ["LEARNING_RATE=7", "LEARNING_RATE=1"]
    assert ended.stderr == "failed: LEARNING_RATE=7; rerun the command to resume\n"
    assert [row[-1] for row in table(ended.stdout)[2:]] == ["20", "0 of 20 (failed, exit status 1)"]
    assert "0 of 20 |" in run_forked(sweep.main, ["--output", tmp_path / "sweep"]).stdout


def test_a_run_that_does_not_start_ends_the_sweep(words: Sequence[str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="LEARNING_RATE=13 did not start .exit status 2"):
        sweep.main([*words, "--grid", "LEARNING_RATE=13,1"])
    assert trained(tmp_path / "sweep") == []


@pytest.mark.slow
def test_a_stop_signal_reaches_the_run_and_ends_the_sweep(words: Sequence[str], tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    folder.mkdir()
    (folder / "hold").touch()
    command = [sys.executable, str(ROOT / "scripts" / "sweep.py"), *words, "--grid", "LEARNING_RATE=1,2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        while not (folder / "LEARNING_RATE=1" / "config.json").exists():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate()
    assert process.returncode == 143
    assert "SIGTERM: LEARNING_RATE=1 was stopped; rerun the command to resume" in error
    assert trained(folder) == ["LEARNING_RATE=1", f"stopped by {signal.SIGTERM.value}"]


def test_under_nohup_the_run_ignores_a_closed_terminal() -> None:
    program = "import signal; raise SystemExit(7 if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else 1)"
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert sweep.run_child([sys.executable, "-c", program]) == (7, 0)
    finally:
        signal.signal(signal.SIGHUP, previous)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("[!_]*.py")), ids=lambda path: path.stem)
def test_every_recipe_has_a_script(path: Path) -> None:
    script = sweep.find_script(path.stem)
    assert script.is_file()
    data_set = "quickstart.sh" if path.stem == "quickstart" else script.parent.name.partition("_")[0]
    assert data_set in path.read_text().split('"""')[1].lower()


def test_a_config_of_ones_own_needs_a_script() -> None:
    with pytest.raises(UserError, match="mine.py is no recipe.* --train SCRIPT, .* imagenet_dali/train_dali.py, "):
        sweep.find_script("mine.py")


@pytest.mark.slow
def test_trains_a_task(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe in miniature, by its own script."""
    for split in ("train", "test"):
        write_colours(tmp_path / "images" / split, 70, 16, 16)
    small = ["image_size=16", "patch_size=8", "width=16", "depth=1", "heads=2"]
    settings = [
        "NUM_EPOCHS=1",
        "WARMUP_EPOCHS=0",
        "TOTAL_BATCH_SIZE=35",
        "DATA.autoaugment=None",
        "MODEL.num_classes=None",
    ]
    settings += ["LOG.tensorboard=False", f"DATA.root={tmp_path}/images", *(f"MODEL.{part}" for part in small)]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["--config", "vit_lite_vanilla", "--output", str(tmp_path / "out"), "--grid", "LEARNING_RATE=2e-3"]
    sweep.main([*words, *(word for setting in settings for word in ("--set", setting))])
    rows = table(capsys.readouterr().out)[2:]
    assert [(row[0], row[-1]) for row in rows] == [("0.002", "2")]
    about = json.loads((tmp_path / "out" / "LEARNING_RATE=2e-3" / "config.json").read_text())
    assert about["config"]["LEARNING_RATE"] == 2e-3
    assert os.path.basename(about["argv"][0]) == "train.py"
