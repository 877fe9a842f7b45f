"""Sweeps over trainings that only write a run's files, and over one that trains."""

import math
import signal
from pathlib import Path

import psutil
import pytest
import torch

from common.errors import PartialError, UserError
from common.testing.commands import forked, run_forked, wait_until
from common.testing.tiny_task import CONFIG
from common.tools import sweep, sweep_grid, sweep_ranking
from common.tools.report import RecordedRun
from common.tools.report_test import evaluation

# Writes a run's files. Rate 7 fails, rate 13 does not start.
TRAINER = """
import json, os, sys, time
from pathlib import Path
words = [word.partition("=")[::2] for word in sys.argv]
rate = float(dict(words)["LEARNING_RATE"])
batch = int(dict(words).get("TOTAL_BATCH_SIZE", 14))
folder = Path(sys.argv[-1])
if (folder / "config.json").exists():
    sys.exit()  # finished
if rate == 13:
    sys.exit(2)
costs = dict(samples_per_s=1e4 * rate, data_wait=0.1, peak_memory_gb=1.5)
costs |= dict(forward_s=0.0123, backward_s=0.0246)
losses = [rate + 1, None if rate == 2 else rate + 2]
records = [dict(costs, kind="train", step=step, loss=loss) for step, loss in enumerate(losses, 1)]
if rate != 7:
    top1 = 0.5 + rate / 100 + batch / 1e4
    records.append(dict(kind="eval", step=4, loss=1.0, top1=top1, top5=1.0, samples=8))
place = dict(gpus=os.environ["CUDA_VISIBLE_DEVICES"], cpus=list(os.sched_getaffinity(0)))
place["processes"] = os.environ.get("WORLD_SIZE", "1")
root = dict(words).get("DATA.root", "a")
place["DATA"] = {"root": root}
saved = dict(config=place, plan={"last_step": 4}, starts=[{"started": time.time()}], argv=sys.argv)
saved["data"] = dict(fingerprint=root, train_samples=14, eval_samples=8)
folder.mkdir(parents=True, exist_ok=True)
(folder / "metrics.jsonl").write_text("".join(json.dumps(record) + chr(10) for record in records))
(folder / "config.json").write_text(json.dumps(saved))
sys.exit("out of luck" if rate == 7 else 0)
"""
# Trains; all steps but the first wait for a file "go", or for a signal.
SLOW_TRAINER = """
import itertools, sys
from pathlib import Path
from common.engine.engine import Engine
from common.errors import run_command
from common.launch.signals import stop_signals
from common.testing.commands import wait_until
from common.testing.tiny_task import train
train_step = Engine.train_step
steps = itertools.count()
go = Path(sys.argv[-1]).parent.with_name("go")
def slow_step(*args, **options):
    if next(steps):
        wait_until(lambda: go.exists() or stop_signals.received)
    return train_step(*args, **options)
Engine.train_step = slow_step
settings = [word for word in sys.argv[:-1] if "=" in word]
root = settings.pop(0).partition("=")[2]
run_command(lambda argv: train(Path(root), Path(argv[-1]), *settings))
"""


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "tiny.py").write_text(CONFIG)
    (tmp_path / "trainer.py").write_text(TRAINER)
    words = "--config={0}/tiny.py --train={0}/trainer.py --output={0}/sweep"
    return words.format(tmp_path).split()


def tables(text: str) -> list[list[str]]:
    """Return the cells of every row that ``text`` has."""
    rows = [line.strip("|").split("|") for line in text.splitlines() if line[:1] == "|"]
    return [list(map(str.strip, row)) for row in rows]


def started(words: list[str]) -> list[RecordedRun]:
    """Return the runs in the order of their starts."""
    return sweep_ranking.load_runs(Path(words[2].partition("=")[2]))


