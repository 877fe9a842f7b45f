"""What every piece of the campaign is given, and how it says that it did not come to its end."""

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
Row = dict[str, Any]


class NotRunError(Exception):
    """What the piece needs is not here."""


class WrongError(Exception):
    """The piece ran to its end and shows that something is wrong."""


class UnfinishedError(Exception):
    """The piece was stopped by its limit, and goes on at the next call."""


@dataclass
class Job:
    """How a piece is to run.

    Attributes:
        tiny: with so little to do that it shows only that everything runs.
        folder: the piece's own; what it holds when the process is killed is there when the piece runs again.
        seconds: its limit.
        data: folders of data sets, by name.
    """

    tiny: bool
    folder: Path
    seconds: float
    data: dict[str, Path] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def seconds_left(self) -> float:
        return self.seconds - (time.monotonic() - self.started)

    def new_folder(self, name: str) -> Path:
        """Return the folder's ``name``, empty."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        (self.folder / name).mkdir(parents=True)
        return self.folder / name

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize()


Piece = Callable[[Job], Iterator[Row]]
