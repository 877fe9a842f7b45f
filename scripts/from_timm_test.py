"""docs/from-timm.md: its config builds what timm's train.py builds of its command's flags."""

import re
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
TINY = ["MODEL.image_size=8", "MODEL.patch_size=4", "MODEL.width=16", "MODEL.heads=2"]
TINY += ["MODEL.depth=1", "MODEL.num_classes=5"]


def options_of(optimizer: Optimizer, parameter: Tensor) -> list[Any]:
    """Return what the next step updates a parameter with, beside its gradient."""
    groups = optimizer.param_groups
    (group,) = (group for group in groups if id(parameter) in map(id, group["params"]))
    return [group["lr"], group["weight_decay"], *group["betas"], group["eps"]]


def test_the_ported_recipe_trains_as_timms(tmp_path):
    command, code = re.findall(r"^```\w*\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    flags = dict(re.findall(r"--([a-z-]+)(?: ([^-\s]\S*))?", command))
    number = {
        name: float(value) for name, value in flags.items() if re.fullmatch(r"[\d.e-]+", value)
    }
    (tmp_path / "small.py").write_text(code)
    config = load_config(str(tmp_path / "small.py"), TINY)
    plan = build_plan(config, 1, DataSummary(2 * 1024, 1, 5, ""))
    model = build_model(**config["MODEL"])
    rates = dict(learning_rate=config["LEARNING_RATE"], weight_decay=config["WEIGHT_DECAY"])
    ours = build_optimizer(model, **rates, **config["OPTIMIZER"])
    steps = plan.total_steps, plan.warmup_steps, plan.cooldown_steps
    schedule = build_lr_scheduler(
        ours, config["LR_SCHEDULE"], *steps, config["MIN_LR"], config["WARMUP_LR"]
    )

    timms_model = VisionTransformer(**timm_arguments(**config["MODEL"]))
    rates = dict(lr=number["lr"], weight_decay=number["weight-decay"])
    theirs = create_optimizer_v2(timms_model, flags["opt"], **rates)
    names = ("cooldown-epochs", "warmup-epochs", "warmup-lr", "min-lr")
    ends = {name.replace("-", "_"): number[name] for name in names}
    timms_schedule, epochs = create_scheduler_v2(
        theirs,
        flags["sched"],
        int(number["epochs"]),
        **ends,
        step_on_epochs=False,
        updates_per_epoch=2,
    )

    assert isinstance(ours, type(theirs))
    assert (plan.epochs, plan.total_steps) == (epochs, 2 * epochs)
    for step in range(1, plan.total_steps + 1):
        pairs = zip(model.named_parameters(), timms_model.parameters(), strict=True)
        for (name, parameter), other in pairs:
            expected = pytest.approx(options_of(theirs, other), rel=1e-9)
            assert options_of(ours, parameter) == expected, (step, name)
        ours.step()  # of no gradients: schedules warn without
        schedule.step()
        timms_schedule.step_update(step)

    logits = torch.randn(8, 5)
    target = torch.randint(5, (8,))
    share = torch.tensor(0.3)
    loss = MixupLoss(config["LABEL_SMOOTHING"], config["BCE_THRESHOLD"], config["BCE_SUM"])
    timms_loss = BinaryCrossEntropy(number["smoothing"], sum_classes="bce-sum" in flags)
    mixed = mixup_target(target, 5, share.item(), number["smoothing"])
    torch.testing.assert_close(
        loss(logits, target, target.flip(0), share), timms_loss(logits, mixed)
    )
    assert config["MODEL"]["drop_path"] == number["drop-path"]
    assert config["clip_grad_norm"] == number["clip-grad"]
    assert config["NUM_EPOCHS"] - config["MIXUP_OFF_EPOCHS"] == number["mixup-off-epoch"]
    # common/model/ema_test.py has the average's values
    assert (config["EMA"], config["EMA_WARMUP"]) == (number["model-ema-decay"], False)
