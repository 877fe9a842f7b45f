"""The order in which the training shards are read."""

from pathlib import Path
from typing import NamedTuple

from common.checkpoint.content import read_metadata
from common.config.plan import DataSummary
from common.data.sampler import window_bytes
from common.hardware import memory_bytes
from common.run.checks import Prepared
from common.text import describe_bytes


class ReadingOrder(NamedTuple):
    """The order in which the training shards are read, None without shards."""

    order: str | None = None
    why: str = ""


def choose_order(prepared: Prepared, start_from: Path | None = None) -> ReadingOrder:
    """Choose the order in which the training shards are read.

    A resumed run keeps its order on any host.
    """
    data = prepared.data
    if not data or not data.shard_bytes:
        return ReadingOrder()
    # Another order would show some images twice in the epoch that is resumed.
    options = prepared.config["DATA"]
    saved = read_metadata(start_from)["plan"]["order"] if start_from else None
    if options["sampling"]:
        reading = ReadingOrder("random", "as DATA.sampling draws single images")
    elif options["order"]:
        reading = ReadingOrder(options["order"], "set by DATA.order")
    elif saved:
        reading = ReadingOrder(saved, "as before")
    else:
        reading = _fit_order(data)
    if reading.order == "random":
        return ReadingOrder("random", f"in random order, {reading.why}")
    window = window_bytes(1e6 * options["block"], options["window"], prepared.plan.data_parallel)
    most = describe_bytes(min(data.shard_bytes, window))
    why = f"in blocks, {reading.why}; holding up to {most} of them per process"
    return ReadingOrder(reading.order, why)


def _fit_order(data: DataSummary) -> ReadingOrder:
    """Choose random order for what memory can cache, blocks for more."""
    memory = memory_bytes()
    is_large = data.shard_bytes > memory
    does = "exceed" if is_large else "fit into"
    size = describe_bytes(data.shard_bytes)
    why = f"since {size} of training shards {does} the {describe_bytes(memory)} of memory"
    if is_large and data.is_shuffled:
        return ReadingOrder("blocks", why)
    if is_large:
        # a block of shards sorted by class would have few classes
        why += " but are sorted by class: prepare them again for large reads"
    return ReadingOrder("random", why)
