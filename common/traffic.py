"""Count what a process sends to others through collectives."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# PyTorch's operation: its usual name, which of its arguments holds the message, and how many times its bytes a process
# of a group of n sends, on average over the group, by ring algorithms (optimal: Patarasuk and Yuan, 2009)
COLLECTIVES = {
    "allreduce_": ("all_reduce", 0, lambda n: 2 * (n - 1) / n),
    "allreduce_coalesced_": ("all_reduce", 0, lambda n: 2 * (n - 1) / n),
    "allgather_": ("all_gather", 0, lambda n: (n - 1) / n),
    "_allgather_base_": ("all_gather", 0, lambda n: (n - 1) / n),
    "reduce_scatter_": ("reduce_scatter", 1, lambda n: (n - 1) / n),
    "_reduce_scatter_base_": ("reduce_scatter", 1, lambda n: (n - 1) / n),
    "broadcast_": ("broadcast", 0, lambda n: (n - 1) / n),
    "reduce_": ("reduce", 0, lambda n: (n - 1) / n),
}
NAMES = tuple(sorted({name for name, _, _ in COLLECTIVES.values()}))


class Traffic(TorchDispatchMode):
    """Within the context, add up in ``sent`` the bytes that this process sends, by collective.

    A message counts as a ring algorithm sends it, whatever the backend does. Forward and backward passes, DDP's own
    reductions and the optimiser's are counted alike. Raises KeyError for a collective that is not in `COLLECTIVES`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function.namespace == "c10d" and function._opname not in ("barrier", "monitored_barrier_"):
            name, message, share = COLLECTIVES[function._opname]
            group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
            size = torch.distributed.ProcessGroup.unbox(group).size()
            nbytes = sum(leaf.nbytes for leaf in tree_leaves(args[message]) if isinstance(leaf, Tensor))
            self.sent[name] += share(size) * nbytes
        return function(*args, **(kwargs or {}))
