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
CPU = {
    "gpu": None,
    "cpus": 2,
    "cpu": "AMD EPYC",
    "instruction_set": "AVX2",
}


def words_of(page: str) -> str:
    """Return the text of the page's body, a cell of a table after the other."""
    _, _, body = page.partition("<body>")
    text = unescape(re.sub("<[^>]*>", " ", body))
    return " ".join(text.split())


def train(step: int, **metrics) -> dict:
    record = {
        "kind": "train",
        "step": step,
        "epoch": step / 10,
        "time": 1000.0 + 60 * step,
    }
    return record | metrics


def evaluation(step: int, top1: float, loss: float | None = 1.0, **metrics) -> dict:
    record = {
        "kind": "eval",
        "step": step,
        "epoch": step / 10,
        "time": 1001.0 + 60 * step,
        "loss": loss,
        "top1": top1,
        "top5": 1.0,
        "samples": 8,
    }
    return record | metrics


def write_run(folder, records=(), config=None, **metadata):
    folder.mkdir(parents=True, exist_ok=True)
    starts = [{"step": 0, "started": 940.0}]
    metadata = {
        "config": config or {"A": 1},
        "plan": {"last_step": 4, "gpus": 8},
        "starts": starts,
        **metadata,
    }
    lines = [json.dumps(record) + "\n" for record in records]
    (folder / "config.json").write_text(json.dumps(metadata))
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def starts_at(*times: float) -> list[dict]:
    return [{"started": time} for time in times]


def make(*folders) -> str:
    output = folders[0].parent / "pages" / "report.html"
    report.main([*map(str, folders), "--output", str(output)])
    return output.read_text()


def titles_of(page: str) -> list[str]:
    """Return the titles of the curves, each of which has a picture."""
    return re.findall('<figure><h3>(.*?)</h3><img src="data:image/svg', page)


def drawn_over(page: str) -> set[str]:
    """Return the texts of the x axes in the pictures."""
    texts = set()
    for code in re.findall('base64,([^"]+)', page):
        picture = base64.b64decode(code).decode()
        texts.update(re.findall(">([^<>]+)</text>", picture))
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
    last = train(
        5,
        time=12400.0,
        loss=2.3456789,
        samples_per_s=None,
        noise_scale=30.0,
        optimizer_noise_scale=40.0,
        # two fields that nobody named: one is no number
        score=0.25,
        note="text",
    )
    config = {
        "LABEL_SMOOTHING": 0.1,
        "MIXUP": 0.8,
        "B": {"c": [1, 2]},
    }
    run = write_run(
        tmp_path / "run",
        [*records, last],
        config,
        plan={"last_step": 5, "gpus": 8, "total_batch": 256},
        hardware=CPU,
        starts=starts_at(940.0, 8000.0, 9000.0),  # the second did nothing
        argv=["train.py", "a b"],
    )
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
    trained = [[5.0, 2.3456789]]
    evaluated = [[0.0, math.nan], [1.0, 2.0], [2.0, 1.0], [3.0, 3.0], [4.0, 1.0]]
    the_batch = [[0, 256], [1, 256]]
    assert str(drawn[0]) == str([trained, evaluated])  # where nan equals nan
    assert drawn[1] == [[[0, 90], [1, 75], [2, 75], [3, 75], [4, 50]]]
    assert drawn[3] == [[[5, 30]], the_batch]
    assert drawn[4] == [[[5, 40]], the_batch]
    assert drawn[-1] == [[[5, 0.25]]]


@pytest.mark.parametrize(
    ("best", "said"),
    [
        ("loss", "loss 1.0000 at step 2, top-1 50.00%"),
        ("auroc", "auroc 0.2000 at step 3, top-1 25.00%"),
        ("macro_f1", "-"),  # of a run of an earlier version
    ],
)
def test_the_best_evaluation_is_that_of_best(best, said, tmp_path):
    records = [
        evaluation(1, 0.5, loss=2.0, auroc=0.1),
        evaluation(2, 0.5, loss=1.0, auroc=0.1),
        evaluation(3, 0.25, loss=9.0, auroc=0.2),
        evaluation(4, 0.75, auroc=None),
    ]
    run = write_run(tmp_path / "run", records, {"BEST": best})
    page = make(run)
    assert f"Best evaluation, by BEST {said} Steps" in words_of(page)