def test_every_combination_is_trained_once(words, tmp_path, capsys):
    sweep.main([*words, "--grid=TOTAL_BATCH_SIZE=70,14", "--grid=LEARNING_RATE=1,2"])
    assert [run.name for run in started(words)] == [
        f"TOTAL_BATCH_SIZE={batch},LEARNING_RATE={rate}" for batch in (70, 14) for rate in (1, 2)
    ]
    out = capsys.readouterr().out
    assert out.startswith("[1/4] TOTAL_BATCH_SIZE=70,LEARNING_RATE=1\n| TOTAL_BATCH_SIZE |")
    header, _, *rows = tables(out.partition("[4/4]")[2])
    assert header == ["TOTAL_BATCH_SIZE", "LEARNING_RATE", "top1", "range", "n", "loss", "steps"]
    assert rows[0] == ["70", "2", "52.70%", "52.70-52.70", "1", "1.000", "4"]
    assert [row[:2] for row in rows[:4]] == [["70", "2"], ["14", "2"], ["70", "1"], ["14", "1"]]
    assert rows[4:7:2] == [
        ["run", "GB", "img/s", "data", "fwd ms", "bwd ms", "d(loss)"],
        ["70, 1", "1.50", "10,000", "10.0 %", "12.3", "24.6", "0.0e+00"],
    ]
    assert [row[-1] for row in rows[7:]] == ["nan", "0.0e+00", "nan"]
    assert max(len(line) for line in out.splitlines() if line.startswith("|")) <= 80
    last = "best: TOTAL_BATCH_SIZE=70, LEARNING_RATE=2; no ranges: repeat it with --grid SEED=1,2,3"
    assert out.splitlines()[-1] == last
    assert (tmp_path / "sweep" / "sweep.png").is_file()

    # joins the others
    sweep.main([*words, "--processes=2", "--grid=TOTAL_BATCH_SIZE=14,28", "--grid=LEARNING_RATE=1"])
    sweep.main([words[2], "--best=LEARNING_RATE"])
    last_run = started(words)[4]
    assert last_run.name == "TOTAL_BATCH_SIZE=28,LEARNING_RATE=1"
    assert last_run.metadata["config"]["processes"] == "2"
    assert len(tables(capsys.readouterr().out)) == 2 * (2 * 2 + 2 * 5)


def test_draws_are_the_same_in_every_command():
    grid = {"RATE": ["log(1e-8,1)"], "DECAY": ["uniform(0.1,0.2)", "3"], "SEED": ["1", "2"]}
    drawn = sweep_grid.combine(grid, 9)
    assert len(drawn) == 18
    assert drawn[:4] == sweep_grid.combine(grid, 2)
    assert [values["SEED"] for values in drawn[:4]] == ["1", "2", "1", "2"]
    rates = [float(values["RATE"]) for values in drawn]
    assert 1e-8 < min(rates) < 1e-5 < 1e-3 < max(rates) < 1
    decays = {float(values["DECAY"]) for values in drawn}
    assert all(0.1 < decay < 0.2 for decay in decays - {3})
    assert len(decays) > 2
    assert len(sweep_grid.combine({"DECAY": ["1", "2"]}, 99)) == 2


def finished_run(*top1: float, last_step: int = 4, loss: float = 1.5, best="top1", **values: float):
    name = ",".join(f"{key}={value}" for key, value in values.items())
    metadata = {"plan": {"last_step": last_step}, "config": {"BEST": best}}
    return RecordedRun(name, metadata, [evaluation(4, share, loss=loss) for share in top1])


