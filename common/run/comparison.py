"""Shared by the commands that compare modes: arguments, and a run that only measures."""

import argparse
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from common.colossal import initialize, shard_model
from common.errors import UserError, command_parser
from common.hardware import peak_memory, reset_peak_memory
from common.metrics.provenance import describe_run, format_command, name_hardware
from common.model.freeze import freeze
from common.model.vit import build_model
from common.optim.build import build_optimizer
from common.optim.lr_schedule import build_lr_scheduler
from common.run.start import start_run


def build_parser(description: str | None, steps: int, output: str) -> argparse.ArgumentParser:
    """Return a parser with the common arguments and the given defaults of ``--steps`` and ``--output``."""
    parser = command_parser(description)
    parser.add_argument("--steps", type=int, default=steps, help=f"optimizer steps (default: {steps})")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key")
    parser.add_argument("--output", type=Path, default=Path(output), help=f"default: {output}")
    return parser


def provenance(module: str, argv: list[str]) -> dict[str, str]:
    """Return columns on how ``python -m module`` measures with these arguments: date, hardware, versions, command."""
    about = describe_run(argv)
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime(about["started"])),
        "hardware": name_hardware(about["hardware"]),
        "versions": " ".join(f"{name}={number}" for name, number in about["versions"].items() if number),
        "commit": about["commit"],
        "command": format_command(["python", "-m", module, *argv]),
    }


def with_defaults(settings: Sequence[str], defaults: Sequence[str]) -> list[str]:
    """Return the settings, and the defaults of all other keys."""
    given = {setting.partition("=")[0] for setting in settings}
    return [*settings, *(setting for setting in defaults if setting.partition("=")[0] not in given)]


class MeasuredRun:
    """Model, data and engine of a config, built as in a train.py, without hooks and evaluation."""

    def __init__(self, config_name: str, settings: Iterable[str], output: Path, task: ModuleType) -> None:
        words = [word for setting in settings for word in ("--set", setting)]
        run = start_run(["--config", config_name, "--output", str(output), *words], __doc__, task.describe_data)
        assert run is not None
        self.config: Mapping[str, Any] = run.about["config"]
        config, self.plan, self.device = self.config, run.plan, run.device
        if run.plan.accumulation > 1:
            raise UserError(f"gradient_accumulation={run.plan.accumulation}: a comparison needs 1")
        loader = task.build_train_loader(
            config["DATA"],
            run.plan.total_batch,
            run.plan.micro_batch,
            image_size=config["MODEL"]["image_size"],
            seed=config["SEED"],
            device=run.device,
            **run.data_parallel,
        )
        reset_peak_memory()  # of decoding all images, which may take more than training
        self._memory_before = peak_memory()
        model = build_model(**config["MODEL"])
        freeze(model, config["FREEZE"])
        self.model = shard_model(model)
        optimizer = build_optimizer(
            self.model,
            learning_rate=config["LEARNING_RATE"],
            weight_decay=config["WEIGHT_DECAY"],
            **config["OPTIMIZER"],
        )
        schedule = build_lr_scheduler(optimizer, config["LR_SCHEDULE"], run.plan.total_steps, run.plan.warmup_steps)
        self.loss: Callable[[Tensor, Tensor], Tensor] = nn.CrossEntropyLoss(label_smoothing=config["LABEL_SMOOTHING"])
        self.engine, batches, *_ = initialize(self.model, optimizer, self.loss, loader, None, schedule)
        assert batches is not None
        self.loader = batches

    def peak_memory(self) -> int:
        """Return the most bytes that this process has held since the model was built, less those held before."""
        return peak_memory() - self._memory_before
