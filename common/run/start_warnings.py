"""What a run warns of when it starts, and how it explains that memory is full."""

import os
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

import torch

from common.checkpoint.content import read_config, read_metadata
from common.config.execute import execute
from common.config.load import find_config, parse_settings
from common.config.plan import Plan
from common.errors import UserError
from common.files import Values
from common.model.flops import peak_images_per_s
from common.planner.cluster import Cluster, cluster_here
from common.planner.prediction import Planner
from common.run.checks import Prepared
from common.text import describe_bytes, first_line

RIGHT_CUDNN = 91_501  # 9.15.1


def explain_cpu(config: Values, total_batch: int, processes: int) -> str:
    """Return a warning where training is slow without a GPU, with the least time of a step."""
    if torch.cuda.is_available():
        return ""
    model = config["MODEL"]
    why = ""
    # With an empty CUDA_VISIBLE_DEVICES the user has asked for the CPU.
    if any(Path("/dev").glob("nvidia[0-9]*")) and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        why = (
            f": torch, built for CUDA {torch.version.cuda}, cannot use the GPU: see Requirements "
            "in README.md"
        )
    seconds = total_batch / peak_images_per_s(
        model, config["fp16"], processes, torch.device("cpu"), config["FREEZE"]
    )
    # A step that is quick even here needs no warning.
    if seconds < 1:
        return why and f"warning: training on the CPU{why}"
    return (
        f"warning: training on the CPU{why}; a step of {total_batch:,} images takes at least "
        f"{seconds:,.0f} s"
    )


def explain_cudnn() -> str:
    """Return a warning about the cuDNN that is loaded on a GPU, if it is too old; else ""."""
    try:
        loaded = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    except RuntimeError as error:
        # It is older than that of torch's build.
        return f"warning: attention may be wrong: {first_line(error)}"
    if loaded is None or loaded >= RIGHT_CUDNN:
        return ""
    return (
        f"warning: cuDNN {loaded // 10_000}.{loaded // 100 % 100}.{loaded % 100} is loaded, which "
        "computes attention wrongly at lengths that are no multiple of 128 (fixed in 9.15.1): take "
        "its folder out of LD_LIBRARY_PATH, or set TORCH_CUDNN_SDPA_DEPRIORITIZED=1"
    )


def explain_sizes(config: Values, plan: Plan, cluster: Cluster) -> str:
    """Return a warning of the first size of IMAGE_SIZES that is not expected to fit; else "".

    Its error would come when its epochs begin, perhaps after hours.
    """
    if not config["IMAGE_SIZES"]:
        return ""
    planner = Planner(config, plan, cluster)
    begin = 0
    for resolution in plan.resolutions:
        step = resolution.micro_batch, resolution.accumulation, resolution.image_size
        prediction = planner.predict(config, *step)
        if not prediction.fits:
            need = describe_bytes(prediction.memory)
            return (
                f"warning: from epoch {begin + 1} on, {resolution.micro_batch} images of "
                f"{resolution.image_size} pixels are expected to take {need}, too much for a "
                f"GPU with {describe_bytes(cluster.memory)}: lower MICRO_BATCH_SIZE, or what "
                "IMAGE_SIZES has"
            )
        begin = resolution.end
    return ""


def explain_unused_classes(run: Prepared) -> str:
    """Return a warning where the head has more classes than the data set.

    It may be that of INIT's weights, which is kept.
    """
    classes = run.config["MODEL"]["num_classes"]
    if run.data is None or run.config["INIT"] or classes == run.data.num_classes:
        return ""
    return (
        f"warning: MODEL.num_classes={classes} is more than the data set's {run.data.num_classes} "
        "classes; None takes as many as it has"
    )


def explain_muon(config: Values) -> str:
    """Return a warning where Muon trains on from weights that AdamW may have trained; else ""."""
    source = config["INIT"]
    # Muon does not update the head.
    if config["OPTIMIZER"]["name"] != "muon" or not source or config["FREEZE"]:
        return ""
    with suppress(UserError):  # weights that no run of ours trained
        folder = Path(source)
        if read_config(folder, read_metadata(folder))["OPTIMIZER"]["name"] == "muon":
            return ""
    return (
        f"warning: Muon fine-tunes weights of Adam or AdamW, as those of {source} may be, worse "
        "than these do (arXiv 2605.10468; not measured here): --set OPTIMIZER.name=adamw"
    )


def explain_rate(args: Namespace, config: Values, base: str | None) -> str:
    """Return a warning where ``--set`` changes the config's optimizer, not its rate; else ""."""
    settings = parse_settings(args.set)
    is_changed = any(key.startswith("OPTIMIZER") for key in settings)
    if not is_changed or args.measures or "LEARNING_RATE" in settings:
        return ""
    of_file = {}
    with suppress(UserError):  # a file that runs only with these settings
        of_file, _ = execute(find_config(args.config, base), {})
    tuned = of_file.get("OPTIMIZER", {}).get("name")
    name = config["OPTIMIZER"]["name"]
    if tuned in (name, None) or "LEARNING_RATE" not in of_file:
        return ""
    return (
        f"warning: LEARNING_RATE={config['LEARNING_RATE']:g} is the config's for {tuned}, not for "
        f"{name}: set it too (--find-lr suggests one)"
    )


def explain_out_of_memory(error: Exception, run: Prepared) -> str:
    """Return a line with the largest smaller MICRO_BATCH_SIZE that the planner expects to fit."""
    if not isinstance(error, torch.OutOfMemoryError):
        return ""
    plan = run.plan
    samples = plan.micro_batch * plan.accumulation
    # The global batch stays, cut into more micro-batches.
    smaller = range(plan.micro_batch - 1, 0, -1)
    fitting = Planner(run.config, plan, cluster_here()).predict_largest(
        run.config, samples, smaller
    )
    remedy = "set MODEL.activation_checkpoint=True or zero=dict(stage=1) or 3"
    # It is the last size tried where none fits.
    if fitting and fitting.fits:
        remedy = (
            f"--set MICRO_BATCH_SIZE={fitting.micro_batch} --set "
            f"gradient_accumulation={fitting.accumulation} is expected to fit, with the same batch"
        )
    if any(resolution.micro_batch > plan.micro_batch for resolution in plan.resolutions):
        remedy = f"lower those in IMAGE_SIZES; or {remedy}"
    return (
        f"out of memory with micro-batches of {plan.micro_batch} images: {remedy} "
        f"({first_line(error)})"
    )
