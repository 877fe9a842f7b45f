"""Work out the batches and steps of a run from its config, the number of GPUs and the data set."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from pydantic import Field

from common.errors import UserError
from common.files import Count, Values
from common.optim.schedules import count_decay_epochs
from common.resolutions import Resolution
from common.text import counted, nearest_multiples


@dataclass(frozen=True)
class DataSummary:
    """A data set's sample counts, its classes, and which one it is.

    ``fingerprint`` is a checksum over its content, wherever it lies. ``class_counts`` are the
    training images of each class. ``shard_bytes`` are those of
    the training images in shards, 0 where there are none; ``is_shuffled`` tells whether consecutive
    ones are of different classes. ``validation`` says where the evaluation images come from, and
    ``held_out`` which share of train they are and how it was drawn, if they are.
    """

    train_samples: Count
    eval_samples: Count
    num_classes: Count
    fingerprint: str
    class_names: Sequence[str] = ()
    class_counts: Sequence[int] = ()
    shard_bytes: Count = 0
    is_shuffled: bool = True
    validation: str = ""
    held_out: str = ""


@dataclass(frozen=True)
class Plan:
    """How a global batch is cut up, and how long the run is. One step is one optimizer step.

    ``total_batch = micro_batch * accumulation * data_parallel`` and ``world_size = data_parallel *
    tensor_parallel``, where ``world_size`` is the number of processes, on CPUs too.

    ``total_steps`` is the length of the schedule, ``last_step`` where the run ends (less with
    ``MAX_STEPS``). ``total_is_derived``: TOTAL_BATCH_SIZE was not set. ``dtype`` is what matrix
    products are computed in, ``order`` that in which shards are read, if there are any.
    ``resolutions`` are those of IMAGE_SIZES, then that of MODEL; all but the last may have larger
    micro-batches, and so fewer of them in a step. ``decay_steps`` follow a stable phase, 0 in
    schedules without one.
    """

    world_size: Annotated[Count, Field(alias="gpus")]
    tensor_parallel: Count
    data_parallel: Count
    micro_batch: Count
    accumulation: Count
    total_batch: Count
    epochs: Count
    steps_per_epoch: Count
    warmup_steps: Count
    total_steps: Count
    last_step: Count
    total_is_derived: bool = False
    dtype: str = "float32"
    order: str | None = None
    cooldown_steps: Count = 0
    resolutions: tuple[Resolution, ...] = ()
    decay_steps: Count = 0

    @property
    def decay_start(self) -> int:
        """The step at which the stable phase ends; only with ``decay_steps``."""
        return self.total_steps - self.cooldown_steps - self.decay_steps

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as in config.json, where ``world_size`` is called "gpus"."""
        fields = asdict(self)
        return {"gpus": fields.pop("world_size"), **fields}

    @classmethod
    def from_dict(cls, fields: Values) -> "Plan":
        """Return the plan of config.json's ``fields``."""
        others = {name: value for name, value in fields.items() if name != "gpus"}
        return cls(world_size=fields["gpus"], **others)

    def batch_formula(self, unit: str = "GPU") -> str:
        """Return the global batch as a product, as "8 GPUs x 256 x 16 = 32,768"."""
        ranks = counted(self.world_size, unit)
        if self.tensor_parallel > 1:
            ranks = (
                f"{counted(self.data_parallel, 'group')} of {counted(self.tensor_parallel, unit)}"
            )
        return f"{ranks} x {self.micro_batch} x {self.accumulation} = {self.total_batch:,}"


