"""The profile of a few steps, against what the model is known to compute."""

import json

import torch

from common.metrics.profiler import describe_operators
from common.testing.tiny_task import MODEL, train, write_images


def test_records_the_steps_asked_for_and_leaves_no_run(tmp_path, capsys):
    output = train(
        write_images(tmp_path / "images"), tmp_path / "run", "gradient_accumulation=2", flags=["--profile", "2"]
    )
    events = json.loads((output / "profile" / "trace.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("ph") == "X"]
    assert len([name for name in names if name.startswith("ProfilerStep#")]) == 2
    # of a micro-batch: qkv, projection and two layers of the MLP in a block, and the head
    assert names.count("aten::linear") == 2 * 2 * (4 * MODEL["depth"] + 1)
    table = (output / "profile" / "operators.txt").read_text()
    assert table in capsys.readouterr().out
    assert len(table.splitlines()) == 12
    assert sorted(path.name for path in output.iterdir()) == [".lock", "profile"]


def test_sorts_by_self_time_and_divides_by_steps():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        for _ in range(3):
            torch.ones(400, 400) @ torch.ones(400, 400)
    lines = describe_operators(recorded.key_averages(), 3).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    times = [float(row[1]) for row in rows]
    assert times == sorted(times, reverse=True)
    (product,) = (row for row in rows if row[0] == "aten::mm")
    assert product[3] == "1"
    assert sum(float(row[2].rstrip("%")) for row in rows) <= 100.5
