"""The profile of a few steps, against what the model is known to compute."""

import json

from common.testing.tiny_task import MODEL, train, write_images


def test_records_the_steps_asked_for_and_leaves_no_run(tmp_path, capsys):
    output = train(
        write_images(tmp_path / "images"), tmp_path / "run", "gradient_accumulation=2", flags=["--profile", "2"]
    )
    events = json.loads((output / "profile" / "trace.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("ph") == "X"]
    assert len([name for name in names if name.startswith("ProfilerStep#")]) == 2
    # of a micro-batch: qkv, projection and two layers of the MLP in a block, the patch embedding, and the head
    assert names.count("aten::linear") == 2 * 2 * (4 * MODEL["depth"] + 2)
    table = (output / "profile" / "operators.txt").read_text()
    assert table in capsys.readouterr().out
    assert "Self CPU %" in table
    assert "aten::" in table
    assert sorted(path.name for path in output.iterdir()) == [".lock", "profile"]
