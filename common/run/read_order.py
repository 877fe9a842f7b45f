"""The order in which a run reads its shards, and why."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.checkpoint.content import read_about
from common.config.plan import DataSummary
from common.data.block_order import window_bytes
from common.files import is_url
from common.hardware import memory_bytes


def choose_order(
    config: Mapping[str, Any], data: DataSummary, processes: int, start_from: Path | None = None
) -> tuple[str | None, str]:
    """Return ``DATA.order`` and a message that explains it; (None, "") for data that is not in shards.

    A resumed run keeps its order on any host. ``processes`` is the number of data-parallel ones.
    """
    options, memory = config["DATA"], memory_bytes()
    order = options["order"]
    if not data.shard_bytes:
        return order, ""
    if order:
        why = "set by DATA.order"
    elif start_from:
        # "random" was the only order of older runs
        order, why = read_about(start_from)["config"]["DATA"].get("order") or "random", "as before"
    else:
        is_remote = is_url(options.get("root"))
        is_large = is_remote or data.shard_bytes > memory
        order = "blocks" if is_large and data.is_shuffled else "random"
        does = "are remote" if is_remote else f"{'exceed' if is_large else 'fit into'} the {_size(memory)} of memory"
        why = f"since {_size(data.shard_bytes)} of training shards {does}"
        why += " but are sorted by class: prepare them again for large reads" if is_large and order == "random" else ""
    cache = options.get("cache")
    caching = f"; caching up to {options['cache_gb']:g} GB in {cache}" if cache else ""
    if order == "random":
        return order, f"in random order, {why}{caching}"
    held = min(data.shard_bytes, window_bytes(1e6 * options["block"], options["window"], processes))
    return order, f"in blocks, {why}; holding up to {_size(held)} of them per process{caching}"


def warn_of_order(options: Mapping[str, Any], data: DataSummary) -> str:
    """Return a warning where ``DATA`` reads single records of remote shards, else an empty string."""
    if options["order"] != "random" or not (data.shard_bytes and is_url(options["root"])):
        return ""
    files = f", and DATA.cache={options['cache']} will hold as many files" if options["cache"] else ""
    return (
        f"warning: DATA.order='random' asks {options['root']} for each of {data.train_samples:,} images by itself"
        f"{files}; "
        + ("set DATA.order='blocks'" if data.is_shuffled else "prepare the data set again, shuffled, for 'blocks'")
    )


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:,.1f} MB"
