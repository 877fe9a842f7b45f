import base64
import json
import math
import re
import shutil
from html import unescape

import pytest
from matplotlib.figure import Figure

from common.errors import UserError
from common.tools import report
from common.tools import sweep as sweep_tool

EVIL = "a<script>alert(1)</script>&@charts@"
CPU = {"gpu": None, "cpus": 2, "cpu": "AMD EPYC", "instruction_set": "AVX2"}


def words_of(page: str) -> str:
    """Return the text of the page's body, a cell of a table after the other."""
    return " ".join(unescape(re.sub("<[^>]*>", " ", page.partition("<body>")[2])).split())


def train(step: int, **metrics) -> dict:
    return {"kind": "train", "step": step, "epoch": step / 10, "time": 1000.0 + 60 * step} | metrics


def evaluation(step: int, top1: float, loss: float | None = 1.0) -> dict:
    return train(step, loss=loss, top1=top1, top5=1.0, samples=8) | {
        "kind": "eval",
        "time": 1001.0 + 60 * step,
    }


def write_run(folder, records=(), config=None, **metadata):
    folder.mkdir(parents=True, exist_ok=True)
    starts = [{"step": 0, "started": 940.0}]
    metadata = {
        "config": config or {"A": 1},
        "plan": {"last_step": 4, "gpus": 8},
        "starts": starts,
        **metadata,
    }
    (folder / "config.json").write_text(json.dumps(metadata))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def make(*folders) -> str:
    output = folders[0].parent / "pages" / "report.html"
    report.main([*map(str, folders), "--output", str(output)])
    return output.read_text()


def titles_of(page: str) -> list[str]:
    """Return the titles of the curves, each of which has a picture."""
    return re.findall('<figure><h3>(.*?)</h3><img src="data:image/svg', page)


def drawn_over(page: str) -> set[str]:
    """Return the texts of the x axes in the pictures."""
    pictures = [base64.b64decode(code).decode() for code in re.findall('base64,([^"]+)', page)]
    texts = {text for picture in pictures for text in re.findall(">([^<>]+)</text>", picture)}
    return texts & {*report.AXES.values()}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[list[list[float]]]:
    """The points of each curve that is drawn, a list a picture."""
    pictures = []

    def encode(figure: Figure) -> str:
        (axes,) = figure.axes
        pictures.append([line.get_xydata().tolist() for line in axes.lines])
        return "data:image/svg"

    monkeypatch.setattr(report, "_encode", encode)
    return pictures


def test_summary(tmp_path, monkeypatch, drawn):
    speeds = [0.0, 1000.0, 30.0, 0.0, 1240.0]
    records = [train(step, samples_per_s=speed) for step, speed in enumerate(speeds)]
    records += [
        evaluation(0, 0.9, None),
        evaluation(1, 0.75, 2.0),
        evaluation(2, 0.75, 1.0),
        evaluation(3, 0.75, 3.0),
        evaluation(4, 0.5),
    ]
    # two fields that nobody named: one is no number
    others = {"time": 12400.0, "score": 0.25, "note": "text", "noise_scale": 30.0}
    others["optimizer_noise_scale"] = 40.0
    records.append(train(5, loss=2.3456789, samples_per_s=None) | others)
    config = {"LABEL_SMOOTHING": 0.1, "MIXUP": 0.8, "B": {"c": [1, 2]}}
    starts = [{"started": when} for when in (940.0, 8000.0, 9000.0)]  # the second did nothing
    metadata = {
        "plan": {"last_step": 5, "gpus": 8, "total_batch": 256},
        "hardware": CPU,
        "starts": starts,
        "argv": ["train.py", "a b"],
    }
    run = write_run(tmp_path / "run", records, config, **metadata)
    monkeypatch.chdir(run)
    report.main(["."])
    page = (run / "report.html").read_text()
    for words in (
        "Top-1, last evaluation 50.00% Best evaluation, by BEST top-1 75.00% at step 2 Steps 5 ",
        "Wall time 1:01:41 Images per second, median 30 ",
        "Hardware 2 cores of AMD EPYC, AVX2 Processes 8 Changed since the first start - ",
        "LABEL_SMOOTHING 0.1 MIXUP 0.8 B.c [1, 2] Environment",
        "hardware.cpus 2 ",
    ):
        assert words in words_of(page)
    assert "<pre>python train.py &#39;a b&#39;</pre>" in page
    mixed = "cross-entropy, label smoothing 0.1, mixup 0.8; evaluation: cross-entropy"
    assert titles_of(page) == [
        f"Loss (training: {mixed}) (line: training, dashes with dots: evaluation)",
        "Top-1 accuracy, %",
        "Top-5 accuracy, %",
        "Gradient noise scale, images (dashed: the batch)",
        "Noise scale in the norm of the optimizer, images (dashed: the batch)",
        "Images per second, all GPUs",
        "score",
    ]
    evaluated = [[0.0, math.nan], [1.0, 2.0], [2.0, 1.0], [3.0, 3.0], [4.0, 1.0]]
    assert str(drawn[0]) == str([[[5.0, 2.3456789]], evaluated])  # where nan equals nan
    assert drawn[1] == [[[0, 90], [1, 75], [2, 75], [3, 75], [4, 50]]]
    assert drawn[3] == [[[5, 30]], [[0, 256], [1, 256]]]
    assert drawn[4] == [[[5, 40]], [[0, 256], [1, 256]]]
    assert drawn[-1] == [[[5, 0.25]]]


