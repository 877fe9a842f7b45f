"""`--check` finds all damage; `--repair` leaves out exactly the bad records, lists them, and is atomic."""

import json
import os
import shutil
from pathlib import Path

import pytest

from common.errors import UserError
from common.testing.commands import read_folder, run_forked
from imagenet_dali.dataset import open_split
from imagenet_dali.manifest import records_path
from imagenet_dali.preparation import prepare
from imagenet_dali.prepare import main
from imagenet_dali.records import build_example, frame
from imagenet_dali.repair import repair
from imagenet_dali.task import describe_data
from imagenet_dali.testing import jpeg, spoil_record, write_images
from imagenet_dali.verify import check


def images_of(root: Path, split: str) -> list[tuple[bytes, int]]:
    opened = open_split(root, split)
    return [(bytes(image), label) for image, label in map(opened.read, range(len(opened)))]


def describe(root: Path):
    return describe_data({"root": str(root), "loader": "dali"})


def test_bad_records_are_left_out_and_nothing_else(data, capsys):
    train, validation = images_of(data, "train"), images_of(data, "validation")
    before, original = describe(data), open_split(data, "train")
    offsets = original.records["offset"][[0, 100]].tolist()
    for split, index in (("train", 0), ("train", 100), ("validation", 59)):
        spoil_record(data, split, index)
    shards = read_folder(data / "train"), read_folder(data / "validation")
    main(["--check", "--repair", str(data), "--workers=2"])
    *lines, _, _ = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    for line, (shard, number, offset) in zip(lines, [(0, 0, offsets[0]), (1, 20, offsets[1])], strict=False):
        place = f"{original.shards[shard]}: record {number} at byte {offset}: "
        assert line == f"{place}checksum of the data does not match"
    assert images_of(data, "train") == train[1:100] + train[101:]
    assert images_of(data, "validation") == validation[:59]
    assert check(data, 1) == []
    assert (read_folder(data / "train"), read_folder(data / "validation")) == shards
    after = describe(data)
    assert (after.train_samples, after.eval_samples) == (238, 59)
    assert after.fingerprint != before.fingerprint
    assert after.earlier == (before.fingerprint,)
    [done] = json.loads((data / "manifest.json").read_text())["repairs"]
    assert done["records"] == 3
    assert [f"{data}/{fault}" for fault in done["dropped"]] == lines


def test_check_lists_all_that_is_wrong(data, capsys):
    split = open_split(data, "train")
    first, second, third = split.shards
    spoil_record(data, "train", 2)
    second.write_bytes(second.read_bytes()[: int(split.records["offset"][150]) + 20])
    third.unlink()
    (data / "records" / "validation.npy").unlink()
    faults = check(data, 1)
    expected = [
        f"{data}/records/validation.npy: missing",
        f"{first}: record 2 at byte {split.records[2]['offset']}: checksum of the data does not match",
        f"{second}: record 70 at byte {split.records[150]['offset']}: the shard is cut off here: 10 records lost",
        f"{third}: missing; copy it from where the data set came from, or delete {data} and rerun `python -m",
    ]
    assert len(faults) == len(expected)
    assert all(text in fault for text, fault in zip(sorted(expected), sorted(faults), strict=True))
    with pytest.raises(UserError, match="faults found: 4; replace what is missing, then --check --repair continues"):
        main(["--check", str(data), "--workers=1"])
    assert capsys.readouterr().out.count("\n") == 4


def test_repairing_what_is_good_changes_nothing(data, capsys):
    before = read_folder(data)
    assert check(data, 1) == check(data, 2) == repair(data, 1) == []
    for flags, line in (([], "every record is verified"), (["--repair"], "every remaining record is verified")):
        main(["--check", *flags, str(data), "--workers=1"])
        assert line in capsys.readouterr().out
    assert read_folder(data) == before
    spoil_record(data, "train", 5)
    assert len(repair(data, 1)) == 1
    repaired = read_folder(data)
    assert repair(data, 1) == []
    assert read_folder(data) == repaired


def test_each_repair_is_remembered_and_all_count_against_the_limit(data):
    fingerprints = [describe(data).fingerprint]
    for _ in range(3):
        spoil_record(data, "train", 5)
        repair(data, 1)
        fingerprints.append(describe(data).fingerprint)
        assert describe(data).earlier == tuple(fingerprints[:-1])
    assert len(set(fingerprints)) == 4
    spoil_record(data, "train", 5)
    before = read_folder(data)
    with pytest.raises(UserError, match=r"4 of 300 records are bad, more than 1%: .* record .*; nothing was changed"):
        repair(data, 1)
    assert read_folder(data) == before


