"""`--check` finds every damage."""

from pathlib import Path

import numpy as np
import pytest

from common.errors import UserError
from imagenet_dali.dataset import open_split
from imagenet_dali.prepare import main, prepare
from imagenet_dali.prepare_test import tree, write_images
from imagenet_dali.verify import check
from imagenet_dali.writer import Options


@pytest.fixture
def data(tmp_path) -> Path:
    prepare(write_images(tmp_path / "images", 10), tmp_path / "data", Options(shards=2))
    return tmp_path / "data"


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(bytes(content))


def test_check_finds_nothing_in_good_data(data, capsys):
    before = tree(data)
    assert check(data, 1) == check(data, 2) == []
    main(["--check", str(data), "--workers=1"])
    assert "every record verified" in capsys.readouterr().out
    assert tree(data) == before


def test_check_lists_all_that_is_wrong(data, capsys):
    split = open_split(data, "train")
    first, second = split.shards
    row = split.records[2]
    flip(first, int(row["offset"] + row["image_start"] + 100))
    second.write_bytes(second.read_bytes()[:-1])
    (data / "idx_files" / "validation" / "validation-00000-of-00001.idx").unlink()
    faults = check(data, 1)
    expected = [
        f"{second}: {second.stat().st_size} bytes, not {second.stat().st_size + 1} as in the manifest",
        "validation-00000-of-00001.idx: missing",
        f"{first}: content differs from the manifest (sha256)",
        f"{first}: record 2 at byte {row['offset']}: checksum of the data does not match",
        f"{second}: content differs from the manifest (sha256)",
        f"{second}: record 7 at byte",
    ]
    assert len(faults) == len(expected)
    assert all(text in fault for text, fault in zip(expected, faults, strict=True))
    with pytest.raises(UserError, match="faults found: 6"):
        main(["--check", str(data), "--workers=1"])
    assert capsys.readouterr().out.count("\n") == 6


def test_check_compares_the_table_with_the_records(data):
    path = data / "records" / "train.npy"
    rows = np.load(path)
    rows["label"][0] = 1 - rows["label"][0]
    np.save(path, rows)
    assert any("train.npy: differs" in fault for fault in check(data, 1))
    path.unlink()
    assert any("train.npy: missing" in fault for fault in check(data, 1))
