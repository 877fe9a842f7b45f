"""docs/from-timm.md: its config trains as timm's objects do with the flags of its command."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from timm.data.mixup import mixup_target
from timm.loss import BinaryCrossEntropy
from timm.models.vision_transformer import VisionTransformer
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3

from common.config.load import load_config
from common.config.plan import DataSummary, build_plan
from common.data.batch_augment import MixupLoss
from common.model.build import build_model, timm_arguments
from common.model.ema import EmaHook
from common.optim.build import build_lr_scheduler, build_optimizer

PAGE = Path(__file__).resolve().parent.parent / "docs" / "from-timm.md"
TINY = [f"MODEL.{name}={value}" for name, value in dict(image_size=8, patch_size=4, width=16, heads=2, depth=1).items()]
TINY += ["MODEL.num_classes=5", "MODEL.drop_path=0"]
TRAINED = 20  # steps; for the rest only learning rates are compared


def is_decayed(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    groups = (group for group in optimizer.param_groups if any(p is parameter for p in group["params"]))
    return next(groups)["weight_decay"] > 0


def test_the_ported_recipe_trains_as_timms(tmp_path: Path) -> None:
    command, code = re.findall(r"^```\w*\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    flags = dict(re.findall(r"--([a-z-]+)(?: ([^-\s]\S*))?", command))
    (tmp_path / "small.py").write_text(code)
    config = load_config(str(tmp_path / "small.py"), TINY)
    plan = build_plan(config, 1, DataSummary(2 * 1024, 1, 5, ""))

    torch.manual_seed(0)
    ours, theirs = build_model(**config["MODEL"]), VisionTransformer(**timm_arguments(**config["MODEL"]))
    theirs.load_state_dict(ours.state_dict())
    optimizer = build_optimizer(
        ours, learning_rate=config["LEARNING_RATE"], weight_decay=config["WEIGHT_DECAY"], **config["OPTIMIZER"]
    )
    steps = plan.total_steps, plan.warmup_steps, plan.cooldown_steps
    schedule = build_lr_scheduler(optimizer, config["LR_SCHEDULE"], *steps, config["MIN_LR"], config["WARMUP_LR"])
    criterion = MixupLoss(config["LABEL_SMOOTHING"], config["BCE_THRESHOLD"], config["BCE_SUM"])
    averages = EmaHook(ours, 0.5, config["EMA_WARMUP"])  # at the page's decay twenty steps would show little

    number = {name: float(value) for name, value in flags.items() if re.fullmatch(r"[\d.e-]+", value)}
    adamw = create_optimizer_v2(theirs, flags["opt"], lr=number["lr"], weight_decay=number["weight-decay"])
    whole = {
        name.replace("-", "_"): number[name] for name in ("cooldown-epochs", "warmup-epochs", "warmup-lr", "min-lr")
    }
    rates, epochs = create_scheduler_v2(
        adamw, flags["sched"], int(number["epochs"]), **whole, step_on_epochs=False, updates_per_epoch=2
    )
    loss = BinaryCrossEntropy(number["smoothing"], sum_classes="bce-sum" in flags)
    ema = ModelEmaV3(theirs, 0.5)

    assert (plan.epochs, plan.total_steps) == (epochs, 2 * epochs)
    assert config["NUM_EPOCHS"] - config["MIXUP_OFF_EPOCHS"] == number["mixup-off-epoch"]
    assert config["EMA"] == number["model-ema-decay"]
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert is_decayed(optimizer, p) == is_decayed(adamw, q), name
    for step in range(1, plan.total_steps + 1):
        assert schedule.get_last_lr()[0] == pytest.approx(adamw.param_groups[0]["lr"], rel=1e-9), step
        if step <= TRAINED:
            images, target, share = torch.randn(8, 3, 8, 8), torch.randint(5, (8,)), torch.rand(())
            mine = criterion(ours(images), target, target.flip(0), share)
            other = loss(theirs(images), mixup_target(target, 5, share.item(), number["smoothing"]))
            torch.testing.assert_close(mine, other)
            for each, model in ((mine, ours), (other, theirs)):
                model.zero_grad()
                each.backward()
        optimizer.step()
        adamw.step()
        if step <= TRAINED:
            engine = SimpleNamespace(optimizer=SimpleNamespace(grad_norm=torch.tensor(1.0)))
            averages.after_train_iter(SimpleNamespace(step=step, update_done=True, engine=engine))
            ema.update(theirs, step)
            for name, p in theirs.named_parameters():
                torch.testing.assert_close(dict(ours.named_parameters())[name], p, rtol=1e-3, atol=1e-5)
                torch.testing.assert_close(
                    averages.averages[name], ema.module.get_parameter(name), rtol=1e-3, atol=1e-5
                )
        schedule.step()
        rates.step_update(step)
