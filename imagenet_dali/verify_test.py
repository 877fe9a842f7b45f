"""`--check` finds all damage."""

import numpy as np
import pytest

from common.errors import UserError
from common.testing.commands import read_folder
from imagenet_dali.dataset import open_split
from imagenet_dali.prepare import main
from imagenet_dali.testing import spoil_record
from imagenet_dali.verify import check


def test_check_finds_nothing_in_good_data(prepared, capsys):
    before = read_folder(prepared)
    assert check(prepared, 1) == check(prepared, 2) == []
    main(["--check", str(prepared), "--workers=1"])
    assert "every record is verified" in capsys.readouterr().out
    assert read_folder(prepared) == before


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


def test_check_compares_the_table_with_the_records(data):
    path = data / "records" / "train.npy"
    rows = np.load(path)
    rows["label"][0] = 1 - rows["label"][0]
    np.save(path, rows)
    assert any("train.npy: differs" in fault for fault in check(data, 1))
    path.unlink()
    assert any("train.npy: missing" in fault for fault in check(data, 1))
