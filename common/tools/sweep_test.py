"""Sweeps over a training script that only writes a run's files; one at the end over a task's own."""

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

from common.errors import UserError
from common.testing.commands import run_forked
from common.testing.photographs import write_colours
from common.testing.tiny_task import CONFIG
from common.tools import sweep, sweep_results
from common.tools.report import FinishedRun
from common.tools.sweep_results import collect_points, draw

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, pathlib, signal, sys, time

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
config = {"LEARNING_RATE": rate, "TOTAL_BATCH_SIZE": batch}
start = {"started": time.time()}
about = {"name": "tiny", "argv": sys.argv, "config": config, "plan": {"last_step": 20}, "starts": [start]}
(output / "config.json").write_text(json.dumps(about))
while (output.parent / "hold").exists():
    time.sleep(0.01)
if rate == 7:
    sys.exit(1)
cost = dict(samples_per_s=1e4 * rate, data_wait=0.1, forward_s=0.0123, backward_s=0.0246, peak_memory_gb=1.5)
lines = [dict(kind="train", step=step, epoch=1, loss=rate + step, **cost) for step in (1, 2, 3)]
top1 = 0.5 + rate / 100 + batch / 1e4
for n in (1, 2):
    lines += [dict(kind="eval", step=10 * n, epoch=n, loss=2.0 / n, top1=top1 * n / 2, top5=1.0, samples=8)]
(output / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
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


def tables(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def test_every_combination_is_trained_once(words: Sequence[str], tmp_path: Path, capsys) -> None:
    folder = tmp_path / "sweep"
    grid = ["--grid", "TOTAL_BATCH_SIZE=70,14", "--grid", "LEARNING_RATE=1,2"]
    sweep.main([*words, *grid])
    names = [f"TOTAL_BATCH_SIZE={batch},LEARNING_RATE={rate}" for batch in (70, 14) for rate in (1, 2)]
    assert trained(folder) == names
    out = capsys.readouterr().out
    header, _, *rows = tables(out)
    assert header == ["TOTAL_BATCH_SIZE", "LEARNING_RATE", "top1", "best", "loss", "steps"]
    assert rows[0] == ["14", "1.0", "51.14%", "51.14%", "1.000", "20"]
    assert [row[:2] for row in rows[:4]] == [["14", "1.0"], ["14", "2.0"], ["70", "1.0"], ["70", "2.0"]]
    assert rows[4:7:2] == [
        ["run", "GB", "img/s", "data", "fwd ms", "bwd ms", "d(loss)"],
        ["14, 1.0", "1.50", "10,000", "10.0 %", "12.3", "24.6", "0.0e+00"],
    ]
    assert [row[-1] for row in rows[7:]] == ["1.0e+00", "0.0e+00", "1.0e+00"]
    assert max(len(line) for line in out.splitlines() if line.startswith("|")) <= 80
    with Image.open(folder / "sweep.png") as picture:
        assert len(picture.convert("RGB").getcolors(2**24)) > 50  # lines, not an empty page

    (folder / names[2] / "metrics.jsonl").unlink()  # as one that was stopped
    sweep.main([*words, *grid])
    assert trained(folder) == [names[2]]
    sweep.main([*words, "--grid", "TOTAL_BATCH_SIZE=28", "--grid", "LEARNING_RATE=1"])  # joins the others
    assert trained(folder) == ["TOTAL_BATCH_SIZE=28,LEARNING_RATE=1"]
    capsys.readouterr()
    sweep.main(["--output", str(folder), "--best", "LEARNING_RATE"])
    assert trained(folder) == []
    assert len(tables(capsys.readouterr().out)) == 2 * (2 + 5)
    other = folder / "TOTAL_BATCH_SIZE=28,LEARNING_RATE=1"
    sweep.main([*words, "--grid", "TOTAL_BATCH_SIZE=28", "--grid", "LEARNING_RATE=1", "--set", "NUM_EPOCHS=3"])
    assert trained(folder) == [other.name]  # the training script says whether it may


def finished_run(batch: int, rate: float, seed: int, top1: float, last_step: int = 20, **config) -> FinishedRun:
    config = {"TOTAL_BATCH_SIZE": batch, "LEARNING_RATE": rate, "SEED": seed} | config
    record = {"kind": "eval", "step": 20, "epoch": 1, "loss": 1.0, "top1": top1}
    name = ",".join(f"{key}={value}" for key, value in config.items())
    return FinishedRun(name, {"name": "tiny", "config": config, "plan": {"last_step": last_step}}, [record])


def test_points_are_means_over_seeds_and_the_best_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [finished_run(14, 0.1, 1, 0.5), finished_run(14, 0.1, 2, 0.7)]  # 60 % on average
    runs += [finished_run(14, 0.2, 1, 0.65), finished_run(14, 0.3, 1, 0.9, last_step=40)]  # the last is unfinished
    assert collect_points(runs, None) == {
        (("LEARNING_RATE", 0.1),): {14: pytest.approx([50, 70])},
        (("LEARNING_RATE", 0.2),): {14: pytest.approx([65])},
    }
    assert collect_points(runs, "LEARNING_RATE") == {(): {14: pytest.approx([65])}}
    drawn = []
    monkeypatch.setattr(sweep_results, "save_figure", lambda figure, path: drawn.append(figure))
    assert draw(runs, tmp_path / "sweep.png")
    (axes,) = drawn.pop().axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["LEARNING_RATE=0.1", "LEARNING_RATE=0.2"]
    assert [line.get_ydata() for line in axes.lines if line.get_label()[0] != "_"] == pytest.approx([60, 65])
    names = ["None", "mode=APEX, opt_level=O1"]
    monkeypatch.setattr(sweep_results, "keys_of", lambda runs: ["fp16"])
    runs = [finished_run(14, 0.1, 1, 0.5, fp16=None)]
    runs += [finished_run(14, 0.1, 1, 0.7, fp16={"mode": "AMP_TYPE.APEX", "opt_level": "O1"})]
    assert draw(runs, tmp_path / "sweep.png")
    (axes,) = drawn.pop().axes
    assert [str(place) for place in axes.lines[0].get_xdata()] == names
    assert axes.lines[0].get_linestyle() == "None"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--grid", "LEARNING_RATE=1", "--grid", "LERNING_RATE=2"], "LERNING_RATE: unknown key; did you mean 'LEARN"),
        (["--grid", "LEARNING_RATE=1,fast"], "LEARNING_RATE='fast'"),
        (["--grid", "LEARNING_RATE=1", "--grid", "gradient_accumulation=1,3"], "TOTAL_BATCH_SIZE=14 is not divisible"),
        (["--grid", "LEARNING_RATE=1,1"], "two combinations would share the folder LEARNING_RATE=1"),
        (["--grid", "LEARNING_RATE"], "write it as KEY=VALUE,VALUE"),
        (["--grid", "LEARNING_RATE=1", "--grid", "LEARNING_RATE=2"], "a key is named twice"),
        (["--grid", "INIT=a/b,a_b"], "two combinations would share the folder INIT=a_b"),
        (["--grid", "LEARNING_RATE=1", "--train", "none.py"], "--train none.py: no such file"),
        (["--grid", "LEARNING_RATE=1", "--best", "SED", "--grid", "SEED=1"], "--best SED: .*did you mean 'SEED'"),
        (["--grid", "LEARNING_RATE=1", "--config", ""], "need --config, or --grid CONFIG=A,B"),
    ],
)
def test_mistakes_are_refused_before_the_first_run(words: list[str], tmp_path: Path, arguments, message: str) -> None:
    with pytest.raises(UserError, match=message):
        sweep.main([*words, *arguments])
    assert not (tmp_path / "sweep").exists()


