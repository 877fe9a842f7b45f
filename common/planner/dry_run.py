"""``--dry-run``: print the resolved config, batch arithmetic, memory, time, and parallel modes."""

import math
import sys
from collections.abc import Sequence
from enum import Enum

import torch

from common.config.class_weights import class_weights, describe_sizes
from common.config.fields import flatten
from common.config.model_keys import TIMM_DATA
from common.config.plan import DataSummary, Plan, describe_rate
from common.config.schema import known_keys
from common.engine.amp import compute_dtype, name_dtype
from common.engine.noise_scale import UNMEASURED
from common.engine.tensor_parallel.layout import resolve_parallel
from common.files import Values
from common.hardware import instruction_set
from common.model.build import build_on_meta, count_parameters
from common.model.flops import flops_per_image, peak_flops
from common.planner.cluster import DECODE, LATENCY, Cluster
from common.planner.phases import (
    count_seconds,
    describe_batch,
    format_time,
    print_batches,
    show_range,
)
from common.planner.prediction import ASSUMED_MFU, NCCL_BUFFERS, USABLE, Phase, Planner, Prediction
from common.resolutions import resolution_at
from common.text import counted, format_table, print_wrapped

INDENT = 23  # columns of a title; values begin after them
DEFAULTS = {name: field.default for name, field in known_keys().items()}
DEFAULTS |= flatten({"parallel": resolve_parallel(None, 1)})


def print_dry_run(
    config: Values,
    plan: Plan,
    data: DataSummary | None,
    cluster: Cluster,
    notes: dict[str, str],
    images: int,
    *,
    is_compared: bool,
) -> None:
    """Print the plan, the keys that are not at their defaults, and if asked a table of all modes.

    ``data`` is None without a data set: an epoch then has ``images``. ``notes`` are additional rows
    of the plan; empty ones are skipped.
    """
    if data:
        images = data.train_samples
    if is_compared and sys.stderr.isatty():
        print("estimating the parallel modes, for about half a minute ...", file=sys.stderr)
    planner = Planner(config, plan, cluster)
    prediction = planner.predict(config, plan.micro_batch, plan.accumulation)
    rows = _describe_plan(config, plan, data, images)
    phases = planner.predict_phases(prediction)
    # The phase of full size needs most, unless smaller images have larger micro-batches.
    predictions = [phase.prediction for phase in phases]
    if config["BATCH_SIZES"] == "noise":  # the batch may become the full one
        predictions.append(prediction)
    largest = max(predictions, key=lambda each: each.memory)
    rows["memory per GPU"] = _describe_memory(largest, cluster)
    rows["time"] = f"{_describe_time(phases, images)}, on {counted(plan.world_size, cluster.gpu)}"
    if not is_compared:
        rows["time"] += (
            f"; --gpus {plan.world_size} lists the assumptions and compares parallel modes"
        )
        if not torch.cuda.is_available():
            rows["time here"] = (
                f"at least {_least_time(config, phases, images)}, on this CPU as busy as it is now"
            )
    rows |= notes
    for name, value in rows.items():
        if value:
            print_wrapped(f"{name:<{INDENT}}{value}", INDENT)
    if config["BATCH_SIZES"]:
        print_batches(planner, prediction, images, is_compared=is_compared)
    elif len(plan.resolutions) > 1:
        _print_phases(config, phases, prediction, images)
    _print_changed_keys(config)
    if is_compared:
        _print_modes(planner, images)


def _print_phases(config: Values, phases: Sequence[Phase], full: Prediction, images: int) -> None:
    """Print a table of the sizes of images, and what they save."""
    rows = []
    for phase in phases:
        time = format_time(*count_seconds([phase], images))
        row = {
            "epochs": f"{phase.begin + 1}-{phase.end}",
            "pixels": phase.image_size,
            "batch": describe_batch(phase.prediction),
            "GFLOP/image": f"{_count_flops(config, [phase]) / phase.epochs / 1e9:.3g}",
            "GB": f"{phase.prediction.memory / 1e9:.2f}",
            "time": f"*{time}" if phase.prediction.waits else time,
        }
        rows.append(row)
    print(f"\n{format_table(rows)}")
    totals = []
    # The same epochs, all at MODEL's size.
    without = [Phase(0, phases[-1].end, config["MODEL"]["image_size"], full)]
    for way in (phases, without):
        time = format_time(*count_seconds(way, images))
        if not torch.cuda.is_available():
            time = f"{time} (on this CPU at least {_least_time(config, way, images)})"
        totals.append(f"{images * _count_flops(config, way) / 1e15:,.2f} PFLOP, {time}")
    if any(phase.prediction.waits for phase in phases):
        print("* waits for decoding")
    print_wrapped(f"together {totals[0]}; without IMAGE_SIZES {totals[1]}")