def test_the_best_by_a_hooks_score_may_lack_the_metric_of_best(tmp_path):
    records = [
        evaluation(1, 0.5, auroc=None, score=2.0),
        evaluation(2, 0.75, auroc=0.9, score=1.0),
    ]
    run = write_run(tmp_path / "run", records, {"BEST": "auroc"})
    page = make(run)
    assert "by BEST auroc nan at step 1, top-1 50.00% Steps" in words_of(page)


def test_the_best_evaluation_is_that_of_the_marked_checkpoint(tmp_path):
    """With another BEST or other data the best starts anew: the earlier ones do not count."""
    records = [
        evaluation(1, 1.0),
        evaluation(2, 0.5),
        evaluation(4, 0.25),
    ]
    run = write_run(tmp_path / "run", records)
    marked = run / "checkpoints/step-00000002"
    marked.mkdir(parents=True)
    (marked / "COMPLETE").touch()
    (run / "checkpoints/best.txt").write_text("step-00000002\n")
    page = make(run)
    assert "Best evaluation, by BEST top-1 50.00% at step 2 " in words_of(page)
    shutil.rmtree(marked)
    page = make(run)
    assert "Best evaluation, by BEST top-1 100.00% at step 1 " in words_of(page)


def test_a_run_that_is_running_or_was_killed_in_the_middle_of_a_line(tmp_path, drawn):
    run = write_run(
        tmp_path / "run",
        [train(1, loss=2.0), train(2000, loss=None)],
        plan={"last_step": 4000},
    )
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    page = make(run)
    said = "Top-1, last evaluation - Best evaluation, by BEST - Steps 2,000 of 4,000 "
    assert said in words_of(page)
    assert str(drawn) == "[[[[1.0, 2.0], [2000.0, nan]]]]"
    with pytest.raises(UserError, match="^run has no evaluation yet, so no result: train it for"):
        report.main([str(run), "--csv"])


def test_runs_of_a_sweep_are_compared_and_what_is_no_run_is_skipped(tmp_path, capsys):
    sweep = tmp_path / "sweep"
    for batch in ("512", "64"):
        for rate, top1 in (("0", 0.0), ("1", 0.1)):
            config = {"B": batch, "R": rate, "C": 1}
            write_run(sweep / f"B={batch},R={rate}", [evaluation(4, top1)], config)
    empty = tmp_path / "empty"
    empty.mkdir()
    output = tmp_path / "report.html"
    report.main([str(sweep), str(empty)])
    printed = capsys.readouterr()
    assert printed.out == f"{output}  (4 runs)\n"
    assert printed.err == f"skipped {empty}: no run\n"
    said = words_of(output.read_text())
    assert "B=64,R=1 10.00% top-1 10.00% at step 4" in said
    table = (
        "Config keys that differ B R "
        "B=512,R=0 512 0 "
        "B=512,R=1 512 1 "
        "B=64,R=0 64 0 "
        "B=64,R=1 64 1 "
        "Environment"
    )
    assert table in said

    # runs of one name are told apart by their folders
    twin = shutil.copytree(sweep, tmp_path / "twin")
    report.main([str(sweep), str(twin)])
    said = words_of(output.read_text())
    assert f"{sweep}/B=64,R=1 10.00%" in said

    with pytest.raises(UserError, match="empty holds no run: name the folder of"):
        report.main([str(empty)])


def test_runs_of_different_batches_are_drawn_over_epochs(tmp_path, capsys):
    records = [train(10, loss=1.0), train(40, loss=0.5)]

    def write(name: str, total_batch: int):
        plan = {"last_step": 40, "total_batch": total_batch}
        return write_run(tmp_path / name, records, plan=plan)

    same = [write("0", 64), write("1", 64)]
    folders = [*same, write("2", 512)]
    assert drawn_over(make(*same)) == {"optimizer step"}
    assert drawn_over(make(*folders)) == {"epoch"}
    output = tmp_path / "page.html"
    for axis, title in report.AXES.items():
        report.main([*map(str, folders), "--x", axis, "--output", str(output)])
        assert drawn_over(output.read_text()) == {title}


