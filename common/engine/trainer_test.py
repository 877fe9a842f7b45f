"""The training loop: how it counts, when it evaluates and stops."""

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR

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


def fit(
    hooks: Sequence[BaseHook] = (),
    *,
    batches: int = 4,
    accumulation: int = 1,
    test_batches: int = 0,
    epochs: int = 1,
    build_schedule: Any = lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    by_epoch: bool = False,
    **options: Any,
) -> Trainer:
    """Train a linear model; its learning rate is 1 / (optimizer steps so far + 1), its norm's half
    of that.
    """
    with launched(gradient_accumulation=accumulation):
        norm, linear = model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
        groups = [{"params": norm.parameters(), "lr": 0.5}, {"params": linear.parameters()}]
        optimizer = torch.optim.SGD(groups, lr=1.0)
        schedule = build_schedule(optimizer)
        hooks = [*hooks, LRSchedulerHook(schedule, by_epoch=True)] if by_epoch else hooks
        batch = torch.full((2, 3), float(gpc.get_global_rank())), torch.zeros(2, dtype=torch.long)
        train = [batch] * batches
        test = [batch] * test_batches or None
        engine, train, test, _ = initialize(
            model, optimizer, nn.CrossEntropyLoss(), train, test, schedule
        )
        trainer = Trainer(engine)
        trainer.fit(train, epochs, test_dataloader=test, hooks=list(hooks), **options)
        return trainer


def test_hooks_are_called_in_order_the_first_by_priority():
    called = []

    def build_hook(priority: int) -> BaseHook:
        hook = BaseHook(priority)
        for name in (
            *("after_hook_is_attached", "before_train", "before_train_epoch", "before_train_iter"),
            *("after_train_iter", "after_train_epoch", "before_test", "before_test_epoch"),
            *("before_test_iter", "after_test_iter", "after_test_epoch", "after_test"),
            "after_train",
        ):
            setattr(hook, name, lambda *_, name=name: called.append((name, priority)))
        return hook

    fit([build_hook(9), build_hook(1)], batches=2, test_batches=1)
    assert called[::2] == [(name, 1) for name, _ in called[::2]]
    assert called[1::2] == [(name, 9) for name, _ in called[::2]]
    assert " ".join(name for name, _ in called[::2]) == (
        "after_hook_is_attached before_train before_train_epoch "
        "before_train_iter after_train_iter before_train_iter after_train_iter after_train_epoch "
        "before_test before_test_epoch before_test_iter after_test_iter after_test_epoch "
        "after_test after_train"
    )


def test_counts_with_accumulation():
    counts = Recorder(
        "after_train_iter", lambda t: (t.step, t.update_done, t.cur_step, t.cur_epoch)
    )
    # (last step's, next step's)
    rates = Recorder(
        "after_train_iter", lambda t: (t.learning_rate, t.engine.optimizer.param_groups[1]["lr"])
    )
    fit([counts, rates], batches=5, accumulation=2)
    assert counts.values == [
        (0, False, 0, 0),
        (1, True, 1, 0),
        (1, False, 2, 0),
        (2, True, 3, 1),
    ]
    assert rates.values == [(0, 1), (1, 1 / 2), (1, 1 / 2), (1 / 2, 1 / 3)]


@pytest.mark.parametrize(
    ("accumulation", "max_steps", "evaluated_at"),
    [(1, None, [8, 16, 20]), (2, 5, [4, 5])],
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


# in the middle of an epoch of 6 or more steps, and after two of 2
@pytest.mark.parametrize(
    ("state", "end"), [((5, 0, 5, 0), (9, 2, 1 / 9)), ((4, 2, 0, 4), (8, 3, 1 / 8))]
)
def test_two_epochs_of_a_data_set_whose_size_has_changed_end_with_the_schedule(state, end):
    trainer = fit([resumes(*state)], epochs=2)
    assert (trainer.step, trainer.cur_epoch, trainer.learning_rate) == end


@pytest.mark.parametrize("by_epoch", [False, True])
@pytest.mark.parametrize(
    "build_schedule",
    [
        lambda optimizer: MultiStepLR(optimizer, [1, 3, 7]),
        lambda optimizer: CosineAnnealingWarmupLR(optimizer, 12, warmup_steps=2),
    ],
)
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
    assert resumed == pytest.approx(rates()[9:])


def test_what_a_hook_has_stopped_can_go_on():
    def stop(trainer: Trainer) -> None:
        trainer.stopping = True

    trainer = fit([Recorder("after_train_iter", stop)])
    assert (trainer.step, trainer.stopping) == (1, False)


def statistics_in_evaluation() -> list[list[float]]:
    recorder = Recorder("before_test_iter", lambda t: next(t.engine.model.buffers()).tolist())
    fit([recorder], test_batches=1)
    return recorder.values


def test_all_ranks_evaluate_with_the_statistics_of_the_first():
    assert run_ranks(2, statistics_in_evaluation) == [[[0.0] * 3]] * 2


@pytest.mark.parametrize("is_done", [True, False])
def test_a_gpu_that_is_still_busy_has_not_waited_for_data(is_done, monkeypatch):
    event = SimpleNamespace(record=lambda: None, query=lambda: is_done)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    trainer = Trainer.__new__(Trainer)
    trainer.device = torch.device("cuda")
    trainer.step, trainer.data_wait = 0, 0.0
    loader = (time.sleep(0.01) for _ in range(2))
    assert len(list(trainer._timed(loader))) == 2
    assert (trainer.data_wait >= 0.02) is is_done