def _count_flops(config: Values, phases: Sequence[Phase]) -> float:
    """Return the FLOPs of all epochs for one image."""
    model = config["MODEL"]
    frozen = config["FREEZE"]
    return sum(phase.epochs * flops_per_image(model, frozen, phase.image_size) for phase in phases)


def _print_changed_keys(config: Values) -> None:
    """Print the keys that are not at their defaults, as --set takes them."""
    print("\nkeys that are not at their defaults:")
    # A key of the user's has no default: no value equals `...`.
    changed = {
        name: value for name, value in flatten(config).items() if value != DEFAULTS.get(name, ...)
    }
    width = max(map(len, changed))
    for name, value in changed.items():
        print(f"{name:<{width}}  {value if isinstance(value, Enum) else repr(value)}")


def _describe_plan(
    config: Values, plan: Plan, data: DataSummary | None, assumed: int
) -> dict[str, str]:
    """Return the first rows of the plan, by title. Times assume so many images without ``data``."""
    count, _ = count_parameters(build_on_meta(config["MODEL"]))
    flops = flops_per_image(config["MODEL"], config["FREEZE"])
    rows = {
        "processes": f"{counted(plan.world_size, 'GPU')} = "
        f"{plan.data_parallel} data parallel x {plan.tensor_parallel} tensor parallel",
        "global batch": plan.batch_formula(),
        "parameters": f"{count:,} ({count / 1e6:.1f} M)",
        "computation": f"{flops / 1e9:.1f} GFLOP per image, forward and backward",
        "precision": _describe_precision(config, plan),
        **describe_options(config, plan, data),
    }
    if data is None:
        missing = "none (set DATA=... or DATA.root): steps are not counted"
        return rows | {"data": f"{missing}, times assume {assumed:,} images"}
    images = (
        f"{data.train_samples:,} training, {data.eval_samples:,} evaluation images, "
        f"{data.num_classes} classes"
    )
    planned = plan.count_steps(plan.total_steps)
    end = f"; ends after {plan.last_step:,}" if plan.last_step < planned else ""
    steps = f"{plan.steps_per_epoch} per epoch x {plan.epochs} = {plan.total_steps:,}"
    if plan.has_batches:
        steps = f"{planned:,} of several batches"
    steps += f", {plan.count_steps(plan.warmup_steps):,} of warm-up"
    rows |= {"data": images, "validation": data.validation, "steps": steps + end}
    return rows | {"learning rate": describe_rate(config, plan)}


def describe_options(config: Values, plan: Plan, data: DataSummary | None) -> dict[str, str]:
    """Return what some options do, by key, if they are set."""
    model = build_on_meta(config["MODEL"], config["FREEZE"])
    rows = {}
    if config["LOG"]["noise_scale"] and plan.total_batch == plan.micro_batch:
        rows["LOG.noise_scale"] = f"no effect: {UNMEASURED}"
    sizes = describe_sizes(data.class_counts, data.class_names) if data else ""
    if sizes:
        rows["images by class"] = sizes
    weights = class_weights(config, data.class_counts) if data else None
    if weights:
        rows["CLASS_WEIGHTS"] = (
            f"{min(weights):.2g} to {max(weights):.2g} in the training loss; evaluation has none"
        )
    if config["FREEZE"]:
        count, trained = count_parameters(model)
        rows["FREEZE"] = f"{trained:,} of {count:,} parameters are trained: the head"
    name = config["MODEL"]["timm"]
    if name:
        # These keys are shown because their defaults are the model's.
        transform = ", ".join(f"{key}={config['DATA'][key]}" for key in TIMM_DATA)
        rows["MODEL.timm"] = f"{name}, image_size={config['MODEL']['image_size']}, {transform}"
    if config["IMAGE_SIZES"]:
        sizes = _list_ends(plan, "image_size", "pixels")
        # A range test or a profile has one size.
        if len(sizes) == 1:
            sizes = [f"{plan.resolutions[0].image_size} pixels in all steps"]
        rows["IMAGE_SIZES"] = f"{', '.join(sizes)}; evaluation at full size"
    if config["BATCH_SIZES"] and plan.has_batches:
        batches = ", ".join(_list_ends(plan, "total_batch", "images"))
        if config["BATCH_SIZES"] == "noise":
            batches += f", or sooner up to {plan.total_batch:,} as the noise scale grows"
        rows["BATCH_SIZES"] = batches
    if config["EMA"]:
        rows["EMA"] = (
            f"evaluation uses averages over about {1 / (1 - config['EMA']):,.0f} steps; "
            "evaluate.py --raw uses the weights"
        )
    return rows


