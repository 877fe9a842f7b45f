"""Our training and evaluation, as cifar10_benchmark/train.py runs them, for `step.py` to measure."""

import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from job import CONFIG, Job, RoundBatches, build_ours
from loops import PRECISION

from common.colossal import BaseHook, Trainer, initialize, shard_model
from common.config.batch_plan import DataSummary
from common.run.start import Run, start_run
from common.tools.harness import Rounds

EVALUATED = 10_000  # images of CIFAR-10's test split


def ours(job: Job, rounds: Rounds) -> None:
    """Train as cifar10_benchmark/train.py does, with all its hooks."""
    with TemporaryDirectory() as folder:
        run = _start(job, Path(folder))
        model, optimizer, criterion, schedule = build_ours(job)
        model = shard_model(model)
        hooks = run.build_hooks(model, optimizer)
        spent = Spent(hooks)
        engine, loader, _, schedule = initialize(
            model, optimizer, criterion, RoundBatches(job, rounds, spent.take), None, schedule
        )
        Trainer(engine).fit(loader, 1, job.total_steps, hooks=hooks)


def our_evaluation(job: Job, rounds: Rounds) -> None:
    """Evaluate ``job.steps`` batches a round as our trainer does."""
    with TemporaryDirectory() as folder:
        run = _start(job, Path(folder))
        model, optimizer, criterion, schedule = build_ours(job)
        hooks = run.build_hooks(model, optimizer)
        spent = Spent(hooks)
        batches = job.batches()
        images, labels = batches[0]
        engine, train, test, schedule = initialize(
            model,
            optimizer,
            criterion,
            Batches([(images[:1], labels[:1])]),
            list(islice(cycle(batches), job.steps)),
            schedule,
        )
        Trainer(engine).fit(train, job.rounds, None, test, hooks=[*hooks, _EvaluationRounds(rounds, spent)])


class _EvaluationRounds(BaseHook):
    """Make each evaluation a round; between them, one step with one image makes an epoch.

    A round ends before its figures are written, which is the hooks' time: it hands in what that took the last time.
    """

    def __init__(self, rounds: Rounds, spent: "Spent") -> None:
        super().__init__(priority=-1)  # before the metrics
        self.rounds, self.spent = rounds, spent

    def before_test(self, trainer: Trainer) -> None:
        self.rounds.start()

    def after_test(self, trainer: Trainer) -> None:
        self.rounds.stop(self.spent.take())


class Spent:
    """The seconds that hooks' methods take: those of a training step, of an evaluated batch, and at its end.

    By the wall clock: reading the CPU clock takes a system call, which is longer than what it would measure.
    """

    POINTS = ("after_train_iter", "after_test_iter", "after_test")

    def __init__(self, hooks: Iterable[BaseHook]) -> None:
        self.seconds = dict.fromkeys(self.POINTS, 0.0)
        for hook in hooks:
            for point in self.POINTS:
                setattr(hook, point, partial(self._call, point, getattr(hook, point)))

    def _call(self, point: str, method: Callable[..., None], *args: Any) -> None:
        started = time.perf_counter()
        method(*args)
        self.seconds[point] += time.perf_counter() - started

    def take(self) -> dict[str, float]:
        """Return the seconds spent since the last call."""
        spent, self.seconds = self.seconds, dict.fromkeys(self.POINTS, 0.0)
        return spent


class Batches(list):
    """A list of batches that is asked for a position, as `RoundBatches` is."""

    def state_dict(self) -> dict[str, int]:
        return {}


def _start(job: Job, folder: Path) -> Run:
    """Start a run of one process over a data set that is as large as the job needs it."""
    (folder / "data").mkdir()
    (folder / "data" / "unread").touch()
    precision = "fp16.mode=AMP_TYPE.TORCH" if PRECISION == "bfloat16" else "fp16=None"
    settings = [*job.settings, precision, f"DATA.root={folder}/data", f"MAX_STEPS={job.total_steps}"]
    arguments = ["--config", CONFIG, "--output", str(folder / "run")]
    samples = job.config["TOTAL_BATCH_SIZE"] * job.total_steps
    words = [word for setting in settings for word in ("--set", setting)]
    return start_run([*arguments, *words], __doc__, lambda _: DataSummary(samples, EVALUATED, 10, fingerprint="none"))
