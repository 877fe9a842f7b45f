"""Nothing in a training step waits for the device."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from common.colossal import AMP_TYPE, Trainer
from common.colossal.step_optimizer import CHECK_EVERY
from common.config.plan import Plan
from common.metrics.hook import MetricsHook
from common.model.training import build_training
from common.testing.host_sync import forbid_waiting
from common.testing.ranks import launched

MODEL = dict(image_size=16, patch_size=8, width=16, depth=2, heads=2, num_classes=3)
PLAN = Plan(1, 1, 1, 4, 2, 8, 1, 100, 10, 100, 100)
CPU = torch.device("cpu")
VALUES = torch.arange(4.0)


@pytest.mark.parametrize(
    "work",
    [
        lambda: VALUES.sum().item(),
        lambda: bool(VALUES[0] > 0),
        lambda: VALUES[VALUES > 1],
        lambda: VALUES.nonzero(),
        lambda: torch.equal(VALUES, VALUES),
    ],
)
def test_sees_what_waits(work: Callable[[], object]) -> None:
    with forbid_waiting(CPU), pytest.raises(RuntimeError, match="would wait for a GPU"):
        work()


def test_lets_pass_what_does_not() -> None:
    with forbid_waiting(CPU):
        VALUES[VALUES.long()].masked_fill(VALUES > 1, 0).clamp(0, 1).sum()
        torch.full((), 3.0).lerp(VALUES, 0.5)


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "sgd"])
@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
def test_a_trainers_steps_do_not_wait_between_records(tmp_path: Path, optimizer: str, dtype: str | None) -> None:
    fp16 = dtype and {"mode": AMP_TYPE.TORCH, "dtype": dtype}
    with launched(gradient_accumulation=2, clip_grad_norm=1.0, fp16=fp16):
        batches = [(torch.randn(4, 3, 16, 16), torch.arange(4) % 3)] * 2 * (CHECK_EVERY - 1)
        config = {"MODEL": MODEL | {"dropout": 0.1, "drop_path": 0.1}, "OPTIMIZER": {"name": optimizer}}
        config |= {"LEARNING_RATE": 1e-3, "WEIGHT_DECAY": 0.0, "LR_SCHEDULE": "cosine"}
        training = build_training(config, nn.CrossEntropyLoss(), loaders=(batches, None), steps=(100, 10))
        engine, batches = training.engine, training.train_loader
        engine.optimizer.counter.every = CHECK_EVERY  # as on a GPU
        metrics = MetricsHook(
            PLAN, tmp_path, every=1000, tensorboard=False, trackers=[], is_main=True, peak_samples_per_s=1.0
        )
        metrics.has_shown_loss = True  # the first step waits, so that its loss is shown
        trainer = Trainer(engine)
        with forbid_waiting(CPU):
            trainer.fit(batches, 1, hooks=[metrics])
        assert trainer.step == CHECK_EVERY - 1
        with forbid_waiting(CPU), pytest.raises(RuntimeError, match="would wait for a GPU"):
            Trainer(engine).fit(batches, 1)  # the next update looks for skipped ones
