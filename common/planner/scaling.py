"""Predict memory, traffic and step time of each parallel mode on N GPUs."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sympy import divisors

from common.colossal import check_compile, check_tensor_parallel, check_zero, compute_dtype, name_dtype
from common.config.plan import Plan
from common.errors import UserError
from common.model.flops import PEAKS
from common.optim.build import OPTIMIZERS
from common.planner.cluster import Cluster
from common.planner.step_estimate import StepEstimate, estimate_step

ASSUMED_MFU = 0.23  # of an H100's peak: 2,100 images/s of ViT-B/16 at 224 pixels, a good end-to-end run
BEST_MFU = 0.40  # compiled, with a bfloat16 residual stream
LAUNCH = 1e-3  # least seconds per block and micro-batch: the host launches about 100 kernels
MEMORY_BANDWIDTH = 2e12  # bytes/s that optimizer kernels reach; an H100 has 3.35e12
USABLE = 0.9  # of a GPU's memory; the rest is CUDA's context, NCCL's buffers and fragmentation
BACKWARD_SHARE = 2 / 3  # of the time of both passes
WHOLE = {"mode": None, "size": 1}


@dataclass(frozen=True)
class Prediction:
    """One way to train on N GPUs: how batch and model are split, and the seconds of a step.

    ``step``: the worst case, in which nothing overlaps but decoding. ``fastest_step``: the best case, a well-tuned GPU
    that sends gradients during the last micro-batch's backward pass.
    """

    tensor: Mapping[str, Any]
    zero: int | None
    data_parallel: int
    micro_batch: int
    accumulation: int
    estimate: StepEstimate
    fits: bool
    step: float
    fastest_step: float

    @property
    def mode(self) -> str:
        """Short name, such as "2.5d 2 x 2 x 1" or "1d 2, zero 3"."""
        if self.zero:
            return f"{replace(self, zero=None).mode}, zero {self.zero}" if self.tensor["mode"] else f"zero {self.zero}"
        mode, size, depth = self.tensor["mode"], self.tensor["size"], self.tensor.get("depth", 1)
        if mode is None:
            return "data parallel"
        if mode == "1d":
            return f"1d {size}"
        side = round(size ** (1 / 3)) if mode == "3d" else math.isqrt(size // depth)
        return f"{mode} {side} x {side}" + {"2d": "", "2.5d": f" x {depth}", "3d": f" x {side}"}[mode]


def predict_modes(config: Mapping[str, Any], plan: Plan, cluster: Cluster, rate: float) -> list[Prediction]:
    """Return a prediction for each way to split the model that the plan's GPUs and global batch allow.

    Those with `zero` are included if it is set, or if data parallelism alone does not fit.
    A GPU sustains ``rate`` FLOP/s. Micro-batches hold as many samples per GPU as the plan, or the most that fit in
    memory.
    """
    tensors = _ways(plan.gpus, config["parallel"]["tensor"])
    ways = [_predict(config, tensor, None, plan, cluster, rate) for tensor in tensors]
    if config["zero"] or (ways[0] and not ways[0].fits):
        sharded = [(WHOLE, 1), (WHOLE, 3), *((way.tensor, 3) for way in ways if way and way.tensor["mode"] == "1d")]
        for tensor, stage in sharded:
            if tensor["size"] < plan.gpus:
                ways.append(_predict(config, tensor, stage, plan, cluster, rate))
    return [prediction for prediction in ways if prediction]


def predict_plan(config: Mapping[str, Any], plan: Plan, cluster: Cluster, rate: float) -> Prediction:
    """Return the prediction for the plan as it is: the config's mode and micro-batch."""
    return _predict_batch(config, plan.micro_batch, plan.accumulation, plan, cluster, rate)


def whole_model_flops(config: Mapping[str, Any]) -> int:
    """Return the FLOPs per image, including recomputation, of one GPU training the whole model."""
    return estimate_step({**config, "parallel": _parallel(WHOLE)}, 1, 1).flops


def assumed_flops(config: Mapping[str, Any]) -> float:
    """Return the FLOP/s that a GPU is assumed to sustain."""
    half, tf32, single = PEAKS["H100"]
    in_half = name_dtype(compute_dtype(config["fp16"], "cuda")) != "float32"
    return ASSUMED_MFU * (half if in_half else tf32 if config["TF32"] else single) * 1e12


