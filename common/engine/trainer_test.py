"""The training loop: how it counts, when it evaluates and stops."""

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, MultiStepLR

from common.engine.engine import initialize
from common.engine.hooks import LRSchedulerHook
from common.engine.trainer import Trainer
from common.engine.upstream import BaseHook, gpc
from common.testing.ranks import launched, run_ranks


class Recorder(BaseHook):
    """Record what ``read`` returns of the trainer, in every call of the hook's method ``name``."""

    def __init__(self, name: str, read: Callable[[Trainer], Any]) -> None:
        super().__init__(priority=0)
        self.values: list[Any] = []
        setattr(self, name, lambda trainer, *_: self.values.append(read(trainer)))


def resumes(*state: int) -> Recorder:
    """Return a hook that resumes a training at ``state``."""
    names = ("step", "epoch", "epoch_step", "evaluated_step")
    position = dict(zip(names, state, strict=True))
    return Recorder("before_train", lambda trainer: trainer.load_state_dict(position))


def build_falling(optimizer: Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: 1 / (step + 1))


def build_multi_step(optimizer: Optimizer) -> LRScheduler:
    return MultiStepLR(optimizer, [1, 3, 7])


def build_cosine(optimizer: Optimizer) -> LRScheduler:
    return CosineAnnealingWarmupLR(optimizer, 12, warmup_steps=2)


def fit(
    hooks: Sequence[BaseHook] = (),
    *,
    batches: int = 4,
    accumulation: int = 1,
    test_batches: int = 0,
    epochs: int = 1,
    build_schedule: Callable[[Optimizer], LRScheduler] = build_falling,
    by_epoch: bool = False,
    **options: Any,
) -> Trainer:
    """Train a linear model; its learning rate is 1 / (optimizer steps so far + 1), its norm's half
    of that.
    """
    with launched(gradient_accumulation=accumulation):
        norm = nn.BatchNorm1d(3)
        linear = nn.Linear(3, 2)
        model = nn.Sequential(norm, linear)
        groups = [
            {"params": norm.parameters(), "lr": 0.5},
            {"params": linear.parameters()},
        ]
        optimizer = SGD(groups, lr=1.0)
        schedule = build_schedule(optimizer)
        all_hooks = list(hooks)
        if by_epoch:
            all_hooks.append(LRSchedulerHook(schedule, by_epoch=True))
        rank = gpc.get_global_rank()
        images = torch.full((2, 3), float(rank))
        labels = torch.zeros(2, dtype=torch.long)
        batch = images, labels
        engine, train, test, _ = initialize(
            model,
            optimizer,
            nn.CrossEntropyLoss(),
            [batch] * batches,
            [batch] * test_batches or None,
            schedule,
        )
        trainer = Trainer(engine)
        trainer.fit(train, epochs, test_dataloader=test, hooks=all_hooks, **options)
        return trainer


CALLS = (
    "after_hook_is_attached",
    "before_train",
    "before_train_epoch",
    "before_train_iter",
    "after_train_iter",
    "after_train_epoch",
    "before_test",
    "before_test_epoch",
    "before_test_iter",
    "after_test_iter",
    "after_test_epoch",
    "after_test",
    "after_train",
)


def test_hooks_are_called_in_order_the_first_by_priority():
    called = []

    def build_hook(priority: int) -> BaseHook:
        hook = BaseHook(priority)
        for name in CALLS:
            setattr(hook, name, lambda *_, name=name: called.append((name, priority)))
        return hook

    fit([build_hook(9), build_hook(1)], batches=2, test_batches=1)
    names = [
        "after_hook_is_attached",
        "before_train",
        "before_train_epoch",
        "before_train_iter",
        "after_train_iter",
        "before_train_iter",
        "after_train_iter",
        "after_train_epoch",
        "before_test",
        "before_test_epoch",
        "before_test_iter",
        "after_test_iter",
        "after_test_epoch",
        "after_test",
        "after_train",
    ]
    expected = []
    for name in names:
        expected += [(name, 1), (name, 9)]
    assert called == expected