def test_seeds_are_averaged_and_the_best_is_named(tmp_path, monkeypatch):
    low = finished_run(0.5, RATE=0.1, SEED=1)
    same = finished_run(0.65, RATE=0.1, SEED=2)
    high = finished_run(0.2, 0.65, 0.3, RATE=0.8)  # PATIENCE ends below the best
    unfinished = finished_run(0.9, last_step=8, RATE=0.3, EMA=1)
    runs = [low, same, high, unfinished]
    assert [list(entry.row.values()) for entry in sweep_ranking.rank_combinations(runs, {})] == [
        [0.8, "-", "65.00%", "65.00-65.00", 1, "1.500", "4"],
        [0.1, "-", "57.50%", "50.00-65.00", 2, "1.500", "4"],
        [0.3, 1, "-", "-", 0, "-", "4 of 8"],
    ]
    diverged = [finished_run(0.9, loss=math.nan, RATE=rate) for rate in (1, 2)]
    by_loss = [finished_run(0.9, loss=rate, best="loss", RATE=rate) for rate in (2.0, 1.0)]
    # as in checkpoints/best, the loss decides between equal ones
    ties = [finished_run(0.9, loss=rate, RATE=rate) for rate in (2.0, 1.0)]
    for part, verdict in (
        (runs, "best: RATE=0.8, EMA=-; ranges overlap"),
        ([low, low, high], "best: RATE=0.8; ranges do not overlap"),
        ([same, high], "best: RATE=0.1; no ranges: repeat it with --grid SEED=1,2,3"),
        ([high, unfinished], ""),
        ([*diverged, low], "best: RATE=0.1; the loss of the others is not finite"),
        ([*diverged, unfinished], ""),
        (by_loss, "best: RATE=1.0; no ranges: repeat it with --grid SEED=1,2,3"),
        (ties, "best: RATE=1.0; no ranges: repeat it with --grid SEED=1,2,3"),
    ):
        ranked = sweep_ranking.rank_combinations(part, {})
        assert sweep_ranking.name_best(ranked) == verdict
    # chosen by a hook's score, where BEST is null
    scored = finished_run(0.5, best="auroc")
    scored.metrics[0].update(auroc=None, score=1.0)
    assert sweep_ranking.rank_combinations([scored], {})[0].row["auroc"] == "nan%"
    ranked = sweep_ranking.rank_combinations(by_loss, {})
    assert list(ranked[0].row) == ["RATE", "loss", "range", "n", "steps"]
    drawn = []
    monkeypatch.setattr(
        sweep_ranking, "save_figure", lambda figure, path: drawn.extend(figure.axes)
    )

    assert not sweep_ranking.draw([unfinished], tmp_path)
    assert sweep_ranking.draw([*runs, low], tmp_path)
    assert sweep_ranking.draw(runs[:3], tmp_path, best="RATE")  # the only key
    assert sweep_ranking.draw(
        [finished_run(0.5, RATE=rate) for rate in (0.0003295, 0.0004042)], tmp_path
    )
    by_rate, by_run, by_draw = drawn
    assert by_draw.lines[0].get_linestyle() == "None"
    assert by_rate.lines[0].get_ydata() == pytest.approx([55, 65])
    assert (by_rate.get_xscale(), by_rate.get_xlabel()) == ("log", "RATE")
    assert by_run.lines[0].get_ydata() == pytest.approx([65])
    assert (by_run.get_xscale(), by_run.get_xlabel()) == ("linear", "run")
    bars = by_rate.collections[0].get_segments()
    assert [bar[:, 1].tolist() for bar in bars] == [[50, 65], [65, 65]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    {
        "--grid LEARNING_RATE=1 --grid LERNING_RATE=2": (
            "LERNING_RATE: unknown key; did you mean 'LEARN"
        ),
        "--grid LEARNING_RATE=1 --grid gradient_accumulation=3,4": (
            "TOTAL_BATCH_SIZE=14 is not divisible"
        ),
        "--grid LEARNING_RATE": "write it as KEY=VALUE,VALUE",
        "--grid LEARNING_RATE=1 --grid LEARNING_RATE=2": "a key is named twice",
        "--grid MODEL=dict(a=[(1,2),(3,4)])": "unknown key MODEL.a;",
        "--grid INIT=a/b,a_b": "two combinations would share the folder INIT=a_b",
        "--grid LEARNING_RATE=1 --best SED --grid SEED=1": "--best SED: .*did you mean 'SEED'",
        "--set LEARNING_RATE=1 --config ": "need --config, or --grid CONFIG=A,B",
        "--random 2 --config ": "need --config, or --grid CONFIG=A,B",
        "--random 2": "--random 2 needs --grid",
        "--random 2 --grid LEARNING_RATE=log(0,1)": "=log.0,1.: write log.LOW,HIGH. of positive",
        "--random 2 --grid LEARNING_RATE=uniform(1)": "=uniform.1.: write log.*uniform.LOW,HIGH.",
        "--grid LEARNING_RATE=log(1e-4,1e-2)": "write log.LOW,HIGH.* with --random N",
        "--random 2 --grid LEARNING_RATE=loguniform(1,2)": "=loguniform.1,2.: write log.LOW,HIGH.",
    }.items(),
)
def test_mistakes_are_refused_before_the_first_run(words, arguments, message):
    with pytest.raises(UserError, match=message):
        sweep.main([*words, *arguments.split(" ")])
    assert not (Path(words[2].partition("=")[2])).exists()


