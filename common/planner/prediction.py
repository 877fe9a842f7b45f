"""Predict memory, traffic and step time of each parallel mode on N GPUs of a cluster."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.config.plan import Plan, largest_divisor
from common.engine.amp import compute_dtype, name_dtype
from common.engine.compiler import check_compile
from common.engine.tensor_parallel.layout import SHAPES, check_tensor_parallel, side_of
from common.engine.zero import check_zero
from common.errors import UserError
from common.files import Values
from common.model.build import build_on_meta, count_parameters
from common.model.flops import PEAKS
from common.optim.build import OPTIMIZERS, state_names
from common.planner.cluster import Cluster
from common.planner.step_estimate import StepEstimate, count_blocks, estimate_step

# Fractions of its peak that an H200 has reached: ViT-S/16 with dropout, and ViT-B/16 without, both
# compiled, with images in memory (docs/performance.md).
ASSUMED_MFU = 0.20
BEST_MFU = 0.40
LAUNCH_SECONDS = (
    1e-3  # least seconds per block and micro-batch: the host launches about 100 kernels
)
BLOCKS = 12  # assumed for a model that does not say how many it has
MEMORY_BANDWIDTH = 2e12  # bytes/s that optimizer kernels reach; an H100 has 3.35e12
USABLE = 0.9  # fraction of a GPU's memory; CUDA's context and fragmentation take the rest
NCCL_BUFFERS = 0.4e9  # bytes of a group's communicator; an estimate, not measured
BACKWARD_SHARE = 2 / 3  # the backward pass's fraction of the time of both passes
NO_TENSOR_PARALLELISM = {"mode": None, "size": 1}


@dataclass(frozen=True)
class Prediction:
    """One way to train on N GPUs: how batch and model are split, and the seconds of a step."""

    tensor: Values  # the config's parallel.tensor
    zero: int | None  # the stage
    data_parallel: int
    micro_batch: int
    accumulation: int
    estimate: StepEstimate
    memory: float  # bytes at the peak, with the buffers of NCCL
    fits: bool  # in the memory of a GPU
    slowest_step: float  # nothing overlaps but decoding
    # A well-tuned GPU sends gradients during the last micro-batch's backward pass.
    fastest_step: float
    waits: bool  # whether even the fastest step waits for decoding

    @property
    def mode(self) -> str:
        """Short name, such as "2.5d 2 x 2 x 1" or "1d 2, zero 3"."""
        mode = self.tensor["mode"]
        parts = []
        if mode:
            sides = [side_of(self.tensor)] * SHAPES[mode][1]
            if mode == "2.5d":
                sides.append(self.tensor["depth"])
            parts = [f"{mode} {' x '.join(map(str, sides))}"]
        if self.zero:
            parts.append(f"zero {self.zero}")
        return ", ".join(parts) or "data parallel"

    @property
    def total_batch(self) -> int:
        return self.data_parallel * self.micro_batch * self.accumulation

    @property
    def images_per_s(self) -> tuple[float, float]:
        """The rate of the worst and of the best case."""
        return self.total_batch / self.slowest_step, self.total_batch / self.fastest_step


@dataclass(frozen=True)
class Phase:
    """The epochs of one size of images."""

    begin: int  # epochs completed before
    end: int
    image_size: int
    prediction: Prediction  # for one of its steps

    @property
    def epochs(self) -> int:
        return self.end - self.begin


class Planner:
    """Predict the steps of a config's plan on a cluster.

    Its GPUs sustain ``rate`` FLOP/s, and up to ``rate * speedup`` with a compiled model.
    """

    def __init__(self, config: Values, plan: Plan, cluster: Cluster):
        self.config = config
        self.plan = plan
        self.cluster = cluster
        # The user's rate is that of one GPU with the whole model.
        if cluster.images_per_s:
            whole = {**config, "parallel": {"tensor": NO_TENSOR_PARALLELISM}}
            self.rate = cluster.images_per_s * estimate_step(whole, 1, 1).flops
            self.speedup = 1.0
        else:
            half, tf32, single = PEAKS[cluster.gpu]
            full = tf32 if config["TF32"] else single
            is_full = name_dtype(compute_dtype(config["fp16"], "cuda")) == "float32"
            self.rate = ASSUMED_MFU * (full if is_full else half) * 1e12
            # A compiled model may reach the best rate, one that is not compiled never does.
            self.speedup = 1.0 if config["COMPILE"] is False else BEST_MFU / ASSUMED_MFU

    def predict_modes(self) -> list[Prediction]:
        """Return a prediction for each way to split the model that GPUs and batch allow.

        Those with `zero` are included if it is set, or if data parallelism alone does not fit.
        """
        tensors = _tensor_settings(self.plan.world_size, self.config["parallel"]["tensor"])
        predictions = [self._predict_split(tensor, None) for tensor in tensors]
        data_parallel = predictions[0]
        # ZeRO costs messages: it is shown only where it is asked for, or needed.
        if self.config["zero"] or (data_parallel and not data_parallel.fits):
            sharded = [(NO_TENSOR_PARALLELISM, 1), (NO_TENSOR_PARALLELISM, 3)]
            sharded += [
                (prediction.tensor, 3)
                for prediction in predictions
                if prediction and prediction.tensor["mode"] == "1d"
            ]
            for tensor, stage in sharded:
                # ZeRO shards over data-parallel ranks: one alone has nothing to shard.
                if tensor["size"] < self.plan.world_size:
                    predictions.append(self._predict_split(tensor, stage))
        return [prediction for prediction in predictions if prediction]

    def _predict_split(self, tensor: Values, zero: int | None) -> Prediction | None:
        """Return the prediction with MICRO_BATCH_SIZE, else with the largest micro-batch that fits.

        It is None where the batch does not divide.
        """
        if self.plan.total_is_derived:
            samples = self.plan.micro_batch * self.plan.accumulation
        else:
            groups = self.plan.world_size // tensor["size"]
            samples, rest = divmod(self.plan.total_batch, groups)
            if rest:
                return None
        stated = self.config["MICRO_BATCH_SIZE"]
        # No GPU holds more than 65,536 images.
        sizes = [min(stated, samples)] if stated else range(min(samples, 2**16), 0, -1)
        return self.predict_largest(self._split_config(tensor, zero), samples, sizes)

    def _split_config(self, tensor: Values, zero: int | None) -> dict[str, Any]:
        """Return the config with the model split in another way."""
        zero_options = {"stage": zero} if zero else None
        return {**self.config, "parallel": {"tensor": tensor}, "zero": zero_options}

    def predict_phases(self, full: Prediction, batch: int | None = None) -> list[Phase]:
        """Return the phases of a run, given the prediction for MODEL's size and TOTAL_BATCH_SIZE.

        With ``batch`` all have this batch.
        """
        config = self._split_config(full.tensor, full.zero)
        phases = []
        begin = 0
        for resolution in self.plan.resolutions:
            samples = full.micro_batch * full.accumulation
            total = batch or resolution.total_batch or self.plan.total_batch
            if total != self.plan.total_batch:
                samples = max(1, total // full.data_parallel)
            micro_batch = largest_divisor(samples, full.micro_batch)
            # The stated micro-batch of smaller images is kept if it fits this way to split.
            is_larger = resolution.micro_batch > self.plan.micro_batch
            if is_larger and samples % resolution.micro_batch == 0:
                micro_batch = resolution.micro_batch
            size = resolution.image_size
            prediction = full
            accumulation = samples // micro_batch
            of_full = config["MODEL"]["image_size"], full.micro_batch, full.accumulation
            if (size, micro_batch, accumulation) != of_full:
                prediction = self.predict(config, micro_batch, accumulation, size)
            if resolution.end > begin:
                phases.append(Phase(begin, resolution.end, size, prediction))
            begin = resolution.end
        return phases

    def predict_growth(self, gpus: int) -> list[list[Phase]]:
        """Return the phases of a run on ``gpus``, and those with the smallest batch throughout."""
        groups = gpus // self.plan.tensor_parallel
        plan = replace(self.plan, world_size=gpus, data_parallel=groups)
        planner = Planner(self.config, plan, self.cluster)
        samples = plan.total_batch // groups
        micro_batch = largest_divisor(samples, self.config["MICRO_BATCH_SIZE"] or plan.micro_batch)
        full = planner.predict(self.config, micro_batch, samples // micro_batch)
        smallest = min(each.total_batch for each in plan.resolutions)
        return [planner.predict_phases(full), planner.predict_phases(full, smallest)]

    def predict_largest(
        self, config: Values, samples: int, sizes: Sequence[int]
    ) -> Prediction | None:
        """Return the prediction for the first of the micro-batches ``sizes`` that fits.

        If none fits it is that for the last that divides, or None.

        ``samples`` is the share of the global batch that a data-parallel group has.
        """
        prediction = None
        for micro_batch in sizes:
            if samples % micro_batch or not _can_cut(config, micro_batch):
                continue
            # The activations shrink with the micro-batch: without tracing a step, this one cannot
            # fit.
            if prediction and micro_batch != sizes[-1]:
                saved = (1 - micro_batch / prediction.micro_batch) * prediction.estimate.activations
                if prediction.memory - saved > USABLE * self.cluster.memory:
                    continue
            prediction = self.predict(config, micro_batch, samples // micro_batch)
            if prediction.fits:
                break
        return prediction

    def settings_of(self, prediction: Prediction) -> str:
        """Return the flags that start the run of ``prediction`` with this config."""
        tensor = prediction.tensor
        stated = self.config["parallel"]["tensor"]
        values: dict[str, Any] = {}
        if tensor != stated:
            # The two keys below must not contradict a stated `parallel`.
            if stated["size"] > 1:
                values["parallel"] = None
            values["TENSOR_PARALLEL_SIZE"] = tensor["size"]
            values["TENSOR_PARALLEL_MODE"] = tensor["mode"]
            if tensor.get("depth", 1) > 1:
                values["parallel.tensor.depth"] = tensor["depth"]
        stage = prediction.zero
        if stage != (self.config["zero"] and self.config["zero"]["stage"]):
            values["zero"] = stage and f"'dict(stage={stage})'"
        if not self.config["MICRO_BATCH_SIZE"]:
            values["MICRO_BATCH_SIZE"] = prediction.micro_batch
        return " ".join(f"--set {key}={value}" for key, value in values.items())

    def predict(
        self,
        config: Values,
        micro_batch: int,
        accumulation: int,
        image_size: int | None = None,
    ) -> Prediction:
        """Return the prediction for the mode of ``config``, this micro-batch and size of images."""
        tensor = config["parallel"]["tensor"]
        split = self.plan.world_size, micro_batch, accumulation
        estimate = estimate_step(config, *split, image_size=image_size)
        # The ranks of a group share the decoding of a micro-batch, and gather it as uint8.
        rows = -(-micro_batch // tensor["size"])
        decoding = rows * accumulation / self.cluster.decode
        if decoding and tensor["size"] > 1:
            route = "all_gather", tuple(range(tensor["size"]))
            nbytes = 3 * (image_size or config["MODEL"]["image_size"]) ** 2 * micro_batch
            estimate = replace(
                estimate,
                calls=estimate.calls + Counter({route: accumulation}),
                nbytes=estimate.nbytes + Counter({route: accumulation * nbytes}),
            )
        # a tensor-parallel model is not compiled
        speedup = self.speedup if tensor["size"] == 1 else 1.0
        slow, fast = self._step_times(estimate, accumulation, speedup)
        fastest_step = max(fast, decoding)
        memory = estimate.peak + NCCL_BUFFERS * estimate.groups
        return Prediction(
            tensor=tensor,
            zero=config["zero"] and config["zero"]["stage"],
            data_parallel=self.plan.world_size // tensor["size"],
            micro_batch=micro_batch,
            accumulation=accumulation,
            estimate=estimate,
            memory=memory,
            fits=memory <= USABLE * self.cluster.memory,
            slowest_step=max(slow, decoding),
            fastest_step=fastest_step,
            # A thousandth more than the decoding is a wait all the same.
            waits=fastest_step <= 1.001 * decoding,
        )

    def _step_times(
        self, estimate: StepEstimate, accumulation: int, speedup: float
    ) -> tuple[float, float]:
        """Return the slowest and the fastest seconds of a step, without decoding."""
        compute = estimate.flops / self.rate
        launches = LAUNCH_SECONDS * (count_blocks(self.config["MODEL"]) or BLOCKS) * accumulation
        traffic = OPTIMIZERS[self.config["OPTIMIZER"]["name"]].traffic
        # numbers that a parameter's update reads and writes, each as large as its gradient
        update = traffic * estimate.gradients / MEMORY_BANDWIDTH

        of_gradients = 0.0
        of_tensor_parallelism = 0.0
        for (name, ranks), nbytes in estimate.nbytes.items():
            calls = estimate.calls[name, ranks]
            seconds = self.cluster.seconds(name, ranks, calls, nbytes)
            # Only gradients are exchanged over the data-parallel group; with ZeRO parameters too.
            if ranks == estimate.data_ranks:
                of_gradients += seconds
            else:
                of_tensor_parallelism += seconds
        communication = of_gradients + of_tensor_parallelism
        # Messages may hide behind the backward pass of the last micro-batch only.
        hidden = min(of_gradients, BACKWARD_SHARE * compute / speedup / accumulation)

        slow = max(compute, launches) + update + communication
        fast = max(compute / speedup, launches) + update + (communication - hidden)
        return slow, fast


def _tensor_settings(world_size: int, stated: dict[str, Any]) -> list[dict[str, Any]]:
    """Return values of parallel.tensor for up to 64 of the GPUs, and the config's ``stated``.

    2.5D has at most the depth of its side, as in its paper.
    """
    tensors = [NO_TENSOR_PARALLELISM]
    tensors += [{"mode": "1d", "size": size} for size in range(2, 65)]
    tensors += [{"mode": "2d", "size": side**2} for side in range(2, 9)]
    for side in range(2, 9):
        for depth in range(2, side + 1):
            tensors.append({"mode": "2.5d", "size": depth * side**2, "depth": depth})
    tensors += [{"mode": "3d", "size": side**3} for side in range(2, 5)]
    fitting = [
        tensor for tensor in tensors if world_size % tensor["size"] == 0 and tensor["size"] <= 64
    ]
    return fitting if stated in fitting else [*fitting, stated]


def _can_cut(config: Values, micro_batch: int) -> bool:
    """Return whether the run would not be refused."""
    try:
        check_zero(config)
        check_compile(config)
        check_tensor_parallel(config["parallel"], config["MODEL"], micro_batch)
    except UserError:
        return False
    return True


def check_limits(config: Values, plan: Plan, memory: float) -> None:
    """Raise `UserError` for a model that certainly needs more than ``memory`` bytes.

    This is a lower bound: weights, gradients and moments in float32 (16 bits with APEX O3).
    """
    model = config["MODEL"]
    parameters, trained = count_parameters(build_on_meta(model, config["FREEZE"]))
    # Bytes of a number: only O3 keeps the optimizer's state in half precision.
    number = 2 if (config["fp16"] or {}).get("opt_level") == "O3" else 4
    state_of_matrix = state_names(config["OPTIMIZER"], is_matrix=True)
    moments = sum(name != "step" for name in state_of_matrix)
    state = number * (parameters + trained * (1 + moments))
    state //= plan.world_size if config["zero"] else plan.tensor_parallel
    if state > memory:
        raise UserError(
            f"MODEL={dict(model)}: {parameters:.3g} parameters take {state / 1e9:,.1f} GB per "
            f"process, more than the {memory / 1e9:,.1f} GB here: use a smaller model, or split it "
            "over more GPUs (zero, tensor parallelism)"
        )
