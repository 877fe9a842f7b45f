"""Runs for fault injection: modes, uninterrupted reference results, and comparisons."""

import hashlib
import json
import random
import signal
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from common.checkpoint.save import newest_checkpoint
from common.testing import checkpoints
from common.testing.parity_cases import CASES
from faults.places import Place, at, signal_self
from faults.processes import IMPATIENT, PATIENT, Ended, Inject, Ranks, expect
from imagenet_dali import train_dali
from imagenet_dali.testing import prepare_data, write_config

STEPS = 12
COMMON = """
CHECKPOINT_EVERY = 3
EMA = 0.9
CUTMIX = 0.5
ERASING = 0.25
DATA = dict(workers=1)
LOG = dict(every=2, tensorboard=False)
"""


class Mode(NamedTuple):
    """How a run is started: number of processes (0: one, without a launcher) and lines added to its config."""

    name: str
    size: int = 0
    lines: str = ""

    def but(self, lines: str) -> "Mode":
        return Mode(f"{self.name}, {lines}", self.size, f"{self.lines}\n{lines}")

    def choose_rank(self, choice: random.Random) -> int:
        return choice.randrange(max(1, self.size))


ONE, TWO = Mode("1 process"), Mode("dp2", 2)
# with 3 or more ranks, DDP's summation order depends on its buckets, which it rebuilds after a start
FOUR = Mode("dp4, find_unused_parameters", 4, "torch_ddp = dict(find_unused_parameters=True)")
TENSOR_PARALLEL = {
    name: Mode(name, CASES[name][0], f"parallel = {CASES[name][1]!r}")
    for name in ("1d-2", "2d-4", "2.5d-4", "2.5d-8", "3d-8", "dp2 x 1d-2")
}
ZERO = Mode("zero 3 x 1d-2", 4, f"parallel = {CASES['1d-2'][1]!r}\nzero = dict(stage=3)")
WORKERS = Mode("dp2, torchvision workers", 2, 'DATA = dict(loader="torchvision", workers=2)')
SCALE = "init_scale=2.0**18, growth_interval=3"  # overflows at first, then grows again
PRECISION = [
    Mode("dp2, fp32", 2, "fp16 = None"),
    Mode("TORCH float16", 0, f'fp16 = dict(mode=AMP_TYPE.TORCH, dtype="float16", {SCALE})'),
    Mode("NAIVE", 0, "fp16 = dict(mode=AMP_TYPE.NAIVE)"),
    Mode("dp2, APEX O1", 2, 'fp16 = dict(mode=AMP_TYPE.APEX, opt_level="O1")'),
    Mode("APEX O2", 0, 'fp16 = dict(mode=AMP_TYPE.APEX, opt_level="O2")'),
    Mode("APEX O3", 0, 'fp16 = dict(mode=AMP_TYPE.APEX, opt_level="O3")\nOPTIMIZER = dict(name="adamw")'),
]
BLOCKS = Mode("dp2, blocks", 2, 'DATA = dict(workers=1, order="blocks", block=0.005)')
MODES = [ONE, TWO, FOUR, *TENSOR_PARALLEL.values(), ZERO, WORKERS, BLOCKS, *PRECISION]
# without what depends on a rank's random numbers
NO_CHANCE = 'MODEL["dropout"] = 0.0\nMIXUP = CUTMIX = ERASING = 0.0\nfp16 = None'


class Recovery(NamedTuple):
    """A survived try: whether its result equals the uninterrupted run's, and the seconds lost; None if not compared."""

    equal: bool | None = None
    seconds_lost: float | None = None


class Lab:
    """A folder with the data set and the uninterrupted runs, each created on first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = prepare_data(folder / "data")

    def new_folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.folder)) / "run"

    def reference(self, mode: Mode) -> tuple[float, dict[str, Any]]:
        """Return the seconds and the result of an uninterrupted run."""
        folder = self.folder / "references" / hashlib.sha256(mode.name.encode()).hexdigest()[:12]
        if not (folder / "seconds").exists():
            seconds = Trial(self, mode, folder / "run").run().expect(0).seconds
            (folder / "seconds").write_text(json.dumps(seconds))
        return json.loads((folder / "seconds").read_text()), read_result(folder / "run")


class Trial:
    """The runs of one try, in one mode and folder; ``seconds`` is their total time.

    ``settings`` are KEY=VALUE; ``data`` replaces the lab's data set.
    """

    def __init__(
        self,
        lab: Lab,
        mode: Mode,
        output: Path | None = None,
        settings: Sequence[str] = (),
        data: Path | str | None = None,
    ) -> None:
        self.lab, self.mode, self.seconds = lab, mode, 0.0
        self.output = output or lab.new_folder()
        self.checkpoints = self.output / "checkpoints"
        self.settings = [f"DATA.root={data or lab.data}", *settings]

    @property
    def arguments(self) -> list[str]:
        """The arguments of ``train_dali.py``."""
        config = write_config(Path(tempfile.mkdtemp(dir=self.lab.folder)))
        config.write_text(config.read_text() + COMMON + self.mode.lines + "\n")
        words = [word for setting in self.settings for word in ("--set", setting)]
        return ["--config", str(config), "--output", str(self.output), *words]

    def start(self, inject: Inject | None = None) -> Ranks:
        return Ranks(self.mode.size, partial(train_dali.main, self.arguments), inject)

    def run(self, inject: Inject | None = None, grace: float = IMPATIENT, lost: int | None = None) -> Ended:
        """Run to the end; ``grace`` and ``lost`` as in `Ranks.wait`."""
        ended = self.start(inject).wait(lost, grace)
        self.seconds += ended.seconds
        return ended

    def stop_at_step_10(self) -> "Trial":
        self.run(at(Place("step", 10), partial(signal_self, signal.SIGTERM)), PATIENT).expect(143)
        return self

    def resume(self, *words: str) -> Recovery:
        """Rerun the command, which must succeed and print ``words``; compare with an uninterrupted run."""
        self.run().expect(0, *words)
        return self.compare()

    def compare(self) -> Recovery:
        """Compare the run's result with an uninterrupted one's, and print the differences."""
        seconds, expected = self.lab.reference(self.mode)
        found = read_result(self.output)
        different = [name for name in expected if found.get(name) != expected[name]]
        for name in different:
            print(f"    {self.output}: {name} is not equal", flush=True)
        return Recovery(not different, self.seconds - seconds)


class Fault(NamedTuple):
    """A row of the table: ``inject`` raises `RunLostError`; number of tries, and of those in CI."""

    name: str
    inject: Callable[[Lab, random.Random], Recovery | None]
    tries: int = 1
    quick: int = 1


FAULTS: list[Fault] = []


def fault(name: str, tries: int = 1, quick: int = 1, **options: Any) -> Callable[[Callable], Callable]:
    """Add a row to the table: the decorated function, called with ``options``."""

    def register(inject: Callable) -> Callable:
        FAULTS.append(Fault(name, partial(inject, **options), tries, quick))
        return inject

    return register


def read_result(output: Path) -> dict[str, Any]:
    last = newest_checkpoint(output / "checkpoints")
    expect(last is not None and last.name == f"step-{STEPS:08d}", f"{output}: the last checkpoint is {last}")
    return checkpoints.read_result(output)
