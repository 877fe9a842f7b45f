from pathlib import Path

import pytest
import torch

from common.metrics.provenance import describe_run
from common.tools.result_rows import add_line, format_records, read_records, summarise


def test_rows_are_kept_with_what_makes_them_count(tmp_path: Path) -> None:
    path, first, second = tmp_path / "a" / "results.jsonl", describe_run(["--x"]), describe_run([])
    second["started"] += 1
    add_line(path, "one", first, row={"figure": 1 / 3})
    add_line(path, "one", second, row={"figure": 2.0, "range": [1.0, 2.0]})
    add_line(path, "one", first, status="failed", why="a\nreason\n", seconds=2.0)
    one, other = read_records(path)
    assert (one.rows, one.status, one.why) == ([{"figure": 1 / 3}], "failed", "a\nreason\n")
    assert (other.rows[0]["range"], other.status) == ([1.0, 2.0], "interrupted")
    assert one.run["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert all(one.run[name] for name in ("started", "argv", "hardware", "commit"))
    page = format_records([one], {"one": "Count."})
    assert page.startswith("## one\n\nCount.\n\n| figure |\n| -----: |\n| 0.3333 |\n\nFailed: reason\n\n`python ")
    assert f"commit {one.run['commit']}" in page
    assert read_records(tmp_path / "none") == []


def test_ratios_are_of_the_same_round() -> None:
    figures = {
        "a": [{"cpu": cpu, "wall": 2 * cpu} for cpu in (1.0, 2.0, 9.0)],
        "b": [{"cpu": cpu, "wall": cpu} for cpu in (2.0, 3.0, 36.0)],
        "c": None,
        "d": [{"wall": 3.0}, {"wall": 4.0}, {"wall": 5.0}],
    }
    a, b, c, d = summarise(figures, "a", units=10)
    assert (a["cpu_ms"], a["x_cpu"], a["wall_ms"], a["rounds"]) == pytest.approx((200, 1, 400, 3))
    assert (b["cpu_ms"], *b["cpu_ms_quartiles"]) == pytest.approx((300, 250, 1950))
    assert (b["x_cpu"], *b["x_cpu_quartiles"], b["x_wall"]) == pytest.approx((2, 1.75, 3, 1))
    assert (c["not_run"], c["rounds"]) == ("not installed", 0)
    assert "cpu_ms" not in d
    assert (d["wall_ms"], d["x_wall"]) == pytest.approx((400, 1))
