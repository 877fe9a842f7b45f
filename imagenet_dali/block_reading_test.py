"""What is opened and read in blocks, and that a run in this order resumes exactly."""

from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import Mock

import pytest

from common.data.sampler import TrainSampler
from common.data.workers import RecordReader
from common.errors import UserError
from common.run.checks import Prepared
from common.run.reading_order import choose_order
from common.shards import dataset
from common.shards.dataset import open_split
from imagenet_dali.task import describe_data
from imagenet_dali.testing import train

LARGE = 10**12  # bytes of memory


def test_a_block_is_read_once_and_at_once(prepared, monkeypatch):
    split = open_split(prepared, "train")
    read = Mock(wraps=dataset.read_range)
    expected = [split.read(number) for number in range(len(split))]
    monkeypatch.setattr(dataset, "read_range", read)
    blocks = split.block_bounds(12_000)
    samples = len(split)
    for rank in range(4):
        sampler = TrainSampler(
            samples, 40, 10, dp_rank=rank, dp_size=4, seed=0, block_bounds=blocks, window=2
        )
        reader = RecordReader(split)
        for draw, records in reader.read(sampler.draws(0)):
            assert records == [expected[number] for number in draw.indices[: len(records)]]
        reader.close()
    sizes = [call.args[2] for call in read.call_args_list]
    assert sum(sizes) == sum(path.stat().st_size for path in split.shards)
    assert max(sizes) < 12_000 + split.records["size"].max()
    assert len(sizes) < samples / 8


def test_shards_sorted_by_class_are_not_read_in_blocks(prepared, monkeypatch):
    split = open_split(prepared, "train")
    rows = split.records.copy()
    rows["label"].sort()
    by_class = replace(split, labels=rows["label"], records=rows)
    assert (split.is_shuffled, by_class.is_shuffled) == (True, False)
    monkeypatch.setattr("imagenet_dali.task.open_images", lambda *_: by_class)
    monkeypatch.setattr("common.run.reading_order.memory_bytes", lambda: 1)
    data = {"root": "/data", "loader": "dali", "order": None, "sampling": None}
    with pytest.raises(
        UserError, match=r"DATA.order='blocks': DATA.root=/data has shards sorted by class"
    ):
        describe_data(data | {"order": "blocks"})
    assert describe_data(data).fingerprint == split.fingerprint
    reading = choose_order(Prepared({"DATA": data}, None, describe_data(data), None))
    assert reading.order == "random"
    assert reading.why.endswith(
        "exceed the 0.0 MB of memory but are sorted by class: prepare them again for large reads"
    )


def test_a_run_in_blocks_resumes_to_the_bit_on_a_host_with_more_memory(
    colours, tmp_path, monkeypatch, capsys
):
    def train_with(memory: int, output: str, *settings: str, flags: Sequence[str] = ()) -> str:
        monkeypatch.setattr("common.run.reading_order.memory_bytes", lambda: memory)
        blocks = f"DATA.root={colours}", "DATA.workers=1", "DATA.block=0.005"
        train(
            tmp_path, output, *blocks, "NUM_EPOCHS=2", "CHECKPOINT_EVERY=4", *settings, flags=flags
        )
        return " ".join(capsys.readouterr().out.split())

    because = (
        "since 0.1 MB of training shards exceed the 0.0 MB of memory; holding up to 0.1 MB of them "
        "per process"
    )
    assert f"reading in blocks, {because}" in train_with(1, "whole")
    fourth = tmp_path / "whole/checkpoints/step-00000004"
    # a step into the second epoch
    resumed = train_with(LARGE, "resumed", flags=["--resume", str(fourth)])
    assert "reading in blocks, as before; " in resumed
    planned = train_with(LARGE, "other", "DATA.order=blocks", flags=["--dry-run"])
    assert "reading in blocks, set by DATA.order; " in planned
    fits = "since 0.1 MB of training shards fit into the 1,000.0 GB of memory"
    assert f"reading in random order, {fits}" in train_with(LARGE, "other")
    weights = {}
    for output in ("whole", "resumed", "other"):
        last = tmp_path / output / "checkpoints/step-00000006"
        weights[output] = (last / "model.safetensors").read_bytes()
    assert weights["whole"] == weights["resumed"] != weights["other"]


@pytest.mark.parametrize("loader", ["dali", "torchvision"])
def test_a_run_of_several_batches_in_blocks_resumes_to_the_bit(loader, colours, tmp_path):
    """12 steps of 4 images, a smaller micro-batch too, then 3 of 16."""
    settings = f"DATA.root={colours}", f"DATA.loader={loader}", "DATA.workers=1", "DATA.block=0.005"
    settings += "DATA.order=blocks", "BATCH_SIZES=[(1, 4)]", "NUM_EPOCHS=2", "CHECKPOINT_EVERY=4"
    train(tmp_path, "whole", *settings, "KEEP=9")
    weights = []
    for step in (None, 8, 12):
        output = "whole"
        if step:
            output = f"from {step}"
            start = tmp_path / "whole" / "checkpoints" / f"step-{step:08d}"
            train(tmp_path, output, *settings, flags=["--resume", str(start)])
        last = tmp_path / output / "checkpoints" / "step-00000015"
        weights.append((last / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] == weights[2]
