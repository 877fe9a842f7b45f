"""docs/from-timm.md: its config trains as timm's objects do with the flags of its command."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from timm.data.mixup import mixup_target
from timm.loss import BinaryCrossEntropy
from timm.models.vision_transformer import VisionTransformer
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2

from common.config.load import load_config
from common.config.plan import DataSummary, Plan, build_plan
from common.data.mixup import MixupLoss
from common.files import ROOT
from common.model.build import build_model, timm_arguments
from common.optim.build import build_optimizer
from common.optim.schedules import build_lr_scheduler

PAGE = ROOT / "docs" / "from-timm.md"
TINY = [
    "MODEL.image_size=8",
    "MODEL.patch_size=4",
    "MODEL.width=16",
    "MODEL.heads=2",
    "MODEL.depth=1",
]
TINY += ["MODEL.num_classes=5", "MODEL.drop_path=0"]
TRAINED = 20  # steps; for the rest only learning rates are compared


def build_ours(config: dict[str, Any], plan: Plan) -> SimpleNamespace:
    """Build what a train.py builds of the page's config."""
    model, rates = build_model(**config["MODEL"]), dict(learning_rate=config["LEARNING_RATE"])
    optimizer = build_optimizer(
        model, **rates, weight_decay=config["WEIGHT_DECAY"], **config["OPTIMIZER"]
    )
    steps = plan.total_steps, plan.warmup_steps, plan.cooldown_steps
    schedule = build_lr_scheduler(
        optimizer, config["LR_SCHEDULE"], *steps, config["MIN_LR"], config["WARMUP_LR"]
    )
    loss = MixupLoss(config["LABEL_SMOOTHING"], config["BCE_THRESHOLD"], config["BCE_SUM"])
    return SimpleNamespace(model=model, optimizer=optimizer, schedule=schedule, loss=loss)


def build_timms(
    flags: dict[str, str], number: dict[str, float], model: VisionTransformer
) -> SimpleNamespace:
    """Build what timm's train.py builds of the page's command; an epoch has two steps."""
    optimizer = create_optimizer_v2(
        model, flags["opt"], lr=number["lr"], weight_decay=number["weight-decay"]
    )
    names = ("cooldown-epochs", "warmup-epochs", "warmup-lr", "min-lr")
    ends = {name.replace("-", "_"): number[name] for name in names} | dict(
        step_on_epochs=False, updates_per_epoch=2
    )
    schedule, epochs = create_scheduler_v2(optimizer, flags["sched"], int(number["epochs"]), **ends)
    loss = BinaryCrossEntropy(number["smoothing"], sum_classes="bce-sum" in flags)
    return SimpleNamespace(
        model=model, optimizer=optimizer, schedule=schedule, epochs=epochs, loss=loss
    )


def take_step(ours: SimpleNamespace, theirs: SimpleNamespace, smoothing: float) -> None:
    """Train both on the same images, mixed; compare losses and weights."""
    images, target, share = torch.randn(8, 3, 8, 8), torch.randint(5, (8,)), torch.rand(())
    mine = ours.loss(ours.model(images), target, target.flip(0), share)
    other = theirs.loss(theirs.model(images), mixup_target(target, 5, share.item(), smoothing))
    torch.testing.assert_close(mine, other)
    for loss, side in ((mine, ours), (other, theirs)):
        side.model.zero_grad()
        loss.backward()
        side.optimizer.step()
    for (
        name,
        p,
    ) in (
        theirs.model.named_parameters()
    ):  # rounding alone moves the bias of the keys, which has no gradient
        torch.testing.assert_close(ours.model.get_parameter(name), p, rtol=1e-3, atol=5e-5)


def is_decayed(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    groups = (
        group for group in optimizer.param_groups if any(p is parameter for p in group["params"])
    )
    return next(groups)["weight_decay"] > 0


def test_the_ported_recipe_trains_as_timms(tmp_path):
    command, code = re.findall(r"^```\w*\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    flags = dict(re.findall(r"--([a-z-]+)(?: ([^-\s]\S*))?", command))
    number = {
        name: float(value) for name, value in flags.items() if re.fullmatch(r"[\d.e-]+", value)
    }
    (tmp_path / "small.py").write_text(code)
    config = load_config(str(tmp_path / "small.py"), TINY)
    plan = build_plan(config, 1, DataSummary(2 * 1024, 1, 5, ""))
    torch.manual_seed(0)
    ours = build_ours(config, plan)
    theirs = build_timms(flags, number, VisionTransformer(**timm_arguments(**config["MODEL"])))
    theirs.model.load_state_dict(ours.model.state_dict())

    assert (plan.epochs, plan.total_steps) == (theirs.epochs, 2 * theirs.epochs)
    assert config["NUM_EPOCHS"] - config["MIXUP_OFF_EPOCHS"] == number["mixup-off-epoch"]
    assert (config["EMA"], config["EMA_WARMUP"]) == (
        number["model-ema-decay"],
        False,
    )  # common/model/ema_test.py
    for (name, p), q in zip(ours.model.named_parameters(), theirs.model.parameters(), strict=True):
        assert is_decayed(ours.optimizer, p) == is_decayed(theirs.optimizer, q), name
    for step in range(1, plan.total_steps + 1):
        assert ours.schedule.get_last_lr()[0] == pytest.approx(
            theirs.optimizer.param_groups[0]["lr"], rel=1e-9
        ), step
        if step <= TRAINED:
            take_step(ours, theirs, number["smoothing"])
        ours.schedule.step()
        theirs.schedule.step_update(step)
