import csv
import json

import pytest

from common.errors import UserError
from common.testing.checkpoints import build_about
from common.tools import results_table as record

ABOUT = {
    "name": "tiny",
    "started": 1_700_000_000.0,
    "argv": ["/home/train_dali.py", "--config", "configs/tiny.py", "--set", "DATA.root=/data/some where/x"],
    "commit": "0123456789ab",
    "versions": {"torch": "2.15.0", "timm": None},
    "hardware": {"host": "h", "cpu": "A CPU", "instruction_set": "AVX2", "cpus": 2, "gpu": None},
}
RECORDS = [
    {"kind": "train", "step": 2, "epoch": 0.5, "time": 1_700_000_010.0, "loss": 2.0},
    {"kind": "train", "step": 4, "epoch": 1.0, "time": 1_700_000_080.0, "loss": 1.0},
    {"kind": "eval", "step": 4, "epoch": 1.0, "time": 1_700_000_090.0, "loss": 1.5, "top1": 0.25, "top5": 1.0,
     "samples": 8},
]  # fmt: skip


def write(folder, records) -> None:
    (folder / "config.json").write_text(json.dumps(build_about() | ABOUT))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def test_a_run_becomes_a_row_and_those_of_a_sweep_others(tmp_path):
    sweep, table = tmp_path / "sweep", tmp_path / "results.csv"
    for name in ("A=1", "A=2"):
        (sweep / name).mkdir(parents=True)
        write(sweep / name, RECORDS)
    for named in (sweep / "A=1", sweep):
        record.main([str(named), str(table)])
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert len(rows) == 3
    row = rows[2]
    assert (row["top1"], row["first_loss"], row["last_loss"], row["minutes"]) == ("0.2500", "2.0000", "1.0000", "1.5")
    assert row["hardware"] == "2 cores of A CPU, AVX2"
    assert (row["versions"], row["commit"]) == ("torch=2.15.0", "0123456789ab")
    assert row["command"] == "train_dali.py --config configs/tiny.py --set DATA.root=x"


@pytest.mark.parametrize(("records", "words"), [(None, "holds no run"), (RECORDS[:2], "has no evaluation yet")])
def test_what_is_no_finished_run_is_refused(tmp_path, records, words):
    if records:
        write(tmp_path, records)
    with pytest.raises(UserError, match=words):
        record.main([str(tmp_path), str(tmp_path / "results.csv")])
    assert not (tmp_path / "results.csv").exists()


def test_a_table_of_other_columns_is_left_alone(tmp_path):
    write(tmp_path, RECORDS)
    table = tmp_path / "parallel.csv"
    table.write_text("mode,ranks\n1d,2\n")
    with pytest.raises(UserError, match=r"parallel.csv: its columns are mode, ranks, not a run's: "):
        record.main([str(tmp_path), str(table)])
    assert table.read_text() == "mode,ranks\n1d,2\n"


def test_a_run_without_its_plan_is_refused(tmp_path):
    write(tmp_path, RECORDS)
    about = json.loads((tmp_path / "config.json").read_text())
    del about["plan"]
    (tmp_path / "config.json").write_text(json.dumps(about))
    with pytest.raises(UserError, match="config.json: plan: Field required"):
        record.main([str(tmp_path), str(tmp_path / "results.csv")])
