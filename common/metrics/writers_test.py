import json
import re
import resource
import threading
from pathlib import Path

import pytest
from PIL import Image
from tqdm.std import TqdmDefaultWriteLock

from common.errors import UserError
from common.metrics import writers
from common.metrics.writers import Curves, Guarded, JsonLines, ProgressBar, draw_curves, read_metrics
from common.testing.commands import run_forked

TRAIN = {"kind": "train", "step": 2, "epoch": 0.5, "loss": 2.0, "samples_per_s": 10.0, "skipped": 0}
EVAL = {"kind": "eval", "step": 4, "epoch": 1.0, "loss": 1.5, "top1": 0.25, "top5": 0.5, "samples": 8}


def write_to_a_full_disk(argv: list[str]) -> None:
    """Limit the size of files: the kernel refuses what is beyond, in the middle of a line too."""
    folder, sizes = Path(argv[0]), []
    opened = writers.open_writers(folder, 50, tensorboard=False, trackers=[])
    for step in range(50):
        most = 1000 if 0 < step < 49 else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        for writer in opened:
            writer(TRAIN | {"step": step, "loss": 1 / 3})
        sizes.append((folder / "metrics.jsonl").stat().st_size)
    for writer in opened:
        writer.close()
    whole = [record["step"] for record in read_metrics(folder)] == list(range(50))
    print(sizes[48], whole, (folder / "loss.jpeg").exists())


def write(folder, *records) -> None:
    writer = JsonLines(folder / "metrics.jsonl")
    for record in records:
        writer(record)
    writer.close()


def test_a_value_that_is_not_finite_is_null(tmp_path):
    write(tmp_path, TRAIN | {"loss": float("inf"), "lr": float("nan")})
    assert '"loss": null' in (tmp_path / "metrics.jsonl").read_text()
    (record,) = read_metrics(tmp_path)
    assert (str(record["loss"]), record["lr"]) == ("nan", None)


def test_a_line_that_a_crash_cut_short_is_left_out(tmp_path):
    write(tmp_path, TRAIN, EVAL)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tra')
    assert read_metrics(tmp_path) == [TRAIN, EVAL]


def test_a_broken_line_before_the_last_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(TRAIN)}\n{{\n{json.dumps(EVAL)}\n")
    with pytest.raises(UserError, match="metrics.jsonl line 2"):
        read_metrics(tmp_path)


def test_a_full_disk_neither_stops_training_nor_loses_a_line(tmp_path):
    child = run_forked(write_to_a_full_disk, [tmp_path])
    assert child.stdout == "1000 True True\n", child.stderr
    (warning,) = [line.partition("warning: ")[2] for line in child.stderr.splitlines() if "warning: " in line]
    words = "File too large; its lines are kept in memory until they can be written"
    assert warning == f"{tmp_path}/metrics.jsonl: {words}"


def test_lines_that_are_lost_are_counted(capsys):
    writer = JsonLines(Path("/dev/full"))
    writer(TRAIN)
    writer(EVAL)
    writer.close()
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("warning: /dev/full: No space left on device; its lines are kept in memory")
    assert last == "warning: /dev/full: No space left on device; its last 2 lines are lost"


def test_a_writer_that_fails_is_dropped_with_one_warning(capsys):
    calls = []

    def fail(record):
        calls.append(record)
        raise RuntimeError("several\nlines")

    Guarded("picture", lambda: fail(TRAIN))(EVAL)
    assert calls.pop() == TRAIN
    assert capsys.readouterr().err == "warning: picture: RuntimeError: several lines; training continues without it\n"
    writer = Guarded("tracker", lambda: fail)
    writer(TRAIN)
    writer(EVAL)
    writer.step()
    writer.close()
    assert calls == [TRAIN]
    assert capsys.readouterr().err == "warning: tracker: RuntimeError: several lines; training continues without it\n"


def test_an_interrupt_is_no_failure_of_a_writer():
    def interrupt(record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Guarded("tracker", lambda: interrupt)(TRAIN)


def test_curves_are_redrawn_every_100_s_and_at_the_end(tmp_path, monkeypatch):
    now, drawn = [0.0], []
    monkeypatch.setattr(writers, "draw_curves", lambda _: drawn.append(now[0]))
    monkeypatch.setattr(writers.time, "perf_counter", lambda: now[0])
    curves = Curves(tmp_path)
    for now[0] in (99, 100, 101, 250):
        curves(TRAIN)
        curves(EVAL)
    curves(TRAIN)
    for _ in range(2):
        curves.close()
    assert drawn == [100, 250, 250]


def test_curves_are_pictures_also_with_a_gap(tmp_path):
    write(tmp_path, TRAIN, TRAIN | {"loss": float("inf"), "step": 3}, EVAL)
    draw_curves(tmp_path)
    for name in ("loss.jpeg", "acc.jpeg", "loss.png", "acc.png"):
        with Image.open(tmp_path / name) as picture:
            assert picture.format == name.partition(".")[2].upper()
            assert picture.size == (960, 600)
            assert len(picture.getcolors(2**24)) > 50  # lines, not an empty page


def test_all_metrics_fit_in_a_terminal_of_80_columns(monkeypatch, capsys):
    monkeypatch.setattr(writers.sys.stderr, "isatty", lambda: True)
    progress = ProgressBar(28000)
    progress.bar.dynamic_ncols = lambda file: (80, 24)
    progress.step(loss=2.5)
    progress(TRAIN | {"loss": 2.25})
    assert "loss=2.2500, img/s=10" in str(progress.bar)
    assert "skipped" not in str(progress.bar)
    progress(TRAIN | {"loss": 6.90775, "samples_per_s": 10480.0, "skipped": 12})
    progress(EVAL)
    progress.bar.n, progress.bar.start_t = 14000, progress.bar.start_t - 10 * 3600
    words = r"50% 14000/28000 10:00:0\d left, loss=6.9078, img/s=10,480, skipped=12, top1=0.250"
    assert re.fullmatch(words, str(progress.bar))
    progress.close()


def test_the_bar_needs_no_lock_that_a_killed_process_may_hold() -> None:
    TqdmDefaultWriteLock()  # makes it
    with TqdmDefaultWriteLock.mp_lock:
        thread = threading.Thread(target=lambda: ProgressBar(3).close(), daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()


def test_progress_is_whole_lines_where_stderr_is_no_terminal(capsys) -> None:
    progress = ProgressBar(3)
    progress.step(loss=2.5)
    for _ in range(2):
        progress.step()
    progress(TRAIN)
    progress(EVAL)
    progress.close()
    out, err = capsys.readouterr()
    assert out.startswith("epoch 1: top1 0.2500")
    assert "\r" not in err
    assert err.endswith("\n")
    assert "3/3" in err.splitlines()[-1]
    assert "loss=2.0000, img/s=10, top1=0.250" in err.splitlines()[-1]
