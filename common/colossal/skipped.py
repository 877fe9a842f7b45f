"""Count the updates that are skipped, without waiting for the device."""

from collections.abc import Mapping

import torch
from torch import Tensor

CHECK_EVERY = 20  # updates between two looks at a GPU's counters, because looking waits for it


class SkipCounter:
    """Counters on ``device`` of the updates that were skipped: all, those in a row up to now, and the longest row."""

    def __init__(self, device: torch.device):
        self.every = 1 if device.type == "cpu" else CHECK_EVERY
        self.updates = 0
        self.all, self.row, self.longest = torch.zeros(3, dtype=torch.int64, device=device).unbind()

    def count(self, skipped: Tensor) -> None:
        """Count one update; ``skipped`` is a 0-dim tensor, 1 if it was skipped and 0 if not."""
        self.updates += 1
        skipped = skipped.long()
        self.all = self.all + skipped
        self.row = (self.row + 1) * skipped
        self.longest = torch.maximum(self.longest, self.row)

    def exceeds(self, limit: int) -> bool:
        """Return whether a row was longer than ``limit``; on a GPU, look at every `CHECK_EVERY`-th update only."""
        return self.updates % self.every == 0 and self.longest.item() > limit

    def state_dict(self) -> dict[str, int]:
        return {"updates": self.updates, "skipped": int(self.all.item()), "skipped_in_a_row": int(self.row.item())}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.updates = state["updates"]
        self.all = torch.full_like(self.all, state["skipped"])
        self.row = torch.full_like(self.row, state["skipped_in_a_row"])
        self.longest = self.row