def _list_ends(plan: Plan, name: str, unit: str) -> list[str]:
    """Return the values of a resolution's field and the epochs at their ends."""
    ends: list[tuple[int, int]] = []
    for resolution in plan.resolutions:
        # There may be no epochs left for the full size.
        if resolution is not resolution_at(plan.resolutions, resolution.end - 1):
            continue
        value = getattr(resolution, name)
        if ends and ends[-1][0] == value:
            ends.pop()
        ends.append((value, resolution.end))
    return [f"{value:,} {unit} to epoch {end}" for value, end in ends]


def _describe_precision(config: Values, plan: Plan) -> str:
    """Return the compute dtype; on a CPU, also that on GPUs, for which the plan may be."""
    if torch.cuda.is_available():
        return plan.dtype
    on_gpus = name_dtype(compute_dtype(config["fp16"], "cuda"))
    return f"{plan.dtype} on this CPU ({instruction_set()}), {on_gpus} on GPUs"


def _describe_memory(prediction: Prediction, cluster: Cluster) -> str:
    """Return what takes the memory at the peak, and whether it fits."""
    estimate = prediction.estimate
    parts = (
        f"{prediction.memory / 1e9:.3f} GB at the peak: {estimate.weights / 1e9:.3f} weights, "
        f"{estimate.gradients / 1e9:.3f} gradients, {estimate.optimizer / 1e9:.3f} optimizer, "
        f"{estimate.activations / 1e9:.3f} activations and temporaries"
    )
    if estimate.groups:
        groups = counted(estimate.groups, "group")
        parts += f", {NCCL_BUFFERS * estimate.groups / 1e9:.1f} NCCL's buffers for {groups}"
    if prediction.fits:
        return f"{parts}; fits in {_usable(cluster)}"
    return (
        f"{parts}; does not fit in {_usable(cluster)}: lower MICRO_BATCH_SIZE, set "
        "MODEL.activation_checkpoint=True or zero=dict(stage=1) or 3"
    )


def _usable(cluster: Cluster) -> str:
    return (
        f"the usable {USABLE * cluster.memory / 1e9:.3g} GB ({USABLE:.0%}) of a GPU with "
        f"{cluster.memory / 1e9:.3g} GB"
    )


def _print_modes(planner: Planner, images: int) -> None:
    """Print the assumptions, the table of all modes, and the fastest mode that fits."""
    cluster = planner.cluster
    predictions = planner.predict_modes()
    print()
    for line in _assumptions(planner):
        print_wrapped(f"- {line}", 2)
    rows = [_row(prediction, cluster) for prediction in predictions]
    print(f"\n{format_table(rows)}\n")
    calls = {each.mode: sum(each.estimate.calls.values()) for each in predictions}
    counts = "; ".join(f"{mode}: {number:,}" for mode, number in calls.items())
    print_wrapped(f"collectives in a step: {counts}")
    print()
    # Not wrapped: a user copies these lines.
    for prediction in predictions:
        print(f"{prediction.mode}: {planner.settings_of(prediction) or 'this config'}")
    print()
    fitting = [prediction for prediction in predictions if prediction.fits]
    if not fitting:
        print_wrapped(f"no mode fits in {_usable(cluster)}")
        return
    # Compared by the slower time: it is not certain that sending overlaps with computing.
    best = min(fitting, key=lambda prediction: prediction.slowest_step)
    print(f"fastest that fits: {best.mode}, {show_range(best.images_per_s, ',.0f')} images/s")
    phases = planner.predict_phases(best)
    print_wrapped(f"{_describe_time(phases, images)}, without evaluation")


