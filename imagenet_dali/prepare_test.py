"""The preparation command from images to a data set: its content, its refusals, and a kill in the middle."""

import errno
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import tfrecord
from PIL import Image

from common.errors import UserError
from common.testing.commands import has_ended, read_folder, run_forked, wait_until
from imagenet_dali.dataset import open_split
from imagenet_dali.prepare import main, prepare
from imagenet_dali.testing import BAD_IMAGES, encode, gradient, jpeg, write_bad_images, write_images
from imagenet_dali.writer import Options

PROJECT = Path(__file__).parent.parent


def test_another_tool_reads_every_image_once(prepared):
    source, seen = prepared.parent / "images", []
    kinds = dict.fromkeys(("image/encoded", "image/filename", "image/format", "image/class/text"), "byte")
    kinds |= dict.fromkeys(("image/class/label", "image/height", "image/width"), "int")
    for name, count in (("train", 240), ("validation", 60)):
        split = open_split(prepared, name)
        records = (each for shard in split.shards for each in tfrecord.tfrecord_loader(str(shard), None, kinds))
        for index, record in enumerate(records):
            image, filename, kind, text = (bytes(record[key]) for key in list(kinds)[:4])
            label, *size = (int(record[key][0]) for key in list(kinds)[4:])
            assert (image, label) == split.read(index)
            path = source / filename.decode()
            assert (kind, text.decode(), path.parent.name) == (b"JPEG", split.class_names[label], f"class_{label}")
            assert path.read_bytes() == image
            row = split.records[index]
            assert size == [row["height"], row["width"]] == list(Image.open(io.BytesIO(image)).size)[::-1]
            seen.append(path)
        assert len(split) == index + 1 == count
    assert sorted(seen) == sorted(source.rglob("*.jpg"))
    assert sorted(os.listdir(prepared)) == ["labels.txt", "manifest.json", "records", "train", "validation"]


def test_options_decide_the_content_and_workers_do_not(tmp_path):
    source = write_images(tmp_path / "images", 10)
    prepare(source, tmp_path / "one", Options(shards=3))
    prepare(source, tmp_path / "two", Options(shards=3), workers=2)
    assert read_folder(tmp_path / "one") == read_folder(tmp_path / "two")
    prepare(source, tmp_path / "small", Options(short_side=16))
    rows = open_split(tmp_path / "small", "train").records
    assert np.minimum(rows["height"], rows["width"]).tolist() == [16] * 16
    made = json.loads((tmp_path / "small" / "manifest.json").read_text())["made"]
    assert (made["short_side"], made["resampling"], made["quality"]) == (16, "lanczos", 95)


def start(source: Path, dest: Path, **options: object) -> subprocess.Popen:
    command = [sys.executable, "-m", "imagenet_dali.prepare", source, dest, "--workers", "2", "--shards", "40"]
    return subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.DEVNULL, **options)


def test_killed_and_restarted_equals_never_stopped(tmp_path):
    source, dest = tmp_path / "images", tmp_path / "data"
    for number in range(200):
        path = source / f"class_{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(gradient(300, 300, number), "PNG"))
    process = start(source, dest)
    wait_until(lambda: len(list(dest.glob(".partial/train/*.json"))) >= 3)
    workers = [child.pid for child in psutil.Process(process.pid).children()]
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: all(map(has_ended, workers)))
    done = {path.name: path.stat().st_mtime_ns for path in dest.glob(".partial/train/*.json")}
    assert 3 <= len(done) < 40
    assert not (dest / "manifest.json").exists()
    with pytest.raises(UserError, match="rerun the command to finish it"):
        open_split(dest, "train")
    shards = {name: (dest / "train" / name.removesuffix(".json")).stat().st_mtime_ns for name in done}
    assert start(source, dest).wait() == 0
    assert {name: (dest / "train" / name.removesuffix(".json")).stat().st_mtime_ns for name in done} == shards
    prepare(source, tmp_path / "uninterrupted", Options(shards=40))
    assert read_folder(dest) == read_folder(tmp_path / "uninterrupted")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_leaves_no_process_and_one_line(tmp_path, number):
    source, dest = write_images(tmp_path / "images", 500), tmp_path / "data"
    process = start(source, dest, stderr=subprocess.PIPE, start_new_session=True)
    wait_until(lambda: any(dest.glob(".partial/train/*.json")))
    workers = [child.pid for child in psutil.Process(process.pid).children()]
    os.killpg(process.pid, number)
    _, stderr = process.communicate(timeout=30)
    assert (process.returncode, stderr.decode()) == (128 + number, "stopped; rerun the command to resume\n")
    wait_until(lambda: all(map(has_ended, workers)))