def _ways(gpus: int, own: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield ``own`` and the tensor-parallel settings of up to 64 GPUs; 2.5d has depth 2 to the side, as its paper."""
    tensors = [WHOLE, *({"mode": "1d", "size": size} for size in range(2, 65))]
    tensors += [{"mode": "2d", "size": side**2} for side in range(2, 9)]
    tensors += [{"mode": "2.5d", "size": n * side**2, "depth": n} for side in range(2, 9) for n in range(2, side + 1)]
    tensors += [{"mode": "3d", "size": side**3} for side in range(2, 5)]
    fitting = [tensor for tensor in tensors if gpus % tensor["size"] == 0 and tensor["size"] <= 64]
    yield from fitting if own in fitting else [*fitting, own]


def _parallel(tensor: Mapping[str, Any]) -> dict[str, Any]:
    return {"pipeline": 1, "tensor": tensor}


def _predict(
    config: Mapping[str, Any],
    tensor: Mapping[str, Any],
    zero: int | None,
    plan: Plan,
    cluster: Cluster,
    rate: float,
) -> Prediction | None:
    """Return the prediction with the largest micro-batch that fits; None if the model cannot be split this way."""
    config = {**config, "parallel": _parallel(tensor), "zero": {"stage": zero} if zero else None}
    data_parallel, usable = plan.gpus // tensor["size"], USABLE * cluster.memory
    samples, rest = divmod(plan.total_batch, data_parallel)
    largest = plan.micro_batch * tensor["size"] / plan.tensor_parallel
    if rest or not samples:
        return None
    prediction = None
    for accumulation in (int(n) for n in divisors(samples) if samples / n <= largest):
        micro_batch = samples // accumulation
        if not _can_cut(config, micro_batch, plan.gpus):
            continue
        if prediction and _scaled_memory(prediction.estimate, micro_batch / prediction.micro_batch) > usable:
            continue
        prediction = _predict_batch(config, micro_batch, accumulation, plan, cluster, rate)
        if prediction.fits:
            break
    return prediction


def _predict_batch(
    config: Mapping[str, Any], micro_batch: int, accumulation: int, plan: Plan, cluster: Cluster, rate: float
) -> Prediction:
    """Return the prediction for the mode of ``config`` and this micro-batch."""
    tensor, zero = config["parallel"]["tensor"], config["zero"] and config["zero"]["stage"]
    estimate = estimate_step(config, plan.gpus, micro_batch, accumulation)
    times = _step_times(config, estimate, micro_batch * accumulation, accumulation, cluster, rate)
    fits = estimate.peak <= USABLE * cluster.memory
    return Prediction(tensor, zero, plan.gpus // tensor["size"], micro_batch, accumulation, estimate, fits, *times)


def _can_cut(config: Mapping[str, Any], micro_batch: int, gpus: int) -> bool:
    try:
        check_zero(config)
        check_compile(config["COMPILE"], config["parallel"]["tensor"]["size"])
        check_tensor_parallel(config["parallel"], config["MODEL"], micro_batch, gpus)
    except UserError:
        return False
    return True


def _scaled_memory(estimate: StepEstimate, share: float) -> float:
    """Return the expected peak when the micro-batch is scaled by ``share``."""
    return estimate.peak - (1 - share) * estimate.activations


def _step_times(
    config: Mapping[str, Any],
    estimate: StepEstimate,
    samples: int,
    accumulation: int,
    cluster: Cluster,
    rate: float,
) -> tuple[float, float]:
    """Return the seconds of a step of ``samples`` per GPU in the worst and in the best case, as in `Prediction`."""
    compute = estimate.flops / rate
    launches = LAUNCH * config["MODEL"]["depth"] * accumulation
    update = OPTIMIZERS[config["OPTIMIZER"]["name"]].traffic * estimate.gradients / MEMORY_BANDWIDTH
    seconds = {True: 0.0, False: 0.0}  # of data-parallel and of tensor-parallel collectives
    for (name, ranks), nbytes in estimate.nbytes.items():
        seconds[ranks == estimate.data_ranks] += cluster.seconds(name, ranks, estimate.calls[name, ranks], nbytes)
    hidden = 0.0 if config["gradient_handler"] else min(seconds[True], BACKWARD_SHARE * compute / accumulation)
    speedup = 1.0 if cluster.images_per_s else BEST_MFU / ASSUMED_MFU

    def step(compute: float, hidden: float) -> float:
        communication = seconds[True] + seconds[False] - hidden
        return max(max(compute, launches) + update + communication, samples / cluster.decode)

    return step(compute, 0.0), step(compute / speedup, hidden / speedup)
