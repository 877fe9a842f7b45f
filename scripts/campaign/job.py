"""What every piece of the campaign is given, and how it says that it was not run."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]


class NotRun(Exception):
    """What a piece needs is not here."""


@dataclass
class Job:
    """How a piece is to run: with ``tiny`` shapes, in ``folder``, within ``seconds``, with CIFAR-10 in ``cifar``."""

    tiny: bool
    folder: Path
    seconds: float
    cifar: Path | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

    @property
    def seconds_left(self) -> float:
        return self.seconds - (time.monotonic() - self.started)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
