"""docs/from-timm.md: its config builds what timm's train.py builds of its command's flags."""

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from timm.data.mixup import mixup_target
from timm.loss import BinaryCrossEntropy
from timm.models.vision_transformer import VisionTransformer
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from torch import Tensor
from torch.optim import Optimizer

from common.config.load import load_config
from common.config.plan import DataSummary, build_plan
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
    "MODEL.num_classes=5",
]


def options_of(optimizer: Optimizer, parameter: Tensor) -> list[Any]:
    """Return what the next step updates a parameter with, beside its gradient."""
    found = []
    for group in optimizer.param_groups:
        if id(parameter) in map(id, group["params"]):
            found.append(group)
    (group,) = found
    return [group["lr"], group["weight_decay"], *group["betas"], group["eps"]]


@dataclass
class Recipe:
    """The page's recipe twice: timm's command and our config."""

    flags: dict[str, str]  # of the command, without dashes; "" where one has no value
    config: dict[str, Any]

    def number(self, flag: str) -> float:
        return float(self.flags[flag])


@pytest.fixture
def recipe(tmp_path) -> Recipe:
    blocks = re.findall(r"^```\w*\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    command, code = blocks
    flags = dict(re.findall(r"--([a-z-]+)(?: ([^-\s]\S*))?", command))
    path = tmp_path / "small.py"
    path.write_text(code)
    return Recipe(flags, load_config(str(path), TINY))


def test_the_ported_recipe_updates_as_timms(recipe):
    config = recipe.config
    plan = build_plan(config, 1, DataSummary(2 * 1024, 1, 5, ""))
    model = build_model(**config["MODEL"])
    ours = build_optimizer(
        model,
        learning_rate=config["LEARNING_RATE"],
        weight_decay=config["WEIGHT_DECAY"],
        **config["OPTIMIZER"],
    )
    schedule = build_lr_scheduler(
        ours,
        config["LR_SCHEDULE"],
        plan.total_steps,
        plan.warmup_steps,
        plan.cooldown_steps,
        config["MIN_LR"],
        config["WARMUP_LR"],
    )

    timms_model = VisionTransformer(**timm_arguments(**config["MODEL"]))
    theirs = create_optimizer_v2(
        timms_model,
        recipe.flags["opt"],
        lr=recipe.number("lr"),
        weight_decay=recipe.number("weight-decay"),
    )
    timms_schedule, epochs = create_scheduler_v2(
        theirs,
        recipe.flags["sched"],
        int(recipe.number("epochs")),
        cooldown_epochs=recipe.number("cooldown-epochs"),
        warmup_epochs=recipe.number("warmup-epochs"),
        warmup_lr=recipe.number("warmup-lr"),
        min_lr=recipe.number("min-lr"),
        step_on_epochs=False,
        updates_per_epoch=2,
    )

    assert isinstance(ours, type(theirs))
    assert plan.epochs == epochs
    assert plan.total_steps == 2 * epochs
    for step in range(1, plan.total_steps + 1):
        pairs = zip(model.named_parameters(), timms_model.parameters(), strict=True)
        for (name, parameter), other in pairs:
            expected = pytest.approx(options_of(theirs, other), rel=1e-9)
            assert options_of(ours, parameter) == expected, (step, name)
        ours.step()  # of no gradients: schedules warn without
        schedule.step()
        timms_schedule.step_update(step)


def test_the_ported_recipes_loss_is_timms(recipe):
    config = recipe.config
    smoothing = recipe.number("smoothing")
    loss = MixupLoss(
        config["LABEL_SMOOTHING"],
        config["BCE_THRESHOLD"],
        config["BCE_SUM"],
    )
    timms_loss = BinaryCrossEntropy(smoothing, sum_classes="bce-sum" in recipe.flags)
    logits = torch.randn(8, 5)
    target = torch.randint(5, (8,))
    share = torch.tensor(0.3)
    mixed = mixup_target(target, 5, share.item(), smoothing)
    torch.testing.assert_close(
        loss(logits, target, target.flip(0), share),
        timms_loss(logits, mixed),
    )


def test_the_ported_recipes_other_values_are_timms(recipe):
    config = recipe.config
    assert config["MODEL"]["drop_path"] == recipe.number("drop-path")
    assert config["clip_grad_norm"] == recipe.number("clip-grad")
    last_mixed_epoch = config["NUM_EPOCHS"] - config["MIXUP_OFF_EPOCHS"]
    assert last_mixed_epoch == recipe.number("mixup-off-epoch")
    # common/model/ema_test.py has the average's values
    assert config["EMA"] == recipe.number("model-ema-decay")
    assert config["EMA_WARMUP"] is False
