"""The benchmark runs, and compares what it times."""

from functools import partial
from types import SimpleNamespace

import bench
import pytest

SMALL = (
    "TOTAL_BATCH_SIZE=2",
    "MODEL.image_size=32",
    "MODEL.width=8",
    "MODEL.heads=2",
    "MODEL.num_classes=10",
)


@pytest.mark.parametrize("part", ["step", "lamb"])
def test_every_variant_runs(part):
    for row in bench.compare(bench.PARTS[part], bench.Work(SMALL, 1, 1), rounds=1):
        assert float(row["ms"]) > 0
    assert bench.Work(SMALL, 1, 1).config()["TOTAL_BATCH_SIZE"] == 2


def pass_time(seconds: float, work: bench.Work) -> None:
    """Take ``seconds`` for each of two steps after the first, 9 s for the others."""
    bench.time, taken = SimpleNamespace(perf_counter=lambda: sum(taken)), []
    for number, _ in enumerate(work):
        taken.append(seconds if number in (1, 2) else 9.0)


def test_ratios_are_those_of_the_timed_steps_to_the_first_variants():
    variants = {"a": partial(pass_time, 0.5), "b": partial(pass_time, 1.0)}
    rows = [
        list(row.values())
        for row in bench.compare(variants, bench.Work((), steps=2, warm_up=1), rounds=2)
    ]
    assert rows == [["a", "500", "1.000 (1.000 to 1.000)"], ["b", "1000", "2.000 (2.000 to 2.000)"]]
