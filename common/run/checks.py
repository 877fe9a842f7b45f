"""What can be refused before anything is started."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from common.colossal import MixedPrecision, build_mixed_precision, check_tensor_parallel
from common.config.batch_plan import DataSummary, Plan
from common.errors import UserError
from common.metrics.trackers import check_trackers
from common.optim.build import build_optimizer


def check_classes(num_classes: int | None, data: DataSummary) -> int:
    """Return the classes of the head, by default those of the data set; refuse fewer."""
    if num_classes is not None and num_classes < data.num_classes:
        raise UserError(
            f"MODEL.num_classes={num_classes}: the data set has labels 0 to {data.num_classes - 1}; "
            f"--set MODEL.num_classes={data.num_classes} (or None) fits"
        )
    return num_classes or data.num_classes


def check_builds(config: Mapping[str, Any], plan: Plan) -> MixedPrecision:
    """Refuse what the model, its shards, the optimiser, mixed precision or a tracker would, before anything starts.

    Return what ``fp16`` comes to on this machine.
    """
    model = {**config["MODEL"], "num_classes": config["MODEL"]["num_classes"] or 1}
    check_tensor_parallel(config["parallel"], model, plan.micro_batch, plan.gpus)
    try:
        build_optimizer(nn.Linear(1, 1), weight_decay=config["WEIGHT_DECAY"], **config["OPTIMIZER"])
    except ValueError as error:
        raise UserError(f"OPTIMIZER={config['OPTIMIZER']}: {error}") from error
    check_trackers(config["LOG"]["trackers"])
    return build_mixed_precision(config["fp16"], "cuda" if torch.cuda.is_available() else "cpu")
