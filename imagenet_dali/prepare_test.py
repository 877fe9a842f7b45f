"""The preparation command: the data set that it makes, its refusals, and a kill in the middle."""

import io
import itertools
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
from common.files import ROOT
from common.shards.dataset import open_split
from common.shards.prepare import main, plan_shards, prepare
from common.shards.source import ImageListing
from common.testing.commands import has_ended, read_folder, wait_until
from imagenet_dali.testing import jpeg, write_images


def test_another_tool_reads_every_image_once(prepared):
    source = prepared.parent / "images"
    train = open_split(prepared, "train")
    validation = open_split(prepared, "validation")
    assert len(train) == 240
    assert len(validation) == 60
    seen = []
    for shard in train.shards + validation.shards:
        for record in tfrecord.tfrecord_loader(str(shard), None, FEATURES):
            path = source / bytes(record["image/filename"]).decode()
            assert_is_of(record, path)
            seen.append(path)
    assert sorted(seen) == sorted(source.rglob("*.jpg"))


FEATURES = {
    "image/encoded": "byte",
    "image/filename": "byte",
    "image/format": "byte",
    "image/class/text": "byte",
    "image/class/label": "int",
    "image/height": "int",
    "image/width": "int",
}


def assert_is_of(record: dict[str, np.ndarray], path: Path) -> None:
    """Assert that a record's features are those of the image in a folder of its class."""
    image = bytes(record["image/encoded"])
    assert image == path.read_bytes()
    assert bytes(record["image/format"]) == b"JPEG"
    name = bytes(record["image/class/text"]).decode()
    label = record["image/class/label"].item()
    assert name == path.parent.name
    assert name == f"class_{label}"
    width, height = Image.open(io.BytesIO(image)).size
    assert record["image/width"].item() == width
    assert record["image/height"].item() == height


def finished_shards(dest: Path) -> dict[Path, int]:
    """Return the times at which an unfinished command has written its shards."""
    shards = {}
    for path in dest.glob(".partial/train/*.json"):
        shard = dest / "train" / path.stem
        shards[path] = shard.stat().st_mtime_ns
    return shards


def test_stopped_and_killed_it_makes_the_same(tmp_path):
    source = write_images(tmp_path / "images", 300)
    dest = tmp_path / "data"
    words = "-m imagenet_dali.prepare --workers 2 --shards 400"
    command = [sys.executable, *words.split(), source, dest]
    done: dict[Path, int] = {}
    stops = {
        signal.SIGINT: os.killpg,
        signal.SIGTERM: os.killpg,
        signal.SIGKILL: os.kill,
    }
    for number, stop in stops.items():
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        wait_until(lambda: len(list(dest.glob(".partial/train/*.json"))) > len(done))  # noqa: B023
        workers = [child.pid for child in psutil.Process(process.pid).children()]
        stop(process.pid, number)
        _, stderr = process.communicate(timeout=30)
        wait_until(lambda: all(map(has_ended, workers)))  # noqa: B023
        if number == signal.SIGKILL:
            assert process.returncode == -number
        else:
            assert process.returncode == 128 + number
            assert stderr == "stopped; rerun the command to resume\n"
        shards = finished_shards(dest)
        assert done.items() <= shards.items()
        done = shards
        assert len(done) < 400
    with pytest.raises(UserError, match="rerun the command to finish it"):
        open_split(dest, "train")
    assert subprocess.run(command, cwd=ROOT).returncode == 0
    prepare(source, tmp_path / "uninterrupted", shards=400)
    assert read_folder(dest) == read_folder(tmp_path / "uninterrupted")


