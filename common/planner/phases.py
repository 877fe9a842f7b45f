"""What the phases of a run cost: epochs with other sizes of images, or other batches."""

from collections.abc import Sequence
from dataclasses import replace

from common.planner.prediction import Phase, Planner, Prediction
from common.text import counted, format_table, print_wrapped

UNITS = {"hours": 3600, "minutes": 60, "seconds": 1}
PAYS = 1.1  # times as fast as with the smallest batch throughout


def print_batches(planner: Planner, full: Prediction, images: int, *, is_compared: bool) -> None:
    """Print a table of the batches of a run of epochs of ``images``, and what they save.

    With ``is_compared`` also from how many GPUs on growing saves time.
    """
    plan = planner.plan
    phases = planner.predict_phases(full)
    smallest = min(resolution.total_batch for resolution in plan.resolutions)
    is_chosen = planner.config["BATCH_SIZES"] == "noise"
    shown = phases
    if is_chosen:  # an epoch of each batch
        shown = []
        batch = smallest
        while batch <= plan.total_batch:
            shown.append(replace(planner.predict_phases(full, batch)[-1], begin=0, end=1))
            batch *= 2
    rows = []
    for phase in shown:
        time = format_time(*count_seconds([phase], images))
        row = {
            "epochs": "each" if is_chosen else f"{phase.begin + 1}-{phase.end}",
            "pixels": phase.image_size,
            "images": f"{phase.prediction.total_batch:,}",
            "batch": describe_batch(phase.prediction),
            "steps": f"{_count_steps([phase], images):,.0f}",
            "sent GB": f"{_count_sent(planner, [phase], images) / 1e9:,.0f}",
            "time": f"*{time}" if phase.prediction.waits else time,
        }
        rows.append(row)
    print(f"\n{format_table(rows)}")
    if any(phase.prediction.waits for phase in shown):
        print("* waits for decoding")
    ways = {} if is_chosen else {"together": phases}
    for batch in (smallest, plan.total_batch):
        ways[f"batches of {batch:,} throughout"] = planner.predict_phases(full, batch)
    for name, way in ways.items():
        print_wrapped(f"{name}: {_describe_way(planner, way, images)}")
    first, last = shown[0].prediction, shown[-1].prediction
    per_image = [each.slowest_step / each.total_batch for each in (first, last)]
    print_wrapped(
        f"on {counted(plan.world_size, 'GPU')} an image of a batch of {first.total_batch:,} takes "
        f"{per_image[0] / per_image[1]:.1f} times as long as one of {last.total_batch:,}"
    )
    if is_compared and not is_chosen:
        _print_growth(planner, images)


def _describe_way(planner: Planner, phases: Sequence[Phase], images: int) -> str:
    sent = _count_sent(planner, phases, images) / 1e9
    time = format_time(*count_seconds(phases, images))
    return f"{_count_steps(phases, images):,.0f} steps, {sent:,.0f} GB sent by a GPU, {time}"


def _print_growth(planner: Planner, images: int) -> None:
    """Print from how many GPUs on a run is faster than with its smallest batch throughout."""
    plan = planner.plan
    smallest = min(resolution.total_batch for resolution in plan.resolutions)
    counts = []
    gpus = plan.world_size
    while gpus % plan.tensor_parallel == 0 and gpus >= plan.tensor_parallel:
        if smallest % (gpus // plan.tensor_parallel) == 0:
            counts.insert(0, gpus)
        gpus //= 4
    factors = {}
    for gpus in counts:
        grown, fixed = (count_seconds(way, images)[1] for way in planner.predict_growth(gpus))
        factors[gpus] = fixed / grown
    paying = [gpus for gpus, factor in factors.items() if factor >= PAYS]
    start = (
        f"growing pays from {counted(paying[0], 'GPU')} on" if paying else "growing saves little"
    )
    shown = ", ".join(f"{factor:.2f} on {gpus}" for gpus, factor in factors.items())
    print_wrapped(f"{start}; times as fast as batches of {smallest:,} throughout, by GPUs: {shown}")


def _count_steps(phases: Sequence[Phase], images: int) -> float:
    return sum(phase.epochs * (images // phase.prediction.total_batch) for phase in phases)


def _count_sent(planner: Planner, phases: Sequence[Phase], images: int) -> float:
    """Return the bytes that a GPU sends in these phases."""
    return sum(
        _count_steps([phase], images) * sum(planner.cluster.sent(phase.prediction.estimate.nbytes))
        for phase in phases
    )


def count_seconds(phases: Sequence[Phase], images: int) -> tuple[float, float]:
    """Return the seconds of the best and of the worst case."""
    fast = 0.0
    slow = 0.0
    for phase in phases:
        steps = phase.epochs * images / phase.prediction.total_batch
        fast += steps * phase.prediction.fastest_step
        slow += steps * phase.prediction.slowest_step
    return fast, slow


def describe_batch(prediction: Prediction) -> str:
    return f"{prediction.data_parallel}x{prediction.micro_batch}x{prediction.accumulation}"


def format_time(low: float, high: float) -> str:
    """Return a range of seconds in the largest unit that ``low`` has one of."""
    unit = next((unit for unit, size in UNITS.items() if low >= size), "seconds")
    times = [low / UNITS[unit], high / UNITS[unit]]
    return f"{show_range(times, '.2g' if times[0] < 10 else ',.0f')} {unit}"


def show_range(values: Sequence[float], form: str) -> str:
    """Return two values as "1-2", one where both read the same."""
    low, high = (format(value, form) for value in values)
    return low if low == high else f"{low}-{high}"
