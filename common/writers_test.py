import json

from PIL import Image

from common.writers import JsonLines, ProgressBar, draw_curves, read_metrics

TRAIN = {"kind": "train", "step": 2, "epoch": 0.5, "loss": 2.0, "samples_per_s": 10.0, "skipped": 0}
EVAL = {"kind": "eval", "step": 4, "epoch": 1.0, "loss": 1.5, "top1": 0.25, "top5": 0.5, "samples": 8}


def write(folder, *records) -> None:
    writer = JsonLines(folder / "metrics.jsonl")
    for record in records:
        writer(record)
    writer.close()


def test_a_line_is_strict_json_also_where_a_figure_is_not_finite(tmp_path):
    write(tmp_path, TRAIN | {"loss": float("nan")})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=None)["loss"] is None


def test_a_line_that_a_crash_cut_short_is_left_out(tmp_path):
    write(tmp_path, TRAIN, EVAL)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tra')
    assert read_metrics(tmp_path) == [TRAIN, EVAL]


def test_curves_are_pictures_also_with_a_gap(tmp_path):
    write(tmp_path, TRAIN, TRAIN | {"loss": float("inf"), "step": 3}, EVAL)
    draw_curves(tmp_path)
    for name in ("loss.jpeg", "acc.jpeg"):
        with Image.open(tmp_path / name) as picture:
            assert picture.format == "JPEG"
            assert len(picture.getcolors(2**24)) > 50  # lines, not an empty page


def test_the_progress_bar_shows_updates_that_were_skipped():
    progress = ProgressBar(4)
    progress(TRAIN)
    assert "skipped" not in str(progress.bar)
    progress(TRAIN | {"skipped": 3})
    assert "skipped=3" in str(progress.bar)
    progress.close()
