"""Collectives as NCCL may run them, on CPUs: late results, and the order on each rank.

With gloo a result is often there before its `wait()`, and two ranks may start the collectives of
two groups in different orders. On GPUs the first is a race, the second a deadlock.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

UPSTREAM = "colossalai.legacy.communication.collective"
# A collective as a rank sees it: operation, group's name and ranks, type, numbers, root.
Entry = tuple[str, str, tuple[int, ...], str, int, tuple[int, ...]]


class Ledger(TorchDispatchMode):
    """Record the collectives of this rank within the context, DDP's and FSDP's too.

    Attributes:
        entries: the collectives in the order in which they were started.
        pending: asynchronous ones of Python code that nothing has waited for yet.
        asynchronous: how many there were.
    """

    def __init__(self):
        super().__init__()
        self.entries: list[Entry] = []
        self.pending = 0
        self.asynchronous = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            leaves = tree_leaves(args)
            (group,) = (
                dist.ProcessGroup.unbox(leaf)
                for leaf in leaves
                if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf)
            )
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            is_uneven = function._opname == "alltoall_base_"
            # root, and the tensor of the list; not the sizes that each rank sends
            numbers = () if is_uneven else tuple(n for n in leaves if type(n) is int)
            numel = 0 if is_uneven or not tensors else tensors[0].numel()
            dtype = str(tensors[0].dtype) if tensors else ""
            ranks = tuple(dist.get_process_group_ranks(group))
            entry = (function._opname, group.group_name, ranks, dtype, numel, numbers)
            self.entries.append(entry)
        return function(*args, **(kwargs or {}))


class LateWork:
    """The handle of an asynchronous collective, whose result is not in its place before `wait`."""

    def __init__(self, ledger: Ledger, work: Any, place: Tensor, result: Tensor):
        self.ledger = ledger
        self.work = work
        self.place = place
        self.result: Tensor | None = result
        ledger.pending += 1
        ledger.asynchronous += 1

    def wait(self, *timeout: Any) -> bool:
        self.work.wait(*timeout)
        if self.result is not None:
            self.place.copy_(self.result)
            self.result = None
            self.ledger.pending -= 1
        return True


def _late(start: Callable[..., Any], ledger: Ledger, root: str | None) -> Callable[..., Any]:
    """Make the asynchronous calls of a function of torch.distributed late.

    ``root`` is its argument for the only rank that keeps ("src") or gets ("dst") a result.
    """

    @functools.wraps(start)
    def call(place: Tensor, *args: Any, **options: Any) -> Any:
        if not options.get("async_op"):
            return start(place, *args, **options)
        is_root = root is not None and options[root] == dist.get_rank()
        with torch.no_grad():
            result = place.detach().clone()
            work = start(result, *[_copied(arg) for arg in args], **options)
            if is_root == (root == "dst"):
                place.detach().fill_(torch.nan)
            return LateWork(ledger, work, place.detach(), result)

    return call


def _copied(arg: Any) -> Any:
    return arg.detach().clone() if isinstance(arg, Tensor) else arg


@contextmanager
def late_collectives() -> Iterator[Ledger]:
    """Withhold the results of asynchronous collectives until `wait()`; record all of them."""
    ledger = Ledger()
    roots = {"broadcast": "src", "reduce": "dst", "all_reduce": None}
    roots |= dict.fromkeys(("all_gather_into_tensor", "reduce_scatter_tensor"))
    # Colossal-AI calls two by names of its own.
    others = {
        "all_gather_into_tensor": f"{UPSTREAM}._all_gather_func",
        "reduce_scatter_tensor": f"{UPSTREAM}._reduce_scatter_func",
    }
    with ExitStack() as stack:
        for name, root in roots.items():
            late = _late(getattr(dist, name), ledger, root)
            stack.enter_context(mock.patch.object(dist, name, late))
            if name in others:
                stack.enter_context(mock.patch(others[name], late))
        stack.enter_context(ledger)
        yield ledger


def stall(ledgers: Sequence[Sequence[Entry]]) -> str | None:
    """Return where GPUs that run the ledgers of their ranks in order wait forever, if they do.

    A collective runs when it is the next one on all of its ranks. Two of them may only be in wrong
    orders by way of others: rows and columns of a square have one rank in common.
    """
    done = [0] * len(ledgers)
    while True:
        following = [ledger[index:][:1] for ledger, index in zip(ledgers, done, strict=True)]
        running = {
            entry
            for entries in following
            for entry in entries
            if all(following[rank] == [entry] for rank in entry[2])
        }
        if not running:
            break
        for rank, entries in enumerate(following):
            done[rank] += running.issuperset(entries) and len(entries)
    waiting = {rank: entries[0] for rank, entries in enumerate(following) if entries}
    return f"ranks wait for each other: {waiting}" if waiting else None