def test_positions_of_records(tmp_path):
    records = [
        train(5, loss=1.0, time=1800),
        train(10, loss=1.0, time=3600),
        train(20, loss=1.0, time=21800.0),
    ]
    folder = write_run(
        tmp_path / "run",
        records,
        plan={"last_step": 20, "total_batch": 32},
        # stopped at 3,600 s; again from 10,000 s on, without a record, and from 20,000 s on
        starts=starts_at(0.0, 10000.0, 20000.0),
    )
    run = report.load_run(folder, "run")
    assert run.positions("step") == [5, 10, 20]
    assert run.positions("epoch") == [0.5, 1.0, 2.0]
    assert run.positions("images") == [160, 320, 640]
    assert run.positions("time") == [0.5, 1.0, 1.5]


def test_of_a_long_list_the_page_has_the_first_and_whether_they_differ(tmp_path):
    names = [f"n{number:08d}" for number in range(1000)]
    folders = []
    data = {"class_names": names, "num_classes": 1000}
    for number in range(2):
        weights = [1.0 for _ in names]
        weights[700] += number
        config = {"CLASS_WEIGHTS": weights, "A": [1, 2]}
        folder = write_run(tmp_path / str(number), [], config, data=data)
        folders.append(folder)
    page = words_of(make(*folders))
    assert page.count("n00000") == 5  # those of both runs are the same, and shown once
    assert "n00000004 and 995 more" in page
    shown = re.findall(r"1\.0, 1\.0 and 995 more \(fingerprint (\w+)\)", page)
    assert len(shown) == 2
    assert shown[0] != shown[1]


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
    evil = write_run(
        tmp_path / "run",
        [train(1, loss=1.0)],
        config={EVIL: EVIL},
        argv=[EVIL],
    )
    other = write_run(
        tmp_path / "other",
        config={"MIXUP": 0.2},
        hardware=CPU | {"gpu": "H100"},
    )
    runs = [report.load_run(evil, EVIL), report.load_run(other, "A=1")]
    page = report.render(runs)
    assert "<script>alert" not in page
    said = words_of(page)
    assert f"python '{EVIL}'" in said
    assert "A=1 0 of 4 0:00:00 H100 " in said
    assert f" {EVIL} MIXUP {EVIL} {EVIL} - A=1 - 0.2 " in said
    title = titles_of(page)[0]
    assert "training: cross-entropy or cross-entropy, mixup 0.2; evaluation: " in title


def test_csv_is_a_row_of_the_results(tmp_path, capsys):
    # the best evaluation is not the last
    records = [
        train(5, loss=3.0),
        evaluation(5, 0.875),
        train(10, loss=1.5, noise_scale=1934.4),
        evaluation(10, 0.75),
    ]
    run = write_run(
        tmp_path / "run",
        records,
        name="=1+1",
        started=86400,
        plan={"last_step": 10, "gpus": 2, "total_batch": 14},
        argv=["/code/train.py", "--output=/tmp/run", "--init", "/data/weights/"],
        commit="abc",
        versions={"python": "3.11", "timm": "1.0", "wandb": None},
        hardware=CPU,
    )
    report.main([str(run), "--csv"])
    cells = [
        "1970-01-02",
        "'=1+1",  # a name that a spreadsheet would compute is text
        '"2 cores of AMD EPYC, AVX2"',
        "2",
        "14",
        "1",
        "10",
        "3.0000",
        "1.5000",
        "1934",
        "0.7500",
        "1.0000",
        "8",
        "11.0",
        "python=3.11 timm=1.0",
        "abc",
        "train.py --output=run --init weights/",
    ]
    assert capsys.readouterr().out == ",".join(cells) + "\n"


def test_a_batch_that_grew_is_drawn_beside_the_noise_scale(drawn, tmp_path):
    plan = {"last_step": 3, "gpus": 1, "total_batch": 32}
    records = [
        train(1, loss=1.0, batch_size=8, noise_scale=10.0),
        train(2, loss=1.0, batch_size=8, noise_scale=20.0),
        train(3, loss=1.0, batch_size=32, noise_scale=30.0),
    ]
    run = write_run(tmp_path / "run", records, {"BATCH_SIZES": "noise"}, plan=plan)
    page = make(run)
    assert "Images of a step" in titles_of(page)
    # over epochs, as steps have several batches
    batches = [[0.1, 8], [0.2, 8], [0.3, 32]]
    noise = [[0.1, 10], [0.2, 20], [0.3, 30]]
    assert drawn[1] == [batches]
    assert drawn[2] == [noise, batches]