def test_lost_tables_are_worked_out_from_the_shards(data):
    before = read_folder(data)
    records_path(data, "train").write_bytes(b"nothing")
    records_path(data, "validation").unlink()
    assert repair(data, 1) == []
    assert read_folder(data) == before


def test_a_truncated_shard_keeps_its_first_records(data):
    split, train = open_split(data, "train"), images_of(data, "train")
    shard = split.shards[2]
    shard.write_bytes(shard.read_bytes()[: int(split.records["offset"][238]) + 20])
    with pytest.raises(UserError, match=f"{shard.name}: .* bytes, not .*; run `python -m .*--check --repair {data}`"):
        open_split(data, "train")
    (fault,) = repair(data, 1)
    assert fault.startswith(f"{shard}: record 78 at byte ")
    assert fault.endswith(": the shard is cut off here: 2 records lost")
    assert images_of(data, "train") == train[:238]
    assert check(data, 1) == []


def test_what_cannot_be_repaired_stays_as_it_is(data, tmp_path):
    (shard := open_split(data, "train").shards[0]).rename(tmp_path / "shard")
    before = read_folder(data)
    for call in (lambda: repair(data, 1), lambda: open_split(data, "train")):
        with pytest.raises(UserError, match=f"{shard}: missing; copy it from where the data set came from"):
            call()
    assert read_folder(data) == before
    shutil.copy(tmp_path / "shard", shard)
    (data / "labels.txt").unlink()
    with pytest.raises(UserError, match="labels.txt: missing or not 2 lines; copy it"):
        repair(data, 1)


def test_a_class_that_would_lose_all_its_training_images_stops_the_repair(tmp_path):
    source = write_images(tmp_path / "images" / "train", 150)
    (source / "class_x").mkdir()
    (source / "class_x" / "only.jpg").write_bytes(jpeg())
    prepare(source.parent, tmp_path / "data")
    index = open_split(tmp_path / "data", "train").records["label"].tolist().index(2)
    spoil_record(tmp_path / "data", "train", index)
    before = read_folder(tmp_path)
    with pytest.raises(UserError, match="class 2 would lose all its train images; nothing was changed"):
        repair(tmp_path / "data", 1)
    assert read_folder(tmp_path) == before


def test_adopted_shards_keep_their_labels(tmp_path):
    for split in ("train", "validation"):
        (tmp_path / split).mkdir()
        records = [frame(build_example(jpeg(20, 30), 1 + number % 3, "", "", 20, 30)) for number in range(200)]
        (tmp_path / split / "shard").write_bytes(b"".join(records))
    main(["--adopt", str(tmp_path), "--workers=1"])
    labels = open_split(tmp_path, "train").records["label"].tolist()
    spoil_record(tmp_path, "train", 17)
    assert len(repair(tmp_path, 1)) == 1
    assert open_split(tmp_path, "train").records["label"].tolist() == labels[:17] + labels[18:]
    records_path(tmp_path, "train").unlink()  # now from the shard, whose labels count from 1
    assert len(repair(tmp_path, 1)) == 1
    assert open_split(tmp_path, "train").records["label"].tolist() == labels[:17] + labels[18:]
    assert check(tmp_path, 1) == []


def test_killed_anywhere_it_is_the_old_or_after_another_call_the_new(data, tmp_path):
    old = describe(data)
    for split, index in (("train", 7), ("validation", 3)):
        spoil_record(data, split, index)
    bad = shutil.copytree(data, tmp_path / "bad")
    repair(data, 1)
    left_old = []
    for kill in range(100):
        killed = shutil.copytree(bad, tmp_path / f"killed{kill}")

        def repair_and_die(argv: list[str], kill: int = kill) -> None:
            replace, done = os.replace, iter(range(kill))
            os.replace = lambda *paths: replace(*paths) if next(done, None) is not None else os._exit(9)
            repair(Path(*argv), 1)

        code = run_forked(repair_and_die, [killed]).code
        if code == 0:
            break
        assert code == 9
        left_old.append("repairs" not in json.loads((killed / "manifest.json").read_text()))
        if left_old[-1]:
            assert describe(killed) == old
        repair(killed, 1)
        assert read_folder(killed) == read_folder(data)
    # two tables, the manifest, and the two in their place
    assert left_old == [True] * 3 + [False] * 2
