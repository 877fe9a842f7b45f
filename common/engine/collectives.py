"""What ranks tell each other outside of a step: Python objects, and one rank's answer for all."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from common.engine.upstream import ParallelMode, gpc
from common.errors import AgreedError, UserError

Answer = TypeVar("Answer")


def gather(value: Any) -> list[Any]:
    """Return the ``value`` of each rank, in their order; every rank must call it."""
    values = [value] * dist.get_world_size()
    if len(values) > 1:
        # Over gloo, with GPUs too: NCCL would send the bytes through GPU memory.
        dist.all_gather_object(values, value, group=gpc.get_cpu_group(ParallelMode.GLOBAL))
    return values


def ask_first_rank(question: Callable[[], Answer]) -> Answer:
    """Return rank 0's answer to ``question()`` on all ranks.

    Its `UserError` or OSError is raised on all ranks, as `AgreedError`.
    """
    answer: Any = None
    refusal = ""
    if gpc.get_global_rank() == 0:
        try:
            answer = question()
        except (UserError, OSError) as error:
            refusal = str(error)
    # The others wait here for rank 0: its refusal must reach them too.
    answer, refusal = gather((answer, refusal))[0]
    if refusal:
        raise AgreedError(refusal)
    return answer