def test_counts_with_accumulation():
    def count(trainer: Trainer) -> tuple:
        return trainer.step, trainer.update_done, trainer.cur_step, trainer.cur_epoch

    def rates_of_last_and_next_step(trainer: Trainer) -> tuple:
        _, linear = trainer.engine.optimizer.param_groups
        return trainer.learning_rate, linear["lr"]

    counts = Recorder("after_train_iter", count)
    rates = Recorder("after_train_iter", rates_of_last_and_next_step)
    fit([counts, rates], batches=5, accumulation=2)
    assert counts.values == [
        (0, False, 0, 0),
        (1, True, 1, 0),
        (1, False, 2, 0),
        (2, True, 3, 1),
    ]
    assert rates.values == [
        (0, 1),
        (1, 1 / 2),
        (1, 1 / 2),
        (1 / 2, 1 / 3),
    ]


@pytest.mark.parametrize(
    ("accumulation", "max_steps", "evaluated_at"),
    [
        (1, None, [8, 16, 20]),
        (2, 5, [4, 5]),
    ],
)
def test_evaluation_and_end(accumulation, max_steps, evaluated_at):
    tests = Recorder("before_test", lambda trainer: (trainer.step, trainer.engine.training))
    steps = Recorder("before_train_iter", lambda trainer: trainer.engine.training)
    trainer = fit(
        [tests, steps],
        test_batches=1,
        epochs=5,
        test_interval=2,
        accumulation=accumulation,
        max_steps=max_steps,
    )
    assert tests.values == [(step, False) for step in evaluated_at]
    assert all(steps.values)
    assert trainer.step == evaluated_at[-1]


@pytest.mark.parametrize(
    ("state", "step", "epoch", "learning_rate"),
    [
        # in the middle of an epoch of 6 or more steps
        ((5, 0, 5, 0), 9, 2, 1 / 9),
        # after two epochs of 2 steps
        ((4, 2, 0, 4), 8, 3, 1 / 8),
    ],
)
def test_two_epochs_of_a_data_set_whose_size_has_changed_end_with_the_schedule(
    state, step, epoch, learning_rate
):
    trainer = fit([resumes(*state)], epochs=2)
    assert trainer.step == step
    assert trainer.cur_epoch == epoch
    assert trainer.learning_rate == learning_rate


@pytest.mark.parametrize("by_epoch", [False, True])
@pytest.mark.parametrize("build_schedule", [build_multi_step, build_cosine])
def test_a_resumed_schedule_and_bar_go_on_at_their_place(build_schedule, by_epoch, capsys):
    def rates(*hooks: BaseHook) -> list[float]:
        recorder = Recorder("after_train_iter", lambda trainer: trainer.learning_rate)
        fit(
            [*hooks, recorder],
            epochs=4,
            build_schedule=build_schedule,
            by_epoch=by_epoch,
            display_progress=True,
        )
        return recorder.values

    resumed = rates(resumes(9, 2, 1, 8))
    assert "[Epoch 3 / Train]: 100%|██████████| 4/4 [" in capsys.readouterr().err
    whole = rates()
    assert resumed == pytest.approx(whole[9:])


def test_what_a_hook_has_stopped_can_go_on():
    def stop(trainer: Trainer) -> None:
        trainer.stopping = True

    trainer = fit([Recorder("after_train_iter", stop)])
    assert trainer.step == 1
    assert not trainer.stopping


def mean_in_evaluation() -> list[float]:
    """Return the batch norm's running mean."""

    def running_mean(trainer: Trainer) -> list[float]:
        mean, *_ = trainer.engine.model.buffers()
        return mean.tolist()

    recorder = Recorder("before_test_iter", running_mean)
    fit([recorder], test_batches=1)
    (value,) = recorder.values
    return value


def test_all_ranks_evaluate_with_the_statistics_of_the_first():
    first, second = run_ranks(2, mean_in_evaluation)
    assert first == [0.0, 0.0, 0.0]
    assert second == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("is_done", [True, False])
def test_a_gpu_that_is_still_busy_has_not_waited_for_data(is_done, monkeypatch):
    event = SimpleNamespace(record=lambda: None, query=lambda: is_done)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    trainer = Trainer.__new__(Trainer)
    trainer.device = torch.device("cuda")
    trainer.step = 0
    trainer.data_wait = 0.0
    loader = (time.sleep(0.01) for _ in range(2))
    batches = list(trainer._timed(loader))
    assert len(batches) == 2
    has_waited = trainer.data_wait >= 0.02
    assert has_waited is is_done
