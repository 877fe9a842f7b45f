"""The benchmark runs."""

import bench
import pytest

SMALL = ("TOTAL_BATCH_SIZE=2", "MODEL.image_size=32", "MODEL.width=8", "MODEL.heads=2", "MODEL.num_classes=10")


@pytest.mark.parametrize("part", ["step", "lamb"])
def test_every_variant_runs(part: str) -> None:
    for row in bench.compare(bench.PARTS[part], bench.Work(SMALL, 1, 1), rounds=1):
        assert float(row["ms"]) > 0
