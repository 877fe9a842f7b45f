"""Our training and evaluation, as cifar10_benchmark/train.py runs them, for `step.py` to measure."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from job import CONFIG, Job, RoundBatches, build_ours
from loops import PRECISION

from common.colossal import BaseHook, Trainer, initialize, shard_model
from common.config.batch_plan import DataSummary
from common.run.start import start_run
from common.tools.harness import Rounds


def ours(job: Job, rounds: Rounds) -> None:
    """Train as cifar10_benchmark/train.py does, with all its hooks."""
    with _open_trainer(job, RoundBatches(job, rounds)) as (trainer, loader, _, hooks):
        trainer.fit(loader, 1, job.total_steps, hooks=hooks)


def our_evaluation(job: Job, rounds: Rounds) -> None:
    """Evaluate ``job.steps`` batches a round as our trainer does; an epoch between two is one step with one image."""
    batches = job.batches()
    images, labels = batches[0]
    loaders = _Batches([(images[:1], labels[:1])]), list(islice(cycle(batches), job.steps))
    with _open_trainer(job, *loaders) as (trainer, train, test, hooks):
        trainer.fit(train, job.rounds, None, test, hooks=[*hooks, _EvaluationRounds(rounds)])


class _EvaluationRounds(BaseHook):
    """Make each evaluation a round, which ends before its metrics are written and drawn."""

    def __init__(self, rounds: Rounds) -> None:
        super().__init__(priority=-1)  # before the metrics
        self.rounds = rounds

    def before_test(self, trainer: Trainer) -> None:
        self.rounds.start()

    def after_test(self, trainer: Trainer) -> None:
        self.rounds.stop({})


class _Batches(list):
    """A list of batches that is asked for a position, as `RoundBatches` is."""

    def state_dict(self) -> dict[str, int]:
        return {}


@contextmanager
def _open_trainer(job: Job, train: Any, test: Any = None) -> Iterator[tuple[Trainer, Any, Any, list[BaseHook]]]:
    """Start a run of one process, over a data set that is as large as the job needs it; yield what `fit` takes."""
    with TemporaryDirectory() as folder:
        precision = "fp16.mode=AMP_TYPE.TORCH" if PRECISION == "bfloat16" else "fp16=None"
        Path(folder, "unread").touch()  # the folder of the data must not be empty
        settings = [*job.settings, precision, f"DATA.root={folder}", f"MAX_STEPS={job.total_steps}"]
        words = [word for setting in settings for word in ("--set", setting)]
        data = DataSummary(job.config["TOTAL_BATCH_SIZE"] * job.total_steps, 10_000, 10, fingerprint="none")
        run = start_run(["--config", CONFIG, "--output", f"{folder}/run", *words], __doc__, lambda _: data)
        model, optimizer, criterion, schedule = build_ours(job)
        model = shard_model(model)
        hooks = run.build_hooks(model, optimizer)
        engine, train, test, _ = initialize(model, optimizer, criterion, train, test, schedule)
        yield Trainer(engine), train, test, hooks