def test_the_same_job_again_does_nothing_and_another_one_is_refused(tmp_path, capsys):
    source = write_images(tmp_path / "images", 5)
    dest = tmp_path / "data"

    def write_from_two_processes(task):
        with pytest.raises(UserError, match="is being written by this process: choose another"):
            prepare(source, dest)
        raise OSError(28, "No space left on device")

    words = [str(source), str(dest), "--workers=1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("common.shards.prepare.write_shard", write_from_two_processes)
        with pytest.raises(UserError, match=f"{dest}: No space left on device; fix that and rerun"):
            main(words)
    with pytest.raises(UserError, match="made with other short_side"):
        main([*words, "--short-side=20"])
    (dest / "refused.txt").write_text("of an earlier attempt")
    main(words)
    assert not (dest / ".partial").exists()
    assert not (dest / "refused.txt").exists()
    before = read_folder(dest)
    main([*words, "--validation-share=0.2"])
    assert "complete already" in capsys.readouterr().out
    with pytest.raises(UserError, match="made with other validation_share"):
        main([*words, "--validation-share=0.5"])
    with pytest.raises(UserError, match="made with other shards, split"):
        main([*words, "--shards=2", "--split=train"])
    (source / "class_0" / "0000.jpg").write_bytes(jpeg(16, 16))
    with pytest.raises(UserError, match="made with other files"):
        main(words)
    assert read_folder(dest) == before


def test_bad_images_are_left_out_and_listed(tmp_path, capsys):
    source = write_images(tmp_path / "images", 200)
    dest = tmp_path / "data"
    (source / "class_0" / "cut.jpg").write_bytes(jpeg()[:-50])
    (source / "class_1" / "Thumbs.db").write_text("not an image")
    os.mkfifo(source / "class_0" / "pipe.jpg")
    with open(source / "class_1" / "large.jpg", "wb") as file:
        file.truncate(1 << 40)  # takes no room on the disk
    expected = [
        "class_0/cut.jpg\tnot a readable image: Premature end of JPEG file",
        "class_0/pipe.jpg\tnot a regular file",
        "class_1/large.jpg\t1,099,511,627,776 bytes, more than 401,048,576",
    ]
    with pytest.raises(UserError, match="refused.txt: 3 images refused, more than 0.5% of 403"):
        prepare(source, dest, max_refused=0.005)
    assert list(read_folder(dest)) == ["refused.txt"]
    prepare(source, dest, max_refused=3 / 403)
    assert (dest / "refused.txt").read_text().splitlines() == expected
    printed = capsys.readouterr().out
    assert "\n".join(expected).replace("\t", " ") in printed
    assert "2 classes; 0 images converted, 3 refused" in printed
    train = open_split(dest, "train")
    validation = open_split(dest, "validation")
    assert len(train) + len(validation) == 400


# The words of a command in a folder with images of two classes, in ``images``, and a text.
WRONG = [
    ("nowhere data", "nowhere: no such folder"),
    ("images mine", "mine: not empty and not a data set"),
    ("images images/data", "lies inside SOURCE"),
    ("images data --short-side=0", "--short-side=0: choose 1 to 65535"),
    ("images data --validation-share=1", "--validation-share=1.0: choose 0 to 0.99"),
    ("images data --workers=0", "--workers=0: choose 1 to 1024"),
    (
        "images data --split=test --validation-share=0.1",
        "--validation-share=0.1: --split test prepares all",
    ),
    (
        "images data --columns=path=a",
        "--columns=path=a: columns of which table. add --lab",
    ),
    ("images data --labels=gone.csv", "gone.csv: No such file or directory"),
    ("images data --shards=100", "--shards=100: more than the 6 images"),
    ("images", "give SOURCE and DEST"),
    ("--adopt images --shards=2", "--shards=2: has no effect with --adopt"),
    (
        "--adopt images",
        "images: no such folder, or no shards: they are the files of train/",
    ),
]


@pytest.mark.parametrize(("command", "message"), WRONG)
def test_wrong_folders_are_refused_before_anything_is_written(
    command, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "images", 5)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("important")
    before = read_folder(tmp_path)
    with pytest.raises(UserError, match=message):
        main(command.split())
    assert read_folder(tmp_path) == before


def test_shards_that_do_not_divide_the_images_have_all_of_them():
    files = [(f"{number}.jpg", number % 2) for number in range(50)]
    splits = {"train": files[:40], "validation": files[40:]}
    source = ImageListing(Path("x"), ["a", "b"], splits)
    plan = plan_shards(source, 7)
    assert [len(shard) for shard in plan.values()] == [5, 6, 6, 5, 6, 6, 6, 5, 5]
    assert sorted(itertools.chain(*plan.values())) == sorted(files)


NAMES = [
    "Cat",
    "cat",
    "-x",
    " b ",
    "100 %s",
    "a,b;c|d=e",
    "'a' \"b\"",
    "<b>&amp;",
    "\u00e9",
    "n" * 255,
]
FILES = [
    b"0.jpg",
    b"\xff.jpg",
    b"a\nb\x1b[2J.jpg",
    b"-x %s#'\".jpg",
]


def test_names_are_carried_exactly_or_refused(tmp_path, capsys):
    images = tmp_path / 'it\'s a "100 %s"' / "images"
    for name in NAMES:
        (images / name).mkdir(parents=True)
        for file in FILES:
            (images / name / os.fsdecode(file)).write_bytes(jpeg(16, 16))
    os.symlink("nowhere", images / "cat/link\n.jpg")
    main([str(images), str(tmp_path / "data"), "--workers=1", "--max-refused=0.03"])
    assert "\x1b" not in capsys.readouterr().out
    assert open_split(tmp_path / "data", "train").class_names == sorted(NAMES)
    refused = (tmp_path / "data" / "refused.txt").read_text()
    assert refused == "cat/link\\n.jpg\tNo such file or directory\n"
    (images / os.fsdecode(b"caf\xe9\n")).mkdir()
    message = r"class caf\\udce9\\n has a control character, a line separator or bytes"
    with pytest.raises(UserError, match=message):
        main([str(images), str(tmp_path / "other")])