def test_a_recipe_is_trained_by_its_tasks_script_and_another_config_by_train(tmp_path):
    for recipe, task in {
        "vit-b16": "imagenet_dali",
        "vit_lite_2d": "cifar10_benchmark",
        "config_AMP_torch": "caltech101_amp",
    }.items():
        found = sweep_grid.find_script(recipe, None)
        assert found[0].parent.name == task
    own = tmp_path / "own.py"
    own.touch()
    assert sweep_grid.find_script(str(own), found[0]) == found
    with pytest.raises(
        UserError, match="own.py is no recipe: add --train SCRIPT, which is .*caltech101_amp/train"
    ):
        sweep_grid.find_script(str(own), None)


def test_runs_at_a_time_have_gpus_and_cores_of_their_own(words, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5,6,7")
    monkeypatch.chdir(tmp_path)
    parallel = ["--set=TENSOR_PARALLEL_SIZE=2", "--set=TENSOR_PARALLEL_MODE=1d", "--jobs=2"]
    sweep.main([*words[1:], *parallel, "--grid=CONFIG=tiny.py", "--grid=LEARNING_RATE=1,2"])
    first, second = [run.metadata["config"] for run in started(words)]
    assert {first["gpus"], second["gpus"]} == {"2,3", "6,7"}
    assert not {*first["cpus"]} & {*second["cpus"]}
    assert first["processes"] == "2"
    with pytest.raises(UserError, match="--jobs 2: 5 GPUs and .* enough for --jobs 1"):
        sweep.main([*words, *parallel, "--processes=4", "--grid=LEARNING_RATE=3,4"])


def test_a_run_that_fails_does_not_end_the_sweep(words, tmp_path, capsys):
    with pytest.raises(
        PartialError,
        match="^failed: LEARNING_RATE=7; rerun the command to resume what had started$",
    ):
        sweep.main([*words, "--jobs=2", "--grid=LEARNING_RATE=7,1,3"])
    out, err = capsys.readouterr()
    assert err == f"{tmp_path}/sweep/LEARNING_RATE=7.log:\nout of luck\n"
    ranked = [row[-1] for row in tables(out)[-8:-5]]
    assert ranked == ["4", "4", "2 of 4 (failed, exit status 1)"]


def test_combinations_that_cannot_start_are_named_and_the_others_trained(words, capsys):
    """One is refused by its values, one by its training script."""
    with pytest.raises(PartialError) as ended:
        sweep.main([*words, "--grid=LEARNING_RATE=13,1", "--grid=gradient_accumulation=3,1"])
    assert [run.name for run in started(words)] == ["LEARNING_RATE=1,gradient_accumulation=1"]
    refused = [f"LEARNING_RATE={rate},gradient_accumulation=3" for rate in (13, 1)]
    assert str(ended.value) == (
        f"failed: {', '.join(refused)}, LEARNING_RATE=13,gradient_accumulation=1; rerun the "
        "command to resume what had started"
    )
    err = " ".join(capsys.readouterr().err.split())
    assert all(f"{name} cannot start: TOTAL_BATCH_SIZE=14 is not div" in err for name in refused)
    with pytest.raises(PartialError, match="^failed: LEARNING_RATE=13; rerun"):
        sweep.main([*words[:2], f"{words[2]}/other", "--grid=LEARNING_RATE=13"])


def test_a_value_that_is_written_twice_is_trained_once(words, capsys):
    sweep.main([*words, "--grid=LEARNING_RATE=1e-3,0.001"])
    said = "LEARNING_RATE=0.001: the same values as LEARNING_RATE=1e-3, trained once\n"
    assert said in capsys.readouterr().out
    sweep.main([*words, "--grid=SEED=1", "--grid=LEARNING_RATE=1e-3"])
    # in another command too, and in another order
    sweep.main([*words, "--grid=LEARNING_RATE=0.001,0.0010", "--grid=SEED=1"])
    assert [run.name for run in started(words)] == [
        "LEARNING_RATE=1e-3",
        "SEED=1,LEARNING_RATE=1e-3",
    ]


def test_runs_of_other_data_and_other_settings_are_told_apart(words, tmp_path, capsys):
    sweep.main([*words, "--set=DATA.root=a", "--grid=LEARNING_RATE=1,2"])
    settings = ["--set=DATA.root=b", "--set=NUM_EPOCHS=9"]
    sweep.main([*words, *settings, "--grid=LEARNING_RATE=3,4"])
    capsys.readouterr()
    sweep.main([words[2]])
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "warning: the commands of these runs differ in DATA.root, NUM_EPOCHS too"
    assert [line for line in out if line.startswith("data set ")] == [
        "data set 1 of 2: DATA.root=a, 14 training and 8 evaluation images",
        "data set 2 of 2: DATA.root=b, 14 training and 8 evaluation images",
    ]
    best = [line.partition(";")[0] for line in out if line.startswith("best: ")]
    assert best == ["best: LEARNING_RATE=2", "best: LEARNING_RATE=4"]
    assert (tmp_path / "sweep" / "sweep.png").is_file()
    assert (tmp_path / "sweep" / "sweep-2.png").is_file()
    # asked for
    words[2] += "/compared"
    sweep.main([*words, "--grid=DATA.root=a,b", "--grid=LEARNING_RATE=1"])
    assert capsys.readouterr().out.splitlines()[-1].startswith("best: DATA.root=")


def test_tables_fit_in_80_columns_and_values_can_be_copied(words, capsys):
    betas = "OPTIMIZER.betas=(0.9,0.95),(0.8, 0.9)"
    sweep.main([*words, f"--grid={betas}", "--grid=LEARNING_RATE=1", "--grid=WEIGHT_DECAY=0.05"])
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines() if line[:1] in "|123") <= 80
    listed = "1: OPTIMIZER.betas=(0.9,0.95), LEARNING_RATE=1, WEIGHT_DECAY=0.05"
    assert out.splitlines().count(listed) == 2  # after each run
    header = ["no.", "top1", "range", "n", "loss", "steps"]
    first, *_, costs = tables(out.partition("[2/2]")[2])
    assert (first, costs[0]) == (header, "(0.8, 0.9), 1, 0.05")