@pytest.fixture
def folders(tmp_path) -> tuple[Path, Path]:
    """A source of ten images, and where to prepare it."""
    return write_images(tmp_path / "images", 5), tmp_path / "data"


def test_the_same_job_again_does_nothing_and_another_one_is_refused(folders, capsys):
    source, dest = folders
    main([str(source), str(dest), "--workers=1"])
    before = read_folder(dest)
    main([str(source), str(dest), "--workers=1", "--validation-share=0.2"])
    assert "complete already" in capsys.readouterr().out
    shard = next((dest / "train").iterdir())
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    with pytest.raises(UserError, match=f"^{shard}: .* bytes, not .*--check --repair {dest}` to continue"):
        main([str(source), str(dest), "--workers=1"])
    shard.write_bytes(content)
    with pytest.raises(UserError, match="made with other quality"):
        main([str(source), str(dest), "--quality=90"])
    (source / "class_0" / "new.jpg").write_bytes(jpeg())
    with pytest.raises(UserError, match="made with other files"):
        main([str(source), str(dest)])
    assert read_folder(dest) == before


def test_a_folder_with_control_characters_is_printed_escaped(folders, tmp_path, capsys):
    dest = tmp_path / "\x1b[31mred"
    for words in ([folders[0], dest], [folders[0], dest], ["--check", dest]):
        main([*map(str, words), "--workers=1"])
        assert str(tmp_path / "\\x1b[31mred: ") in capsys.readouterr().out


def test_a_second_process_on_the_same_job_is_refused(folders, monkeypatch):
    def write_from_two_processes(task):
        with pytest.raises(UserError, match="is being written by"):
            prepare(*folders)
        raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr("imagenet_dali.preparation.write_shard", write_from_two_processes)
        with pytest.raises(InterruptedError):
            prepare(*folders)
    prepare(*folders)
    assert len(open_split(folders[1], "train")) == 8