def test_a_run_that_fails_is_shown_and_does_not_end_the_others(words: Sequence[str], tmp_path: Path) -> None:
    ended = run_forked(sweep.main, [*words, "--grid", "LEARNING_RATE=7,1"])
    assert ended.code == 1
    assert trained(tmp_path / "sweep") == ["LEARNING_RATE=7", "LEARNING_RATE=1"]
    assert ended.stderr == "failed: LEARNING_RATE=7; rerun the command to resume\n"
    assert [row[-1] for row in tables(ended.stdout)[2:4]] == ["20", "0 of 20 (failed, exit status 1)"]


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
def test_parallel_modes_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    """Recipes in miniature by their own script, each with the processes of its mode."""
    for split in ("train", "test"):
        write_colours(tmp_path / "images" / split, 70, 16, 16)
    settings = ["NUM_EPOCHS=1", "WARMUP_EPOCHS=0", "TOTAL_BATCH_SIZE=32", "LOG.every=1", "LOG.tensorboard=False"]
    settings += ["DATA.autoaugment=None", f"DATA.root={tmp_path}/images", "MODEL.num_classes=None"]
    small = ["image_size=16", "patch_size=8", "width=16", "depth=1", "heads=4", "dropout=0.0"]
    settings += [f"MODEL.{part}" for part in small]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = [word for setting in settings for word in ("--set", setting)]
    sweep.main(["--grid", "CONFIG=vit_lite_vanilla,vit_lite_1d", "--output", str(tmp_path / "out"), *words])
    rows = tables(capsys.readouterr().out)
    assert [(row[0], row[-1]) for row in rows[2:4]] == [("vit_lite_vanilla", "2"), ("vit_lite_1d", "2")]
    assert [row[0] for row in rows[6:]] == ["vit_lite_vanilla", "vit_lite_1d"]
    assert float(rows[6][-1]) == 0 <= float(rows[7][-1]) < 1e-5
    assert all(float(cell) > 0 for cell in rows[7][4:6])
