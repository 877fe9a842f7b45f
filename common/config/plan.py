"""Work out the batches and steps of a run from its config, the number of GPUs and the data set."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

from pydantic import Field

from common.errors import UserError
from common.files import Count, Values
from common.optim.schedules import BATCH_FACTORS, count_decay_epochs
from common.resolutions import Resolution, most_steps, optimizer_step, resolution_at
from common.text import counted, nearest_multiples


@dataclass(frozen=True)
class DataSummary:
    """A data set's sample counts, its classes, and which one it is.

    ``fingerprint`` is a checksum over its content, wherever it lies. ``class_counts`` are the
    training images of each class. ``shard_bytes`` are those of
    the training images in shards, 0 where there are none; ``is_shuffled`` tells whether consecutive
    ones are of different classes. ``validation`` says where the evaluation images come from, and
    ``held_out`` which share of train they are and how it was drawn, if they are. ``made_from`` is
    the folder that was prepared, if one was.
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
    made_from: str = ""


@dataclass(frozen=True)
class Plan:
    """How a global batch is cut up, and how long the run is. One step is one optimizer step.

    ``total_batch = micro_batch * accumulation * data_parallel`` and ``world_size = data_parallel *
    tensor_parallel``, where ``world_size`` is the number of processes, on CPUs too.

    ``total_steps`` is the length of the schedule, ``last_step`` where the run ends (less with
    ``MAX_STEPS``). ``total_is_derived``: TOTAL_BATCH_SIZE was not set. ``dtype`` is what matrix
    products are computed in, ``order`` that in which shards are read, if there are any.
    ``decay_steps`` follow a stable phase, 0 in schedules without one.

    ``resolutions`` are those of IMAGE_SIZES and BATCH_SIZES, then those of MODEL and
    TOTAL_BATCH_SIZE. Other steps than the last may have larger micro-batches, and so fewer of them.
    With BATCH_SIZES the schedule counts steps of the smallest batch, `common.resolutions` has which
    optimizer steps they are. A decision of BATCH_SIZES="noise" changes the list in place.
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
    resolutions: list[Resolution] = field(default_factory=list)
    decay_steps: Count = 0

    @property
    def decay_start(self) -> int:
        """The schedule's step at which the stable phase ends; only with ``decay_steps``."""
        return self.total_steps - self.cooldown_steps - self.decay_steps

    @property
    def has_batches(self) -> bool:
        """Whether a step has another batch than TOTAL_BATCH_SIZE, or may have."""
        return any(each.total_batch not in (0, self.total_batch) for each in self.resolutions)

    def with_steps(self, most: int | None) -> "Plan":
        """Return the plan with the last step by ``resolutions`` and by MAX_STEPS, ``most``."""
        steps = self.count_steps(self.total_steps)
        return replace(self, last_step=min(steps, most or steps))

    def count_steps(self, scheduled: int) -> int:
        """Return the optimizer steps in the first steps of the schedule, ``scheduled`` of them."""
        is_plain = not (self.has_batches and self.steps_per_epoch)
        return scheduled if is_plain else optimizer_step(self.resolutions, scheduled)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as in config.json, where ``world_size`` is called "gpus"."""
        fields = asdict(self)
        return {"gpus": fields.pop("world_size"), **fields}

    @classmethod
    def from_dict(cls, fields: Values) -> "Plan":
        """Return the plan of config.json's ``fields``."""
        others = {name: value for name, value in fields.items() if name != "gpus"}
        others["resolutions"] = [Resolution(**each) for each in fields.get("resolutions", ())]
        plan = cls(world_size=fields["gpus"], **others)
        # Earlier versions do not write these two.
        known = dict(total_batch=plan.total_batch, steps=plan.steps_per_epoch)
        resolutions = [
            each if each.total_batch else replace(each, **known) for each in plan.resolutions
        ]
        return replace(plan, resolutions=resolutions)

    def batch_formula(self, unit: str = "GPU") -> str:
        """Return the global batch as a product, as "8 GPUs x 256 x 16 = 32,768"."""
        ranks = counted(self.world_size, unit)
        if self.tensor_parallel > 1:
            ranks = (
                f"{counted(self.data_parallel, 'group')} of {counted(self.tensor_parallel, unit)}"
            )
        return f"{ranks} x {self.micro_batch} x {self.accumulation} = {self.total_batch:,}"


