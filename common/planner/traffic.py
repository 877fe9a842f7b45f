"""Count the traffic of collectives."""

from collections import Counter, defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# PyTorch's operation: its usual name, and the index of the message argument
COLLECTIVES = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "allgather_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
}
NAMES = tuple(sorted({name for name, _ in COLLECTIVES.values()}))
Route = tuple[str, tuple[int, ...]]  # a collective's name, and the global ranks that it joins


class Traffic(TorchDispatchMode):
    """Count this process's collectives within the context: ``calls`` and message ``nbytes``, by `Route`.

    Includes forward and backward passes, DDP and the optimizer. Raises KeyError for a collective that is not in
    `COLLECTIVES`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Route] = Counter()
        self.nbytes: Counter[Route] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function.namespace == "c10d" and function._opname not in ("barrier", "monitored_barrier_"):
            name, message = COLLECTIVES[function._opname]
            group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
            route = name, tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group)))
            self.calls[route] += 1
            self.nbytes[route] += sum(leaf.nbytes for leaf in tree_leaves(args[message]) if isinstance(leaf, Tensor))
        return function(*args, **(kwargs or {}))

    @property
    def sent(self) -> dict[str, float]:
        """Bytes sent by this process with ring algorithms, by collective."""
        sent: defaultdict[str, float] = defaultdict(float)
        for (name, ranks), nbytes in self.nbytes.items():
            sent[name] += sent_share(name, len(ranks)) * nbytes
        return dict(sent)


def sent_share(name: str, size: int) -> float:
    """Return the ratio of bytes sent per process to message bytes, averaged over a group of ``size``.

    For ring algorithms, which are optimal (Patarasuk and Yuan, 2009).
    """
    return (2 if name == "all_reduce" else 1) * (size - 1) / size
