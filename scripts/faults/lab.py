"""The runs that faults are injected into: modes, their uninterrupted results, and how two results are compared."""

import hashlib
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file

from common.checkpoint.save import RANDOM, load_trainer_state, newest_checkpoint
from common.errors import run_command
from common.metrics.writers import read_metrics
from common.testing.parity_cases import CASES
from faults.places import Place, at, stop
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
MEASURED = ("time", "samples_per_s", "data_wait", "peak_memory_gb", "mfu")


@dataclass(frozen=True)
class Mode:
    """How a run is made: its processes (0: one, without a launcher), and lines for its config."""

    name: str
    size: int = 0
    lines: str = ""

    def but(self, lines: str) -> "Mode":
        """Return this mode with more lines."""
        return Mode(f"{self.name}, {lines}", self.size, f"{self.lines}\n{lines}")

    def choose_rank(self, choice: random.Random) -> int:
        return choice.randrange(max(1, self.size))


def _parallel(name: str) -> Mode:
    size, parallel = CASES[name]
    return Mode(name, size, f"parallel = {parallel!r}")


ONE, TWO = Mode("1 process"), Mode("dp2", 2)
# with 3 ranks or more, the order in which DDP adds up depends on its buckets, which it rebuilds after a start
FOUR = Mode("dp4, find_unused_parameters", 4, "torch_ddp = dict(find_unused_parameters=True)")
TENSOR_PARALLEL = {name: _parallel(name) for name in ("1d-2", "2d-4", "2.5d-4", "2.5d-8", "3d-8", "dp2 x 1d-2")}
WORKERS = Mode("dp2, torchvision workers", 2, 'DATA = dict(loader="torchvision", workers=2)')
SCALE = "init_scale=2.0**18, growth_interval=3"  # overflows at first, and grows again
PRECISION = [
    Mode("dp2, fp32", 2, "fp16 = None"),
    Mode("TORCH float16", 0, f'fp16 = dict(mode=AMP_TYPE.TORCH, dtype="float16", {SCALE})'),
    Mode("NAIVE", 0, "fp16 = dict(mode=AMP_TYPE.NAIVE)"),
    Mode("dp2, APEX O1", 2, 'fp16 = dict(mode=AMP_TYPE.APEX, opt_level="O1")'),
    Mode("APEX O2", 0, 'fp16 = dict(mode=AMP_TYPE.APEX, opt_level="O2")'),
    Mode("APEX O3", 0, 'fp16 = dict(mode=AMP_TYPE.APEX, opt_level="O3")\nOPTIMIZER = dict(name="adamw")'),
]
MODES = [ONE, TWO, FOUR, *TENSOR_PARALLEL.values(), WORKERS, *PRECISION]
# other ranks draw other masks and pairs
NO_CHANCE = 'MODEL["dropout"] = 0.0\nMIXUP = CUTMIX = ERASING = 0.0\nfp16 = None'


class Recovery(NamedTuple):
    """How a try that survived went: whether the weights, and all else, came out equal, and how many seconds it took.

    The latter is what the runs took beyond the uninterrupted one; None where there is no such comparison.
    """

    equal: bool | None = None
    seconds_lost: float | None = None