def _describe_time(phases: Sequence[Phase], images: int) -> str:
    """Return how long the training of the plan takes."""
    time = format_time(*count_seconds(phases, images))
    limit = ""
    # Even the shortest time is that of decoding.
    if all(phase.prediction.waits for phase in phases):
        limit = " (the lower is the host's limit)" if "-" in time else " (the host's limit)"
    return f"{phases[-1].end} epochs of {images:,} images: {time}{limit}"


def _least_time(config: Values, phases: Sequence[Phase], images: int) -> str:
    """Return the time of training on this CPU at its peak."""
    peak = peak_flops(torch.device("cpu"), compute_dtype(config["fp16"], "cpu"))
    seconds = images * _count_flops(config, phases) / peak
    return format_time(seconds, seconds)


def _assumptions(planner: Planner) -> list[str]:
    """Return the lines that say what the times depend on."""
    cluster = planner.cluster
    of_shards = " A GPU with a shard of the model reaches the same fraction of its peak."
    if cluster.images_per_s:
        speed = f"A GPU trains {cluster.images_per_s:,.0f} images/s (measured)."
    else:
        teraflops = planner.rate / 1e12
        rates = [teraflops, teraflops * planner.speedup]
        shares = [ASSUMED_MFU, ASSUMED_MFU * planner.speedup]
        speed = (
            f"A GPU computes {show_range(rates, ',.0f')} TFLOP/s: {show_range(shares, '.0%')} of "
            f"the peak of an {cluster.gpu} (assumed; measure images/s and pass --images-per-s)."
        )
        if planner.speedup > 1:
            of_shards = " With a shard of the model, which is not compiled, it is the lower rate."
    source = "--decode-images-per-s"
    # A rate that the user has not stated.
    if cluster.decode in DECODE.values():
        source = f"assumed; {source}"
    host = (
        f"The host decodes and augments {cluster.decode:,.0f} images/s per GPU ({source}). "
        "A * marks steps that wait for it."
    )
    if cluster.decode == math.inf:
        host = "The images are in a GPU's memory: nothing is decoded."
    return [
        speed + of_shards,
        "A micro-batch takes at least 1 ms per block, the time to launch its kernels (assumed).",
        f"A GPU sends {cluster.inside / 1e9:g} GB/s within its node of {cluster.node} and "
        f"{cluster.between / 1e9:g} GB/s beyond (--links); a collective takes at least "
        f"{1e6 * LATENCY:.0f} us. The slower time assumes no overlap of computation and "
        "communication.",
        host,
        f"Memory and bytes are counted, except NCCL's buffers: {NCCL_BUFFERS / 1e9:g} GB for each "
        f"group of GPUs (assumed). {USABLE:.0%} of {cluster.memory / 1e9:.3g} GB is usable.",
        "batch: data parallel x micro-batch x accumulation; GB: memory of a GPU; sent GB: by a GPU "
        "in a step, within + between nodes.",
    ]


def _row(prediction: Prediction, cluster: Cluster) -> dict[str, str]:
    """Return the row of the table of modes."""
    estimate = prediction.estimate
    inside, between = cluster.sent(estimate.nbytes)
    row = {
        "mode": prediction.mode,
        "batch": describe_batch(prediction),
        "GB": f"{prediction.memory / 1e9:.2f}",
        "sent GB": "+".join(f"{round(sent / 1e9, 2):.3g}" for sent in (inside, between)),
        "step ms": "does not fit",
        "images/s": "",
    }
    if prediction.fits:
        times = [1e3 * prediction.fastest_step, 1e3 * prediction.slowest_step]
        mark = "*" if prediction.waits else ""
        row["step ms"] = f"{mark}{show_range(times, ',.0f')}"
        row["images/s"] = show_range(prediction.images_per_s, ",.0f")
    return row
