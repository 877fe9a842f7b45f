"""What is refused of a prepared run before the launch."""

import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from common.checkpoint.resume import AUTO, NEVER
from common.checkpoint.weights import load_pretrained
from common.config.class_weights import class_weights
from common.config.plan import DataSummary, Plan
from common.engine.amp import MixedPrecision
from common.engine.tensor_parallel.layout import check_tensor_parallel
from common.errors import UserError
from common.hardware import memory_bytes
from common.metrics.loggers import check_trackers
from common.model.build import build_on_meta
from common.model.flops import flops_per_image
from common.planner.prediction import check_limits
from common.text import first_line


class Prepared(NamedTuple):
    """The resolved config, its plan, and the data set, which some dry runs do not read."""

    config: dict[str, Any]
    plan: Plan
    data: DataSummary | None
    precision: MixedPrecision  # what ``fp16`` means on this machine


def _check_memory(run: Prepared) -> None:
    on_gpu = torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory
    check_limits(run.config, run.plan, on_gpu or memory_bytes())


def _check_sync_bn(run: Prepared) -> None:
    if run.config["MODEL"].get("sync_bn") and not torch.cuda.is_available():
        raise UserError("MODEL.sync_bn=True: torch's SyncBatchNorm needs GPUs; leave it out")


def _check_resolutions(run: Prepared) -> None:
    model = run.config["MODEL"]
    for resolution in run.plan.resolutions:
        flops_per_image(model, image_size=resolution.image_size)  # refuses what it does not take
        check_tensor_parallel(run.config["parallel"], model, resolution.micro_batch)
        if resolution.micro_batch == 1:
            _check_single_image(run, resolution.image_size)
    # of TOTAL_BATCH_SIZE, to which BATCH_SIZES="noise" may come
    check_tensor_parallel(run.config["parallel"], model, run.plan.micro_batch)


def _check_single_image(run: Prepared, size: int) -> None:
    """Refuse what needs more than one image in a micro-batch."""
    why = "a micro-batch is a single image; raise MICRO_BATCH_SIZE or TOTAL_BATCH_SIZE"
    config = run.config
    for key in ("MIXUP", "CUTMIX"):
        if config[key]:
            raise UserError(f"{key}={config[key]}: {why}, or add --set {key}=0")
    model = config["MODEL"]
    # The statistics are those of all GPUs' images.
    if model.get("sync_bn") and run.plan.data_parallel > 1:
        return
    # Batch norms refuse a single value per channel. Only running the model tells.
    images = torch.empty(1, 3, size, size, device="meta")
    try:
        build_on_meta(model, config["FREEZE"]).train()(images)
    except ValueError as error:
        raise UserError(f"MODEL.timm={model['timm']}: {why} ({first_line(error)})") from error


def _check_classes(run: Prepared) -> None:
    if run.data:
        class_weights(run.config, run.data.class_counts)  # refuses a list of another length
    classes = run.config["MODEL"]["num_classes"]
    if run.config["BEST"] == "auroc" and classes not in (None, 2):
        raise UserError(
            f"BEST='auroc': of two classes only, these are {classes}; set it to mean_recall or "
            "macro_f1"
        )


def _check_trackers(run: Prepared) -> None:
    check_trackers(run.config["LOG"]["trackers"])


MACHINE_CHECKS = (_check_memory, _check_sync_bn)
CHECKS = (_check_classes, _check_resolutions, _check_trackers)


def check_init(args: Namespace, run: Prepared) -> str:
    """Refuse INIT's weights that do not fit, or fine-tuning without; return what loading says."""
    config, data = run.config, run.data
    classes = args.classes or args.class_order
    if not config["INIT"]:
        if classes:
            raise UserError("--classes, --class-order: only --init's weights have classes to name")
        # With --resume CHECKPOINT the weights are not random.
        if args.resume in (AUTO, NEVER):
            _check_random_start(config, args.config)
        return ""
    names = data.class_names if data else ()
    # The meta device costs no memory. Only names and shapes are compared.
    done = load_pretrained(build_on_meta(config["MODEL"]), config["INIT"], names, classes)
    # what happens to the head is not known without the number of classes
    return done if config["MODEL"]["num_classes"] else done.partition(";")[0]


def _check_random_start(config: Mapping[str, Any], name: str) -> None:
    """Raise `UserError` for what makes sense with trained weights only."""
    decay = config["OPTIMIZER"].get("layer_decay", 1.0)
    # what is said, and whether the config has it
    fine_tuning = {
        f"FREEZE={config['FREEZE']!r}": config["FREEZE"],
        f"OPTIMIZER.layer_decay={decay}": decay < 1,
        f"--config {name}": re.search("fine[-_]?tun", Path(name).stem),  # as deit3_b16_finetune
    }
    for setting, is_set in fine_tuning.items():
        if is_set:
            raise UserError(
                f"{setting} without INIT starts from random weights: add --init SOURCE, or for a "
                "model of timm's --set MODEL.pretrained=True"
            )
