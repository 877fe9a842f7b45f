"""What every piece is given: how large, where, for how long, on which device."""

import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from common.hardware import is_fast
from common.tools.harness import Row


@dataclass
class Job:
    """How a piece is to run.

    Attributes:
        tiny: with so little to do that it shows only that everything runs.
        folder: the piece's own; an unfinished piece finds in it what it left.
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
    def has_bfloat16(self) -> bool:
        return self.on_gpu or is_fast("bfloat16")

    def lacks(self, mode: str) -> Row:
        """Return a row that says why ``mode``, named after its number format, is not run here; empty if it is."""
        return {"not_run": "this CPU has no bfloat16"} if mode.endswith("bf16") and not self.has_bfloat16 else {}

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