def test_an_unfinished_job_is_not_mixed_with_another_one(folders, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("imagenet_dali.preparation.write_dataset", None)
        with pytest.raises(TypeError):  # stopped after the shards, before the tables
            prepare(*folders)
    with pytest.raises(UserError, match="made with other seed"):
        prepare(*folders, Options(seed=1))
    prepare(*folders)
    assert len(open_split(folders[1], "train")) == 8
    assert not (folders[1] / ".partial").exists()


def test_a_full_disk_is_named_and_the_restart_continues(folders, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    source, dest = folders
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fail)
        with pytest.raises(UserError, match=f"{dest}: No space left on device; fix that and rerun the command"):
            main([str(source), str(dest), "--workers=1"])
    assert read_folder(dest) == {}
    prepare(source, dest)
    assert len(open_split(dest, "train")) == 8


def test_few_bad_images_are_left_out_and_listed(tmp_path, capsys):
    source, dest = write_images(tmp_path / "images", 200), tmp_path / "data"
    (source / "class_0" / "cut.jpg").write_bytes(jpeg()[:-50])
    (source / "class_1" / "page.jpg").write_text("not an image")
    for number in range(9):  # more than 1 %
        (source / "class_1" / ("Thumbs.db", "Notes.TXT")[number % 2]).with_stem(f"{number}").write_text("not an image")
    os.mkfifo(source / "class_0" / "pipe.jpg")
    with open(source / "class_1" / "large.jpg", "wb") as file:
        file.write(jpeg())
        file.truncate(1 << 40)  # takes no room on the disk
    prepare(source, dest)
    cut, pipe, large, page = (dest / "refused.txt").read_text().splitlines()
    assert cut.startswith("class_0/cut.jpg\tnot a readable image: Premature end")
    assert pipe == "class_0/pipe.jpg\tnot a regular file"
    assert large == "class_1/large.jpg\t1,099,511,627,776 bytes, more than 401,048,576"
    assert page.startswith("class_1/page.jpg\tnot a readable image: not one of JPEG")
    out = capsys.readouterr().out
    assert "9 other files ignored: .db, .txt\n" in out
    assert "4 refused" in out
    assert sum(len(open_split(dest, split)) for split in ("train", "validation")) == 400
    assert json.loads((dest / "manifest.json").read_text())["made"]["refused"] == 4


REPORT_MEMORY = """
import sys
from pathlib import Path
from common.errors import run_command
from imagenet_dali.prepare import main
try:
    run_command(main)
finally:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(status["VmHWM"].split()[0])
"""


def test_a_thousand_bad_images_are_all_listed_and_none_decompresses(tmp_path):
    source, dest = write_images(tmp_path / "images", 30), tmp_path / "data"
    written = write_bad_images(source / "class_0" / "found", 500) | write_bad_images(source / "class_1", 500)
    command = [sys.executable, "-c", REPORT_MEMORY, source, dest, "--workers=1"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "refused.txt: 1000 images refused, more than 1% of 1060; fix or remove them" in done.stderr
    assert len(done.stdout.splitlines()) == 20 + 2
    assert "\n... and 980 more\n" in done.stdout
    assert list(read_folder(dest)) == ["refused.txt"]
    reasons = dict(line.split("\t") for line in (dest / "refused.txt").read_text().splitlines())
    assert len(reasons) == 1000
    assert all(BAD_IMAGES[kind][1] in reasons[str(path.relative_to(source))] for path, kind in written.items())
    assert int(done.stdout.splitlines()[-1]) < 150_000  # kB; the smallest of the bombs would add 144,000 to 47,000


@pytest.mark.parametrize(
    ("per_class", "bad", "message"),
    [
        (50, ["class_0/bad0.jpg", "class_0/bad1.jpg"], "refused.txt: 2 images refused, more than 1% of 102"),
        (200, ["class_x/only.jpg"], "refused.txt: 1 image refused, all training images of class class_x"),
    ],
)
def test_too_many_bad_images_stop_the_preparation_and_leave_only_the_list(tmp_path, per_class, bad, message):
    source, dest = write_images(tmp_path / "images", per_class), tmp_path / "data"
    for name in bad:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(bytes(100))
    with pytest.raises(UserError, match=message):
        prepare(source, dest)
    assert list(read_folder(dest)) == ["refused.txt"]
    for name in bad:
        (source / name).write_bytes(jpeg())
    prepare(source, dest)
    assert not (dest / "refused.txt").exists()
    assert sum(len(open_split(dest, split)) for split in ("train", "validation")) == 2 * per_class + len(bad)


def test_wrong_folders_are_refused_before_anything_is_written(folders, tmp_path):
    source, dest = folders
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("important")
    before = read_folder(tmp_path)
    for arguments, message in [
        ((tmp_path / "nowhere", dest), "nowhere: no such folder"),
        ((tmp_path / "mine", dest), "mine: 0 class folders"),
        ((source, tmp_path / "mine"), "mine: not empty and not a data set"),
        ((source, tmp_path / "mine" / "thesis.tex"), "not empty and not a data set"),
        ((source, source / "data"), "lies inside SOURCE"),
        ((source, dest, "--quality=0"), "--quality=0: choose 1 to 100"),
        ((source, dest, "--validation-share=1"), "--validation-share=1.0: choose 0 to"),
        ((source, dest, "--shards=100"), "--shards=100: more than the 8 training images"),
        ((source,), "give SOURCE and DEST"),
        ((), "give SOURCE and DEST"),
        ((source, dest, "--check"), "give SOURCE and DEST"),
        ((source, "--check", "--adopt"), "give SOURCE and DEST"),
        ((source, dest, "--repair"), "--repair goes with --check DIR"),
        ((source, dest, "--labels=names.txt"), "--labels=names.txt has no effect here"),
        (("--check", source, "--labels=names.txt"), "--labels=names.txt has no effect here"),
        (("--adopt", source, "--short-side=256"), "--short-side=256 has no effect here"),
        (("--check", source, "--max-refused=0.1"), "--max-refused=0.1 has no effect here"),
    ]:
        with pytest.raises(UserError, match=message):
            main([str(argument) for argument in arguments])
    assert read_folder(tmp_path) == before


def test_what_the_system_refuses_is_one_line(folders, tmp_path):
    source, dest = folders
    (tmp_path / "file").write_text("")
    ended = run_forked(main, [source, tmp_path / "file" / "data"])
    assert ended.code == 2
    assert ended.stderr.startswith(f"error: {tmp_path / 'file'}")
    assert ended.stderr.count("\n") == 1
    (source / "class_0" / "link.jpg").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"refused.txt: 1 image refused, more than 1% of 11"):
        main([str(source), str(dest)])


def test_workers_do_not_import_torch():
    command = [sys.executable, "-c", "import imagenet_dali.prepare, sys; sys.exit('torch' in sys.modules)"]
    assert subprocess.run(command, cwd=PROJECT).returncode == 0