def build_plan(
    config: Values,
    world_size: int,
    data: DataSummary | None,
    batches: Sequence[tuple[int, int]] | None = None,
) -> Plan:
    """Return the plan for ``world_size`` processes; without ``data`` all step counts are 0.

    ``batches`` are those decided so far with BATCH_SIZES="noise", each with the epoch at its end.

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
    samples = data.train_samples if data else 0
    batches = batches or list_batches(config, total, data_parallel)
    for batch in {total, *(batch for _, batch in batches)}:
        _check_batch(config, batch, total, data_parallel, data)
    cut = BatchCut(config, total, data_parallel, micro, samples)
    resolutions = cut.resolutions(batches)
    first = resolutions[0]
    if config["BATCH_SIZES"] == "noise" and first.micro_batch == first.total_batch:
        raise UserError(
            "BATCH_SIZES='noise' needs several micro-batches in a step, one of "
            f"{first.total_batch} images (SMALLEST_BATCH) has one: add "
            f"--set MICRO_BATCH_SIZE={max(1, first.total_batch // 2)}"
        )
    # An epoch drops its last, incomplete batch: all its steps have the same number of samples.
    steps_per_epoch = most_steps(resolutions)
    total_steps = config["NUM_EPOCHS"] * steps_per_epoch

    # Fractions of an epoch may round up to more than `most`.
    def count_steps(epochs: float, most: int) -> int:
        return max(0, min(round(epochs * steps_per_epoch), most))

    # a step at the peak learning rate remains
    cooldown = count_steps(config["COOLDOWN_EPOCHS"], total_steps - 1)
    decay_epochs = count_decay_epochs(config["LR_SCHEDULE"], config["DECAY"], config["NUM_EPOCHS"])
    decay = max(1, count_steps(decay_epochs, total_steps - cooldown)) if decay_epochs else 0
    plan = Plan(
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
        last_step=total_steps,
        cooldown_steps=cooldown,
        decay_steps=decay,
        total_is_derived=config["TOTAL_BATCH_SIZE"] is None,
        resolutions=resolutions,
    )
    return plan.with_steps(config["MAX_STEPS"])


def list_batches(config: Values, total: int, data_parallel: int) -> list[tuple[int, int]]:
    """Return the batches that a run begins with, each with the epoch at its end."""
    if config["BATCH_SIZES"] == "noise":
        return [(config["NUM_EPOCHS"], _smallest_batch(config, total, data_parallel))]
    last = config["NUM_EPOCHS"], total
    batches = []
    end = 0
    for epochs, batch in config["BATCH_SIZES"]:
        end += epochs
        batches.append((end, batch))
    return [*batches, last]


def _smallest_batch(config: Values, total: int, data_parallel: int) -> int:
    """Return the first batch of BATCH_SIZES="noise"; doubled some times, it is ``total``."""
    smallest = config["SMALLEST_BATCH"] or total // 16
    choices = []
    batch = total
    while batch % (2 * data_parallel) == 0:
        batch //= 2
        choices.append(batch)
    if smallest not in choices:
        raise UserError(
            f"SMALLEST_BATCH={smallest} is not TOTAL_BATCH_SIZE={total} halved some times, and "
            f"divisible by {data_parallel} data-parallel processes: set it to one of {choices}"
        )
    return smallest


def _check_batch(
    config: Values, batch: int, total: int, data_parallel: int, data: DataSummary | None
) -> None:
    """Raise `UserError` for a batch that processes, repeats or data set do not allow."""
    key = f"TOTAL_BATCH_SIZE={batch}" if batch == total else f"BATCH_SIZES: a batch of {batch}"
    if batch % data_parallel:
        raise UserError(
            f"{key} is not divisible by {data_parallel} data-parallel processes: set it to "
            f"{nearest_multiples(batch, data_parallel)}"
        )
    repeats = config["DATA"]["repeats"]
    if repeats > batch:
        raise UserError(f"DATA.repeats={repeats} is more than {key}: lower it")
    if data and batch > data.train_samples:
        raise UserError(
            f"{key} is more than the {data.train_samples} training images: set it to at most that"
        )


@dataclass(frozen=True)
class BatchCut:
    """How the batches of a run are cut: TOTAL_BATCH_SIZE, ``total``, into ``micro`` images."""

    config: Values
    total: int
    data_parallel: int
    micro: int
    train_samples: int

    @classmethod
    def of_plan(cls, config: Values, plan: Plan, train_samples: int) -> "BatchCut":
        """Return how the batches of ``plan`` are cut."""
        return cls(config, plan.total_batch, plan.data_parallel, plan.micro_batch, train_samples)

    def resolutions(self, batches: Sequence[tuple[int, int]]) -> list[Resolution]:
        """Return the resolutions of a run with these batches, each with the epoch at its end."""
        sizes = []
        end = 0
        for epochs, size, *stated in self.config["IMAGE_SIZES"]:
            end += epochs
            sizes.append((end, size, *stated))
        sizes.append((self.config["NUM_EPOCHS"], self.config["MODEL"]["image_size"]))
        resolutions: list[Resolution] = []
        begin = 0
        for end, size, *stated in sizes:
            while True:
                later = [pair for pair in batches if pair[0] > begin]
                batch_end, batch = later[0] if later else batches[-1]
                begin = min(end, batch_end)
                resolutions.append(self._resolution(begin, size, batch, *stated))
                if begin == end:
                    break
        return resolutions

    def _resolution(self, end: int, size: int, batch: int, stated: int | None = None) -> Resolution:
        samples = batch // self.data_parallel  # of each process
        # Like MICRO_BATCH_SIZE, no larger than what a process has of the global batch.
        own = min(stated or self.micro, samples)
        if self.config["BATCH_SIZES"] == "noise":
            own = min(self.micro, samples)  # DALI reserves memory for the largest, at the start
        if batch != self.total:
            own = largest_divisor(samples, own)
        elif samples % own or own < self.micro:
            choices = [count for count in range(self.micro, samples + 1) if samples % count == 0]
            raise UserError(
                f"IMAGE_SIZES: micro-batches of {own} images at {size} pixels: choose one of "
                f"{choices}, as a process has {samples} images in a step, and {self.micro} in a "
                "micro-batch at full size"
            )
        return Resolution(
            end, size, own, samples // own, total_batch=batch, steps=self.train_samples // batch
        )


def largest_divisor(count: int, most: int) -> int:
    """Return the largest divisor of ``count`` of at most ``most``."""
    return next(size for size in range(min(count, most), 0, -1) if count % size == 0)


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


def rate_factor(config: Values, plan: Plan, epoch: int) -> float:
    """Return the factor of BATCH_LR on the schedule's rate in an epoch."""
    if not plan.has_batches:
        return 1.0
    batch = resolution_at(plan.resolutions, epoch).total_batch
    return BATCH_FACTORS[config["BATCH_LR"]](batch / plan.total_batch)


def describe_rate(config: Values, plan: Plan) -> str:
    """Return the peak and the schedule of the learning rate, as text."""
    stable = ""
    if plan.decay_steps:
        stable = f", stable until step {plan.count_steps(plan.decay_start):,}, then down"
    warmup = plan.count_steps(plan.warmup_steps)
    batches = ""
    if plan.has_batches:
        batches = f", of other batches by BATCH_LR={config['BATCH_LR']!r}"
    return (
        f"{config['LEARNING_RATE']} after {warmup:,} steps of warm-up, then "
        f"{config['LR_SCHEDULE']}{stable} to {config['MIN_LR']:g}{batches}"
    )