def test_the_best_evaluation_is_that_of_best(tmp_path):
    records = [evaluation(step, 0.5, loss=3.0 - step) | {"auroc": 0.1} for step in (1, 2)]
    records += [
        evaluation(3, 0.25, loss=9.0) | {"auroc": 0.2},
        evaluation(4, 0.75) | {"auroc": None},
    ]
    for best, said in {
        "loss": "loss 1.0000 at step 2, top-1 50.00%",
        "auroc": "auroc 0.2000 at step 3, top-1 25.00%",
        "macro_f1": "-",  # of a run of an earlier version
    }.items():
        run = write_run(tmp_path / "run", records, {"BEST": best})
        assert f"Best evaluation, by BEST {said} Steps" in words_of(make(run))


def test_the_best_by_a_hooks_score_may_lack_the_metric_of_best(tmp_path):
    best = evaluation(1, 0.5) | {"auroc": None, "score": 2.0}
    other = evaluation(2, 0.75) | {"auroc": 0.9, "score": 1.0}
    page = make(write_run(tmp_path / "run", [best, other], {"BEST": "auroc"}))
    assert "by BEST auroc nan at step 1, top-1 50.00% Steps" in words_of(page)


def test_the_best_evaluation_is_that_of_the_marked_checkpoint(tmp_path):
    """With another BEST or other data the best starts anew: the earlier ones do not count."""
    run = write_run(tmp_path / "run", [evaluation(step, 1 / step) for step in (1, 2, 4)])
    marked = run / "checkpoints/step-00000002"
    marked.mkdir(parents=True)
    (marked / "COMPLETE").touch()
    (run / "checkpoints/best.txt").write_text("step-00000002\n")
    assert "Best evaluation, by BEST top-1 50.00% at step 2 " in words_of(make(run))
    shutil.rmtree(marked)
    assert "Best evaluation, by BEST top-1 100.00% at step 1 " in words_of(make(run))


def test_a_run_that_is_running_or_was_killed_in_the_middle_of_a_line(tmp_path, drawn):
    run = write_run(
        tmp_path / "run", [train(1, loss=2.0), train(2000, loss=None)], plan={"last_step": 4000}
    )
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    said = "Top-1, last evaluation - Best evaluation, by BEST - Steps 2,000 of 4,000 "
    assert said in words_of(make(run))
    assert str(drawn) == "[[[[1.0, 2.0], [2000.0, nan]]]]"
    with pytest.raises(UserError, match="^run has no evaluation yet, so no result: train it for"):
        report.main([str(run), "--csv"])


def test_runs_of_a_sweep_are_compared_and_what_is_no_run_is_skipped(tmp_path, capsys):
    sweep = tmp_path / "sweep"
    runs = {f"B={batch},R={rate}": (batch, rate) for batch in ("512", "64") for rate in ("0", "1")}
    for name, (batch, rate) in runs.items():
        config = {"B": batch, "R": rate, "C": 1}
        write_run(sweep / name, [evaluation(4, int(rate) / 10)], config)
    (tmp_path / "empty").mkdir()
    output = tmp_path / "report.html"
    report.main([str(sweep), str(tmp_path / "empty")])
    said = f"skipped {tmp_path}/empty: no run\n"
    assert capsys.readouterr() == (f"{output}  (4 runs)\n", said)
    said = words_of(output.read_text())
    assert "B=64,R=1 10.00% top-1 10.00% at step 4" in said
    rows = [f"{name} {batch} {rate}" for name, (batch, rate) in runs.items()]
    assert " ".join(["Config keys that differ B R", *rows, "Environment"]) in said
    report.main([str(sweep), str(shutil.copytree(sweep, tmp_path / "twin"))])
    assert f"{sweep}/B=64,R=1 10.00%" in words_of(output.read_text())
    with pytest.raises(UserError, match="empty holds no run: name the folder of"):
        report.main([str(tmp_path / "empty")])


def test_runs_of_different_batches_are_drawn_over_epochs(tmp_path, capsys):
    plans = [{"last_step": 40, "total_batch": batch} for batch in (64, 64, 512)]
    folders = [
        write_run(tmp_path / str(number), [train(10, loss=1.0), train(40, loss=0.5)], plan=plan)
        for number, plan in enumerate(plans)
    ]
    assert drawn_over(make(*folders[:2])) == {"optimizer step"}
    assert drawn_over(make(*folders)) == {"epoch"}
    output = tmp_path / "page.html"
    for axis, title in report.AXES.items():
        report.main([*map(str, folders), "--x", axis, "--output", str(output)])
        assert drawn_over(output.read_text()) == {title}


