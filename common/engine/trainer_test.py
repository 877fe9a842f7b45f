"""The training loop: what hooks see and when, how it counts, when it evaluates and stops."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, MultiStepLR

from common.engine.engine import initialize
from common.engine.hooks import LRSchedulerHook
from common.engine.trainer import Trainer
from common.engine.upstream import BaseHook, gpc
from common.testing.ranks import launched, run_ranks


class Recorder(BaseHook):
    """Records every call, with what ``read`` returns of the trainer."""

    def __init__(self, read: Any = lambda trainer: None) -> None:
        super().__init__(priority=0)
        self.read, self.values = read, []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith(("before_", "after_")):
            return super().__getattribute__(name)
        return lambda trainer, *_: self.values.append((name, self.read(trainer)))

    def seen(self, name: str) -> list[Any]:
        return [value for called, value in self.values if called == name]


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
        train, test = [batch] * batches, [batch] * test_batches or None
        engine, train, test, _ = initialize(
            model, optimizer, nn.CrossEntropyLoss(), train, test, schedule
        )
        trainer = Trainer(engine)
        trainer.fit(train, epochs, test_dataloader=test, hooks=list(hooks), **options)
        return trainer


def test_hooks_are_called_in_order():
    recorder = Recorder()
    fit([recorder], batches=2, test_batches=1)
    called = " ".join(name for name, _ in recorder.values)
    assert called == (
        "after_hook_is_attached before_train before_train_epoch "
        "before_train_iter after_train_iter before_train_iter after_train_iter after_train_epoch "
        "before_test before_test_epoch before_test_iter after_test_iter after_test_epoch "
        "after_test after_train"
    )


def test_counts_with_accumulation():
    counts = Recorder(lambda t: (t.step, t.update_done, t.cur_step, t.cur_epoch))
    rates = Recorder(lambda t: (t.learning_rate, t.engine.optimizer.param_groups[1]["lr"]))
    fit([counts, rates], batches=5, accumulation=2)
    assert counts.seen("after_train_iter") == [
        (0, False, 0, 0),
        (1, True, 1, 0),
        (1, False, 2, 0),
        (2, True, 3, 1),
    ]
    # The rates are (last step's, next step's).
    assert rates.seen("after_train_iter") == [(0, 1), (1, 1 / 2), (1, 1 / 2), (1 / 2, 1 / 3)]


@pytest.mark.parametrize(
    ("accumulation", "max_steps", "evaluated_at"),
    [(1, None, [8, 16, 20]), (2, 5, [4, 5])],
)
def test_evaluation_and_end(accumulation, max_steps, evaluated_at):
    recorder = Recorder(lambda trainer: (trainer.step, trainer.engine.training))
    trainer = fit(
        [recorder],
        test_batches=1,
        epochs=5,
        test_interval=2,
        accumulation=accumulation,
        max_steps=max_steps,
    )
    assert recorder.seen("before_test") == [(step, False) for step in evaluated_at]
    assert all(is_training for _, is_training in recorder.seen("before_train_iter"))
    assert trainer.step == evaluated_at[-1]


class Resumes(BaseHook):
    def __init__(self, *state: int) -> None:
        super().__init__(priority=0)
        self.state = dict(
            zip(("step", "epoch", "epoch_step", "evaluated_step"), state, strict=True)
        )

    def before_train(self, trainer: Trainer) -> None:
        trainer.load_state_dict(self.state)


# in the middle of an epoch of 6 or more steps, and after two of 2
@pytest.mark.parametrize(
    ("state", "end"), [((5, 0, 5, 0), (9, 2, 1 / 9)), ((4, 2, 0, 4), (8, 3, 1 / 8))]
)
def test_two_epochs_of_a_data_set_whose_size_has_changed_end_with_the_schedule(state, end):
    trainer = fit([Resumes(*state)], epochs=2)
    assert (trainer.step, trainer.cur_epoch, trainer.learning_rate) == end


@pytest.mark.parametrize("by_epoch", [False, True])
@pytest.mark.parametrize(
    "build_schedule",
    [
        lambda optimizer: MultiStepLR(optimizer, [1, 3, 7]),
        lambda optimizer: CosineAnnealingLR(optimizer, 12),
        lambda optimizer: CosineAnnealingWarmupLR(optimizer, 12, warmup_steps=2),
    ],
)
def test_a_resumed_schedule_and_bar_go_on_at_their_place(build_schedule, by_epoch, capsys):
    def rates(*hooks: BaseHook) -> list[float]:
        recorder = Recorder(lambda trainer: trainer.learning_rate)
        fit(
            [*hooks, recorder],
            epochs=4,
            build_schedule=build_schedule,
            by_epoch=by_epoch,
            display_progress=True,
        )
        return recorder.seen("after_train_iter")

    resumed = rates(Resumes(9, 2, 1, 8))
    assert "[Epoch 3 / Train]: 100%|██████████| 4/4 [" in capsys.readouterr().err
    assert resumed == pytest.approx(rates()[9:])


def statistics_in_evaluation() -> list[list[float]]:
    recorder = Recorder(lambda trainer: next(trainer.engine.model.buffers()).tolist())
    fit([recorder], test_batches=1)
    return recorder.seen("before_test_iter")


def test_all_ranks_evaluate_with_the_statistics_of_the_first():
    assert run_ranks(2, statistics_in_evaluation) == [[[0.0] * 3]] * 2
