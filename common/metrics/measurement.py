"""What a run does in place of training, with ``--find-lr``, ``--find-batch`` or ``--profile``."""

from pathlib import Path

from common.engine.upstream import BaseHook


class Measurement(BaseHook):
    """Take ``total_steps`` steps without evaluation; rank 0 writes to ``folder``."""

    writes = ""

    def __init__(self, folder: Path, total_steps: int, is_main: bool):
        super().__init__(priority=0)
        self.folder = folder
        self.total_steps = total_steps
        self.is_main = is_main
        self.announcement = (
            f"{total_steps} steps instead of training; nothing is saved but {self.writes} in "
            f"{folder}"
        )
