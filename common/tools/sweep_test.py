"""Sweeps over a training that only writes a run's files."""

import math
import os
import signal
import threading
from itertools import pairwise
from pathlib import Path

import pytest

from common.errors import UserError
from common.testing.tiny_task import CONFIG
from common.tools import sweep
from common.tools.report import RecordedRun
from common.tools.report_test import evaluation, train, write_run


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs that were trained. Rate 7 fails, rate 13 does not start, rate 5 is stopped."""
    names = []

    def run_child(command: list[str]) -> tuple[int, int]:
        folder = Path(command[-1])
        settings = dict(word.split("=") for flag, word in pairwise(command) if flag == "--set")
        rate = float(settings["LEARNING_RATE"])
        batch = int(settings.get("TOTAL_BATCH_SIZE", 14))
        assert command[5] == "--nproc_per_node=2"
        if rate == 13:
            return 2, 0
        names.append(folder.name)
        cost = dict(samples_per_s=1e4 * rate, data_wait=0.1, peak_memory_gb=1.5)
        cost |= dict(forward_s=0.0123, backward_s=0.0246)
        losses = [rate + 1, None if rate == 2 else rate + 2]
        records = [train(step, loss=loss, **cost) for step, loss in enumerate(losses, 1)]
        if rate != 7:
            records.append(evaluation(4, 0.5 + rate / 100 + batch / 1e4))
        write_run(folder, records, argv=command[1:], starts=[{"started": len(names)}])
        return {7: (1, 0), 5: (143, signal.SIGTERM)}.get(rate, (0, 0))

    monkeypatch.setattr(sweep, "run_child", run_child)
    return names


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "tiny.py").write_text(CONFIG)
    words = "--config={0}/tiny.py --train={0}/tiny.py --output={0}/sweep --processes=2"
    return words.format(tmp_path).split()


def tables(text: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line[:1] == "|"
    ]


def test_every_combination_is_trained_once(words, trained, tmp_path, capsys):
    folder = tmp_path / "sweep"
    grid = ["--grid=TOTAL_BATCH_SIZE=70,14", "--grid=LEARNING_RATE=1,2"]
    sweep.main([*words, *grid])
    names = [
        f"TOTAL_BATCH_SIZE={batch},LEARNING_RATE={rate}" for batch in (70, 14) for rate in (1, 2)
    ]
    assert trained == names
    out = capsys.readouterr().out
    header, _, *rows = tables(out)
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
    assert (folder / "sweep.png").is_file()

    sweep.main([*words, "--grid=TOTAL_BATCH_SIZE=28", "--grid=LEARNING_RATE=1"])  # joins the others
    sweep.main(["--output", str(folder), "--best=LEARNING_RATE"])
    assert trained[4:] == ["TOTAL_BATCH_SIZE=28,LEARNING_RATE=1"]
    assert len(tables(capsys.readouterr().out)) == 2 * (2 * 2 + 2 * 5)


def finished_run(top1: float, last_step: int = 4, loss: float = 1.5, **values: float):
    name = ",".join(f"{key}={value}" for key, value in values.items())
    about = {"plan": {"last_step": last_step}}
    return RecordedRun(name, about, [evaluation(4, top1, loss=loss)])


def test_seeds_are_averaged_and_the_best_is_named(tmp_path, monkeypatch):
    low = finished_run(0.5, RATE=0.1, SEED=1)
    same = finished_run(0.65, RATE=0.1, SEED=2)
    high = finished_run(0.65, RATE=0.8)
    unfinished = finished_run(0.9, last_step=8, RATE=0.3, EMA=1)
    runs = [low, same, high, unfinished]
    rows, _ = sweep.rank_combinations(runs, {})
    assert [list(row.values()) for row in rows] == [
        [0.8, "-", "65.00%", "65.00-65.00", 1, "1.500", "4"],
        [0.1, "-", "57.50%", "50.00-65.00", 2, "1.500", "4"],
        [0.3, 1, "-", "-", 0, "-", "4 of 8"],
    ]
    diverged = [finished_run(0.9, loss=math.nan, RATE=rate) for rate in (1, 2)]
    for part, verdict in (
        (runs, "best: RATE=0.8, EMA=-; ranges overlap"),
        ([low, low, high], "best: RATE=0.8; ranges do not overlap"),
        ([same, high], "best: RATE=0.1; no ranges: repeat it with --grid SEED=1,2,3"),
        ([high, unfinished], ""),
        ([*diverged, low], "best: RATE=0.1; the loss of the others is not finite"),
        ([*diverged, unfinished], ""),
    ):
        assert sweep.rank_combinations(part, {})[1] == verdict

    drawn = []
    monkeypatch.setattr(sweep, "save_figure", lambda figure, path: drawn.extend(figure.axes))
    assert not sweep.draw([unfinished], tmp_path / "sweep.png")
    assert sweep.draw([*runs, low], tmp_path / "sweep.png")
    assert sweep.draw(runs[:3], tmp_path / "sweep.png", best="RATE")  # the only key
    for axes, tops, scale, label in zip(
        drawn, ([55, 65], [65]), ("log", "linear"), ("RATE", "run"), strict=True
    ):
        assert axes.lines[0].get_ydata() == pytest.approx(tops)
        assert (axes.get_xscale(), axes.get_xlabel()) == (scale, label)
    bars = drawn[0].collections[0].get_segments()
    assert [bar[:, 1].tolist() for bar in bars] == [[50, 65], [65, 65]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    {
        "--grid LEARNING_RATE=1 --grid LERNING_RATE=2": (
            "LERNING_RATE: unknown key; did you mean 'LEARN"
        ),
        "--grid LEARNING_RATE=1 --grid gradient_accumulation=1,3": (
            "TOTAL_BATCH_SIZE=14 is not divisible"
        ),
        "--grid LEARNING_RATE": "write it as KEY=VALUE,VALUE",
        "--grid LEARNING_RATE=1 --grid LEARNING_RATE=2": "a key is named twice",
        "--grid MODEL=dict(a=[(1,2),(3,4)])": "unknown key MODEL.a;",
        "--grid INIT=a/b,a_b": "two combinations would share the folder INIT=a_b",
        "--grid LEARNING_RATE=1 --best SED --grid SEED=1": "--best SED: .*did you mean 'SEED'",
        "--set LEARNING_RATE=1 --config ": "need --config, or --grid CONFIG=A,B",
        "--grid LEARNING_RATE=13,1": "LEARNING_RATE=13 did not start .exit status 2",
    }.items(),
)
def test_mistakes_are_refused_before_the_first_run(words, trained, arguments, message):
    with pytest.raises(UserError, match=message):
        sweep.main([*words, *arguments.split(" ")])
    assert trained == []


def test_a_recipe_is_trained_by_its_tasks_script_and_an_original_config_by_train(
    words, trained, tmp_path, monkeypatch
):
    found = [
        sweep.find_script(recipe, None) for recipe in ("vit-b16", "vit_lite_2d", "config_AMP_torch")
    ]
    assert [path.parent.name for path, _ in found] == [
        "imagenet_dali",
        "cifar10_benchmark",
        "caltech101_amp",
    ]
    (tmp_path / "own.py").write_text("BATCH_SIZE = 128\nDROP_RATE = 0.1\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match="own.py is no recipe: add --train SCRIPT, which is .*caltech101_amp/train"
    ):
        sweep.find_script("own.py", None)
    sweep.main(
        [
            *words[1:],
            f"--train={found[2][0]}",
            "--grid=CONFIG=own.py",
            "--grid=LEARNING_RATE=1",
        ]
    )
    sweep.main([*words, "--set=LEARNING_RATE=2"])
    assert trained == ["CONFIG=own.py,LEARNING_RATE=1", "run"]


def test_a_run_that_fails_does_not_end_the_sweep_and_a_stop_signal_does(words, trained, capsys):
    parallel = ["--set=TENSOR_PARALLEL_SIZE=2", "--set=TENSOR_PARALLEL_MODE=1d"]
    for grid, code, said in (
        ("7,1", 1, "failed: LEARNING_RATE=7"),
        ("5,2", 143, "SIGTERM: LEARNING_RATE=5 was stopped"),
    ):
        with pytest.raises(SystemExit, match=f"^{code}$"):
            sweep.main([*words[:-1], *parallel, f"--grid=LEARNING_RATE={grid}"])
        out, err = capsys.readouterr()
        assert err == f"{said}; rerun the command to resume\n"
        assert code == 143 or [row[-1] for row in tables(out)[2:4]] == [
            "4",
            "2 of 4 (failed, exit status 1)",
        ]
    assert trained == [f"LEARNING_RATE={rate}" for rate in (7, 1, 5)]


def test_a_stop_signal_reaches_the_run():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup does so
    timer = threading.Timer(
        0.5, lambda: [os.kill(os.getpid(), number) for number in (signal.SIGHUP, signal.SIGTERM)]
    )
    timer.start()
    assert sweep.run_child(["sleep", "60"]) == (-signal.SIGTERM, signal.SIGTERM)
    timer.join()
    signal.signal(signal.SIGHUP, before)
