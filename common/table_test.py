import csv

from common.table import format_table, write_csv

ROWS = [{"mode": "fp32", "step_s": 1.5}, {"mode": "AMP, torch", "step_s": "0.25"}]


def test_columns_are_aligned():
    assert format_table(ROWS).splitlines() == [
        "|       mode | step_s |",
        "| ---------: | -----: |",
        "|       fp32 |    1.5 |",
        "| AMP, torch |   0.25 |",
    ]


def test_what_is_written_reads_back(tmp_path):
    write_csv(ROWS, tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == [{key: str(value) for key, value in row.items()} for row in ROWS]