def test_positions_of_records(tmp_path):
    # stopped at 3,600 s; again from 10,000 s on, without a record, and from 20,000 s on
    starts = [{"started": when} for when in (0.0, 10000.0, 20000.0)]
    records = [
        train(5, loss=1.0) | {"time": 1800},
        train(10, loss=1.0) | {"time": 3600},
        train(20, loss=1.0) | {"time": 21800.0},
    ]
    metadata = {"plan": {"last_step": 20, "total_batch": 32}, "starts": starts}
    run = report.load_run(write_run(tmp_path / "run", records, **metadata), "run")
    assert run.positions("step") == [5, 10, 20]
    assert run.positions("epoch") == [0.5, 1.0, 2.0]
    assert run.positions("images") == [160, 320, 640]
    assert run.positions("time") == [0.5, 1.0, 1.5]


def test_of_a_long_list_the_page_has_the_first_and_whether_they_differ(tmp_path):
    names = [f"n{number:08d}" for number in range(1000)]
    folders = []
    for number in range(2):
        weights = [1.0 for _ in names]
        weights[700] += number
        data = {"class_names": names, "num_classes": 1000}
        folder = tmp_path / str(number)
        folders.append(write_run(folder, [], {"CLASS_WEIGHTS": weights, "A": [1, 2]}, data=data))
    page = words_of(make(*folders))
    assert page.count("n00000") == 5  # those of both runs are the same, and shown once
    assert "n00000004 and 995 more" in page
    shown = re.findall(r"1\.0, 1\.0 and 995 more \(fingerprint (\w+)\)", page)
    assert len(shown) == len(set(shown)) == 2


@pytest.mark.parametrize("file", ["config.json", "metrics.jsonl"])
def test_a_run_that_cannot_be_read_is_skipped(tmp_path, file, capsys):
    sweep = tmp_path / "sweep"
    for name in ("A=1", "A=2", "A=3"):
        write_run(sweep / name, [evaluation(4, 0.5)])
    (sweep / "A=2" / file).write_text("{}\n")
    report.main([str(sweep)])
    said = capsys.readouterr()
    assert said.out.endswith("report.html  (2 runs)\n")
    assert re.fullmatch(rf"skipped {sweep}/A=2/{file}.*: Field required\n", said.err)
    sweep_tool.main(["--output", str(sweep)])
    assert "skipped" in capsys.readouterr().err
    with pytest.raises(UserError, match=f"^{sweep}/A=2/{file}.*: Field required"):
        report.main([str(sweep / "A=2")])


def test_names_are_text(tmp_path):
    run = write_run(tmp_path / "run", [train(1, loss=1.0)], config={EVIL: EVIL}, argv=[EVIL])
    other = write_run(tmp_path / "other", [], {"MIXUP": 0.2}, hardware=CPU | {"gpu": "H100"})
    page = report.render([report.load_run(run, EVIL), report.load_run(other, "A=1")])
    assert "<script>alert" not in page
    said = words_of(page)
    assert f"python '{EVIL}'" in said
    assert "A=1 0 of 4 0:00:00 H100 " in said
    assert f" {EVIL} MIXUP {EVIL} {EVIL} - A=1 - 0.2 " in said
    assert "training: cross-entropy or cross-entropy, mixup 0.2; evaluation: " in titles_of(page)[0]


def test_csv_is_a_row_of_the_results(tmp_path, capsys):
    argv = ["/code/train.py", "--output=/tmp/run", "--init", "/data/weights/"]
    metadata = {
        "name": "=1+1",
        "started": 86400,
        "plan": {"last_step": 10, "gpus": 2, "total_batch": 14},
        "argv": argv,
        "commit": "abc",
        "versions": {"python": "3.11", "timm": "1.0", "wandb": None},
        "hardware": CPU,
    }
    # the best evaluation is not the last
    records = [
        train(5, loss=3.0),
        evaluation(5, 0.875),
        train(10, loss=1.5) | {"noise_scale": 1934.4},
        evaluation(10, 0.75),
    ]
    report.main([str(write_run(tmp_path / "run", records, **metadata)), "--csv"])
    # a name that a spreadsheet would compute is text
    row = """1970-01-02,'=1+1,"2 cores of AMD EPYC, AVX2",2,14,1,10,3.0000,1.5000,1934,0.7500,"""
    assert (
        capsys.readouterr().out
        == f"{row}1.0000,8,11.0,python=3.11 timm=1.0,abc,train.py --output=run --init weights/\n"
    )


def test_a_batch_that_grew_is_drawn_beside_the_noise_scale(drawn, tmp_path):
    plan = {"last_step": 3, "gpus": 1, "total_batch": 32}
    batches = [8, 8, 32]
    records = [
        train(step, loss=1.0, batch_size=batch, noise_scale=10.0 * step)
        for step, batch in enumerate(batches, 1)
    ]
    run = write_run(tmp_path / "run", records, {"BATCH_SIZES": "noise"}, plan=plan)
    page = make(run)
    assert "Images of a step" in titles_of(page)
    # over epochs, as steps have several batches
    assert drawn[1] == [[[0.1, 8], [0.2, 8], [0.3, 32]]]
    assert drawn[2] == [[[0.1, 10], [0.2, 20], [0.3, 30]], drawn[1][0]]
