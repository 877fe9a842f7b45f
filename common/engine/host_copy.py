"""Values of the device that the host reads later, without emptying the device's queue."""

import torch
from torch import Tensor


class HostCopy:
    """The values of ``tensor`` as they are at this place in the queue of its device.

    `read` waits until the device has come here. So a GPU's are read steps later, when it has: a
    read at once would wait until its queue is empty. On a CPU it ``is_ready``.
    """

    def __init__(self, tensor: Tensor):
        self.is_ready = tensor.device.type == "cpu"
        if self.is_ready:
            self.values = tensor.clone()
            return
        self.values = torch.empty(tensor.shape, dtype=tensor.dtype).pin_memory()
        self.values.copy_(tensor, non_blocking=True)
        self.arrived = torch.cuda.Event()
        self.arrived.record()

    def read(self) -> Tensor:
        """Return the values on the CPU."""
        if not self.is_ready:
            self.arrived.synchronize()
        return self.values