class Lab:
    """A folder with the data set and the uninterrupted runs, which are made when they are needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = prepare_data(folder / "data")

    def new_folder(self) -> Path:
        """Return a folder that does not exist yet."""
        return Path(tempfile.mkdtemp(dir=self.folder)) / "run"

    def arguments(self, mode: Mode, output: Path, settings: Sequence[str] = (), data: Path | None = None) -> list[str]:
        """Return the arguments of ``train_dali.py`` for a run in ``mode`` into ``output``."""
        config = write_config(Path(tempfile.mkdtemp(dir=self.folder)))
        config.write_text(config.read_text() + COMMON + mode.lines + "\n")
        settings = [f"DATA.root={data or self.data}", *settings]
        return ["--config", str(config), "--output", str(output), *(w for s in settings for w in ("--set", s))]

    def start(self, mode: Mode, output: Path, inject: Inject | None = None, **options: Any) -> Ranks:
        """Start a run; ``options`` are those of `arguments`."""
        arguments = self.arguments(mode, output, **options)
        return Ranks(mode.size, partial(run_command, train_dali.main, arguments), self.new_folder(), inject)

    def run(
        self, mode: Mode, output: Path, inject: Inject | None = None, grace: float = IMPATIENT, **options: Any
    ) -> Ended:
        """Run to the end; where a rank fails, the others have ``grace`` seconds."""
        return self.start(mode, output, inject, **options).wait(grace=grace)

    def reference(self, mode: Mode) -> tuple[float, dict[str, Any]]:
        """Return the seconds and the result of an uninterrupted run."""
        folder = self.folder / "references" / hashlib.sha256(mode.name.encode()).hexdigest()[:12]
        if not (folder / "seconds").exists():
            seconds = self.run(mode, folder / "run").expect(0).seconds
            (folder / "seconds").write_text(json.dumps(seconds))
        return json.loads((folder / "seconds").read_text()), result(folder / "run")


class Trial:
    """The runs of one try, in one mode and into one folder; ``seconds`` is what all of them took."""

    def __init__(self, lab: Lab, mode: Mode, output: Path | None = None) -> None:
        self.lab, self.mode, self.seconds = lab, mode, 0.0
        lab.reference(mode)  # before what is injected, which may slow down the machine
        self.output = output or lab.new_folder()
        self.checkpoints = self.output / "checkpoints"

    def run(self, inject: Inject | None = None, grace: float = IMPATIENT, **options: Any) -> Ended:
        """Run to the end, as `Lab.run` does."""
        ended = self.lab.run(self.mode, self.output, inject, grace, **options)
        self.seconds += ended.seconds
        return ended

    def stop_at_step_10(self) -> "Trial":
        self.run(at(Place("step", 10), stop), PATIENT).expect(143)
        return self

    def resume(self, *words: str) -> Recovery:
        """Rerun the command, which has to end well and to print ``words``; return what it came to."""
        self.run().expect(0, *words)
        return Recovery(self.is_equal(), self.seconds_lost)

    @property
    def seconds_lost(self) -> float:
        return self.seconds - self.lab.reference(self.mode)[0]

    def is_equal(self) -> bool:
        """Return whether the run came to the same end as an uninterrupted one; print in what not."""
        expected, found = self.lab.reference(self.mode)[1], result(self.output)
        different = [name for name in expected if found.get(name) != expected[name]]
        for name in different:
            print(f"    {self.output}: {name} is not equal", flush=True)
        return not different


@dataclass(frozen=True)
class Fault:
    """A row of the table: ``inject`` raises `RunLostError`; so many ``tries``, and how many in a quick round."""

    name: str
    inject: Callable[[Lab, random.Random], Recovery]
    tries: int = 1
    quick: int = 1


FAULTS: list[Fault] = []


def fault(name: str, tries: int = 1, quick: int = 1, **options: Any) -> Callable[[Callable], Callable]:
    """Add a row to the table: the function that is decorated, called with ``options``."""

    def register(inject: Callable) -> Callable:
        FAULTS.append(Fault(name, partial(inject, **options), tries, quick))
        return inject

    return register


def result(output: Path) -> dict[str, Any]:
    """Return what a run ended with, without figures that are measured."""
    last = newest_checkpoint(output / "checkpoints")
    expect(last is not None and last.name == f"step-{STEPS:08d}", f"{output}: the last checkpoint is {last}")
    state = load_trainer_state(last)
    # a library that is imported late draws from Python's generator, once in a process
    random_states = {n: t.tolist() for n, t in load_file(last / RANDOM).items() if not n.endswith("/python")}
    figures = [{k: v for k, v in record.items() if k not in MEASURED} for record in read_metrics(output)]
    files = {file.name: file.read_bytes() for file in last.glob("*.safetensors") if file.name != RANDOM}
    return files | {"trainer.json": state, "random numbers": random_states, "metrics.jsonl": figures}
