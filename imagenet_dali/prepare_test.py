"""The preparation command: the data set that it makes, its refusals, and a kill in the middle."""

import io
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

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
    strings = ("encoded", "filename", "format", "class/text")
    types = dict.fromkeys((f"image/{name}" for name in strings), "byte")
    types |= {"image/class/label": "int", "image/height": "int", "image/width": "int"}
    seen = []
    for name, count in (("train", 240), ("validation", 60)):
        split = open_split(prepared, name)
        assert len(split) == count
        for shard in split.shards:
            for record in tfrecord.tfrecord_loader(str(shard), None, types):
                image, filename, kind, text = (bytes(record[f"image/{key}"]) for key in strings)
                path = source / filename.decode()
                assert kind == b"JPEG"
                label = record["image/class/label"].item()
                assert text.decode() == path.parent.name == f"class_{label}"
                assert path.read_bytes() == image
                size = record["image/width"].item(), record["image/height"].item()
                assert size == Image.open(io.BytesIO(image)).size
                seen.append(path)
    assert sorted(seen) == sorted(source.rglob("*.jpg"))


def test_stopped_and_killed_it_makes_the_same(tmp_path):
    source = write_images(tmp_path / "images", 300)
    dest = tmp_path / "data"
    words = ["-m", "imagenet_dali.prepare", "--workers", "2", "--shards", "400"]
    command = [sys.executable, *words, source, dest]
    options = dict(
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True, text=True
    )
    done: dict[str, int] = {}
    stops = {signal.SIGINT: os.killpg, signal.SIGTERM: os.killpg, signal.SIGKILL: os.kill}
    for number, stop in stops.items():
        process = subprocess.Popen(command, cwd=ROOT, **options)
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
        shards = {}
        for path in dest.glob(".partial/train/*.json"):
            shards[path] = (dest / "train" / path.stem).stat().st_mtime_ns
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
    assert {path.name for path in dest.iterdir()}.isdisjoint({".partial", "refused.txt"})
    before = read_folder(dest)
    main([*words, "--validation-share=0.2"])
    assert "complete already" in capsys.readouterr().out
    for flags, changed in (
        (["--validation-share=0.5"], "validation_share"),
        (["--shards=2", "--split=train"], "shards, split"),
        ([], "files"),
    ):
        if changed == "files":
            (source / "class_0" / "0000.jpg").write_bytes(jpeg(16, 16))
        with pytest.raises(UserError, match=f"made with other {changed}"):
            main([*words, *flags])
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
    assert sum(len(open_split(dest, split)) for split in ("train", "validation")) == 400


def test_wrong_folders_are_refused_before_anything_is_written(tmp_path):
    source = write_images(tmp_path / "images", 5)
    dest = tmp_path / "data"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("important")
    before = read_folder(tmp_path)
    for arguments, message in [
        ((tmp_path / "nowhere", dest), "nowhere: no such folder"),
        ((source, tmp_path / "mine"), "mine: not empty and not a data set"),
        ((source, source / "data"), "lies inside SOURCE"),
        ((source, dest, "--short-side=0"), "--short-side=0: choose 1 to 65535"),
        ((source, dest, "--validation-share=1"), "--validation-share=1.0: choose 0 to 0.99"),
        ((source, dest, "--workers=0"), "--workers=0: choose 1 to 1024"),
        (
            (source, dest, "--split=test", "--validation-share=0.1"),
            "--validation-share=0.1: --split test prepares all",
        ),
        ((source, dest, "--columns=path=a"), "--columns=path=a: columns of which table. add --lab"),
        ((source, dest, "--labels=gone.csv"), "gone.csv: No such file or directory"),
        ((source, dest, "--shards=100"), "--shards=100: more than the 6 images"),
        ((source,), "give SOURCE and DEST"),
        (("--adopt", source, "--shards=2"), "--shards=2: has no effect with --adopt"),
        (("--adopt", source), "images: no such folder, or no shards: they are the files of train/"),
    ]:
        with pytest.raises(UserError, match=message):
            main([str(argument) for argument in arguments])
    assert read_folder(tmp_path) == before


def test_shards_that_do_not_divide_the_images_have_all_of_them():
    files = [(f"{number}.jpg", number % 2) for number in range(50)]
    source = ImageListing(Path("x"), ["a", "b"], {"train": files[:40], "validation": files[40:]})
    plan = plan_shards(source, 7)
    assert [len(shard) for shard in plan.values()] == [5, 6, 6, 5, 6, 6, 6, 5, 5]
    assert sorted(itertools.chain(*plan.values())) == sorted(files)


NAMES = ["Cat", "cat", "-x", " b ", "100 %s", "a,b;c|d=e", "'a' \"b\"", "<b>&amp;", "\u00e9"]
NAMES += ["n" * 255]
FILES = [b"0.jpg", b"\xff.jpg", b"a\nb\x1b[2J.jpg", b"-x %s#'\".jpg"]


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
    with pytest.raises(
        UserError, match=r"class caf\\udce9\\n has a control character, a line separator or bytes"
    ):
        main([str(images), str(tmp_path / "other")])