def build_plan(config: Values, world_size: int, data: DataSummary | None) -> Plan:
    """Return the plan for ``world_size`` processes; without ``data`` all step counts are 0.

    Raises `UserError` where a batch or the number of GPUs does not divide, naming the nearest that
    does.
    """
    tensor = config["parallel"]["tensor"]["size"]
    if world_size % tensor:
        raise UserError(
            f"parallel.tensor.size={tensor} does not divide the number of processes, {world_size}: "
            f"start {nearest_multiples(world_size, tensor)} processes"
        )
    data_parallel = world_size // tensor
    total = config["TOTAL_BATCH_SIZE"]
    # The Caltech-101 recipes state a batch per GPU: the global one grows with the processes.
    if total is None:
        total = config["MICRO_BATCH_SIZE"] * (config["gradient_accumulation"] or 1) * data_parallel
    micro, accumulation = _divide_batch(config, total, data_parallel)
    repeats = config["DATA"]["repeats"]
    if repeats > total:
        raise UserError(f"DATA.repeats={repeats} is more than TOTAL_BATCH_SIZE={total}: lower it")
    steps_per_epoch = data.train_samples // total if data else 0
    if data and not steps_per_epoch:
        raise UserError(
            f"TOTAL_BATCH_SIZE={total} is more than the {data.train_samples} training images: "
            "set it to at most that"
        )
    # An epoch drops its last, incomplete batch: every step has the same number of samples.
    total_steps = config["NUM_EPOCHS"] * steps_per_epoch

    # Fractions of an epoch may round up to more than `most`.
    def count_steps(epochs: float, most: int) -> int:
        return max(0, min(round(epochs * steps_per_epoch), most))

    # a step at the peak learning rate remains
    cooldown = count_steps(config["COOLDOWN_EPOCHS"], total_steps - 1)
    decay_epochs = count_decay_epochs(config["LR_SCHEDULE"], config["DECAY"], config["NUM_EPOCHS"])
    decay = max(1, count_steps(decay_epochs, total_steps - cooldown)) if decay_epochs else 0
    return Plan(
        world_size=world_size,
        tensor_parallel=tensor,
        data_parallel=data_parallel,
        micro_batch=micro,
        accumulation=accumulation,
        total_batch=total,
        epochs=config["NUM_EPOCHS"],
        steps_per_epoch=steps_per_epoch,
        warmup_steps=count_steps(config["WARMUP_EPOCHS"], total_steps - cooldown - max(decay, 1)),
        total_steps=total_steps,
        last_step=min(total_steps, config["MAX_STEPS"] or total_steps),
        cooldown_steps=cooldown,
        decay_steps=decay,
        total_is_derived=config["TOTAL_BATCH_SIZE"] is None,
        resolutions=_resolutions(config, total // data_parallel, micro),
    )


def _resolutions(config: Values, samples: int, micro: int) -> tuple[Resolution, ...]:
    """Return the resolutions of a run whose processes have ``samples`` of a global batch each."""
    resolutions: list[Resolution] = []
    end = 0
    for epochs, size, *stated in config["IMAGE_SIZES"]:
        end += epochs
        # Like MICRO_BATCH_SIZE, no larger than what a process has of the global batch.
        own = min(*stated, samples) if stated else micro
        if samples % own or own < micro:
            choices = [count for count in range(micro, samples + 1) if samples % count == 0]
            raise UserError(
                f"IMAGE_SIZES: micro-batches of {own} images at {size} pixels: choose one of "
                f"{choices}, as a process has {samples} images in a step, and {micro} in a "
                "micro-batch at full size"
            )
        resolutions.append(Resolution(end, size, own, samples // own))
    size = config["MODEL"]["image_size"]
    return *resolutions, Resolution(config["NUM_EPOCHS"], size, micro, samples // micro)


def _divide_batch(config: Values, total: int, data_parallel: int) -> tuple[int, int]:
    """Return the micro-batch and the accumulation; the config has either, both, or neither.

    Without accumulation, a micro-batch is no larger than what a process has of the global batch.
    """
    micro, accumulation = config["MICRO_BATCH_SIZE"], config["gradient_accumulation"]
    # MICRO_BATCH_SIZE is a limit then, so a small global batch lowers it. One that does not divide
    # is refused below, as without MICRO_BATCH_SIZE.
    if micro and accumulation in (None, 1) and total < micro * data_parallel:
        micro = None if total % data_parallel else total // data_parallel
    if micro and accumulation and micro * accumulation * data_parallel != total:
        product = f"MICRO_BATCH_SIZE={micro} x gradient_accumulation={accumulation}"
        raise UserError(
            f"{product} x {data_parallel} processes is {micro * accumulation * data_parallel}, "
            f"not TOTAL_BATCH_SIZE={total}: set one of the first two to None"
        )
    unit = (micro or accumulation or 1) * data_parallel
    if total % unit:
        raise UserError(
            f"TOTAL_BATCH_SIZE={total} is not divisible by {unit} (MICRO_BATCH_SIZE or "
            f"gradient_accumulation, x {data_parallel} data-parallel processes): set it to "
            f"{nearest_multiples(total, unit)}, or start another number of processes"
        )
    if micro:
        accumulation = total // unit
    else:
        micro, accumulation = total // unit, accumulation or 1
    # The run does not read BATCH_SIZE: a value in the file says what its author expects.
    stated = config["BATCH_SIZE"]
    if stated is not None and stated != total // accumulation:
        expected = f"TOTAL_BATCH_SIZE // gradient_accumulation = {total // accumulation}"
        raise UserError(f"BATCH_SIZE={stated} is not {expected}: correct it or leave it out")
    return micro, accumulation


def describe_rate(config: Values, plan: Plan) -> str:
    """Return the peak and the schedule of the learning rate, as text."""
    stable = f", stable until step {plan.decay_start:,}, then down" if plan.decay_steps else ""
    return (
        f"{config['LEARNING_RATE']} after {plan.warmup_steps:,} steps of warm-up, then "
        f"{config['LR_SCHEDULE']}{stable} to {config['MIN_LR']:g}"
    )