def test_a_killed_run_is_marked_and_a_stopped_sweep_resumes(words, data, tmp_path):
    (tmp_path / "trainer.py").write_text(SLOW_TRAINER)
    settings = [f"--set=DATA.root={data}", "--set=LOG.every=1", "--set=EVAL_EVERY=100"]
    settings += ["--grid=LEARNING_RATE=log(1e-4,1e-3)", "--random=2", "--jobs=2"]
    argv = [*words, *settings]

    def count_training() -> int:
        return sum(path.stat().st_size > 0 for path in tmp_path.glob("sweep/*/metrics.jsonl"))

    with forked(sweep.main, argv) as (process, out, err):
        wait_until(lambda: count_training() == 2, seconds=120)
        killed = psutil.Process(process.pid).children()[0]
        killed.kill()
        wait_until(lambda: not psutil.pid_exists(killed.pid))  # the sweep has its exit status
        process.terminate()
        process.join(60)
        assert process.exitcode == 128 + signal.SIGTERM
        assert "(failed, exit status -9) |" in out.read_text()
        assert err.read_text().endswith("the sweep was stopped; rerun the command to resume\n")
    (tmp_path / "go").touch()
    ended = run_forked(sweep.main, argv)
    assert [row[3] for row in tables(ended.stdout)[-6:-4]] == ["1", "1"]  # n
    resumed = [run.metadata["starts"][-1]["step"] > 0 for run in started(words)]
    assert sorted(resumed) == [False, True]
