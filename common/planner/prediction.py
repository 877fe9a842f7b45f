"""Predict memory, traffic and step time of each parallel mode on N GPUs of a cluster."""

import argparse
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from common.colossal import (
    check_compile,
    check_tensor_parallel,
    check_zero,
    compute_dtype,
    name_dtype,
)
from common.config.plan import Plan
from common.errors import UserError
from common.model.build import build_on_meta, count_parameters
from common.model.flops import PEAKS, known_gpu
from common.optim.build import OPTIMIZERS, state_names
from common.planner.step_estimate import Route, StepEstimate, count_blocks, estimate_step

ASSUMED_MFU = (
    0.23  # of an H100's peak: 2,100 images/s of ViT-B/16 at 224 pixels, a good end-to-end run
)
BEST_MFU = 0.40  # compiled, with a bfloat16 residual stream
LAUNCH = 1e-3  # least seconds per block and micro-batch: the host launches about 100 kernels
BLOCKS = 12  # of a model that does not say how many
MEMORY_BANDWIDTH = 2e12  # bytes/s that optimizer kernels reach; an H100 has 3.35e12
USABLE = 0.9  # of a GPU's memory; the rest is CUDA's context, NCCL's buffers and fragmentation
BACKWARD_SHARE = 2 / 3  # of the time of both passes
LATENCY = 20e-6  # least seconds per collective; an assumption
WHOLE = {"mode": None, "size": 1}


@dataclass(frozen=True)
class Cluster:
    """GPUs and their hosts.

    ``gpu`` as in `PEAKS`; ``memory`` in bytes; ``node`` GPUs per node; ``inside``, ``between``:
    bytes/s that a GPU sends within and between nodes; ``decode``: images/s that the host decodes
    per GPU; ``images_per_s``: measured rate of one GPU training the whole model, without
    communication.
    """

    gpu: str = "H100"
    memory: float = 80e9
    node: int = 8
    inside: float = 450e9
    between: float = 50e9
    decode: float = 7300.0
    images_per_s: float | None = None

    def seconds(self, name: str, ranks: tuple[int, ...], calls: int, nbytes: int) -> float:
        """Return the time of collectives: a ring sends their bytes over its slowest link.

        In a group that spans nodes, each member has its own network link.
        """
        members = self._members(ranks)
        bandwidth = (
            self.inside if members == len(ranks) else min(self.inside, members * self.between)
        )
        return (
            0.0
            if len(ranks) == 1
            else calls * LATENCY + sent_share(name, len(ranks)) * nbytes / bandwidth
        )

    def sent(self, nbytes_by_route: Mapping[Route, int]) -> tuple[float, float]:
        """Return the bytes that a GPU sends in groups within a node, and in groups that span
        nodes.
        """
        sent = {True: 0.0, False: 0.0}
        for (name, ranks), nbytes in nbytes_by_route.items():
            sent[self._members(ranks) == len(ranks)] += sent_share(name, len(ranks)) * nbytes
        return sent[True], sent[False]

    def _members(self, ranks: tuple[int, ...]) -> int:
        """Return the largest number of ``ranks`` on one node."""
        return max(Counter(rank // self.node for rank in ranks).values())


def sent_share(name: str, size: int) -> float:
    """Return the ratio of bytes sent per process to message bytes, averaged over a group of
    ``size``.

    For ring algorithms, which are optimal (Patarasuk and Yuan, 2009).
    """
    return (2 if name == "all_reduce" else 1) * (size - 1) / size


# images/s that 8 cores decode and augment, by loader: 1.1 and 2.88 ms of CPU time an image
# (docs/performance.md)
DECODE = {"dali": 7300.0, "torchvision": 2800.0, "memory": math.inf}
# The flags of `Cluster`'s fields.
CLUSTER_FLAGS = ("gpu_memory", "gpus_per_node", "links", "images_per_s", "decode_images_per_s")


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `parse_cluster` reads."""
    group = parser.add_argument_group(
        "prediction", "with --dry-run --gpus N; defaults: DGX H100 nodes"
    )
    group.add_argument("--gpu-memory", type=_positive, help="GPU memory in GB (default: 80)")
    group.add_argument("--gpus-per-node", type=at_least_1, help="default: 8")
    links = (
        "bandwidth per GPU within and between nodes (default: 450 50: NVLink 4, one 400 Gb/s link "
        "per GPU)"
    )
    group.add_argument("--links", type=_positive, nargs=2, metavar="GB/S", help=links)
    group.add_argument(
        "--images-per-s",
        type=_positive,
        help="measured training rate of one GPU with the whole model",
    )
    group.add_argument(
        "--decode-images-per-s",
        type=_positive,
        help="images/s the host decodes per GPU (default: by the loader)",
    )


def at_least_1(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected an integer >= 1")
    return int(text)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0 and finite")
    return value


def parse_cluster(args: argparse.Namespace, decode: float) -> Cluster:
    """Return the cluster described by the flags, of GPUs like this machine's if it has one.

    ``decode`` is what takes the place of ``--decode-images-per-s``.
    """
    inside, between = args.links or (None, None)
    sizes = {"memory": args.gpu_memory, "inside": inside, "between": between}
    rates = {
        "node": args.gpus_per_node,
        "images_per_s": args.images_per_s,
        "decode": args.decode_images_per_s or decode,
    }
    given = {name: value and 1e9 * value for name, value in sizes.items()} | rates
    return replace(
        cluster_here(), **{name: value for name, value in given.items() if value is not None}
    )


def cluster_here() -> Cluster:
    """Return a cluster of GPUs like this machine's, or of H100s with 80 GB without one."""
    if not torch.cuda.is_available():
        return Cluster()
    properties = torch.cuda.get_device_properties(0)
    return Cluster(known_gpu(properties.name) or "H100", properties.total_memory)


@dataclass(frozen=True)
class Prediction:
    """One way to train on N GPUs: how batch and model are split, and the seconds of a step.

    ``slowest_step``: the worst case, in which nothing overlaps but decoding. ``fastest_step``: the
    best case, a well-tuned GPU that sends gradients during the last micro-batch's backward pass.
    ``waits``: even it waits for decoding.
    """

    tensor: Mapping[str, Any]
    zero: int | None
    data_parallel: int
    micro_batch: int
    accumulation: int
    estimate: StepEstimate
    fits: bool
    slowest_step: float
    fastest_step: float
    waits: bool

    @property
    def mode(self) -> str:
        """Short name, such as "2.5d 2 x 2 x 1" or "1d 2, zero 3"."""
        mode, size, depth = self.tensor["mode"], self.tensor["size"], self.tensor.get("depth", 1)
        side = round(size ** (1 / 3)) if mode == "3d" else math.isqrt(size // depth)
        square = f"{mode} {side} x {side}"
        names = {
            None: "",
            "1d": f"1d {size}",
            "2d": square,
            "2.5d": f"{square} x {depth}",
            "3d": f"{square} x {side}",
        }
        return (
            ", ".join(filter(None, (names[mode], f"zero {self.zero}" * bool(self.zero))))
            or "data parallel"
        )

    @property
    def total_batch(self) -> int:
        return self.data_parallel * self.micro_batch * self.accumulation

    @property
    def images_per_s(self) -> tuple[float, float]:
        """The rate of the worst and of the best case."""
        return self.total_batch / self.slowest_step, self.total_batch / self.fastest_step


class Planner:
    """Predicts the steps of a config's plan on a cluster, whose GPUs sustain ``rate`` to ``rate *
    speedup`` FLOP/s.
    """

    def __init__(self, config: Mapping[str, Any], plan: Plan, cluster: Cluster) -> None:
        self.config, self.plan, self.cluster = config, plan, cluster
        half, tf32, single = PEAKS[cluster.gpu]
        in_half = name_dtype(compute_dtype(config["fp16"], "cuda")) != "float32"
        self.rate = ASSUMED_MFU * (half if in_half else tf32 if config["TF32"] else single) * 1e12
        self.speedup = (
            1.0 if cluster.images_per_s or config["COMPILE"] is False else BEST_MFU / ASSUMED_MFU
        )
        if cluster.images_per_s:  # of one GPU, with the whole model
            self.rate = (
                cluster.images_per_s
                * estimate_step({**config, "parallel": {"tensor": WHOLE}}, 1, 1).flops
            )

    def predict_modes(self) -> list[Prediction]:
        """Return a prediction for the run of each way to split the model that the plan's GPUs and
        batch allow.

        Those with `zero` are included if it is set, or if data parallelism alone does not fit.
        """
        ways = [
            self._predict_way(tensor, None)
            for tensor in _ways(self.plan.gpus, self.config["parallel"]["tensor"])
        ]
        if self.config["zero"] or (ways[0] and not ways[0].fits):
            sharded = [
                (WHOLE, 1),
                (WHOLE, 3),
                *((way.tensor, 3) for way in ways if way and way.tensor["mode"] == "1d"),
            ]
            ways += [
                self._predict_way(tensor, stage)
                for tensor, stage in sharded
                if tensor["size"] < self.plan.gpus
            ]
        return [prediction for prediction in ways if prediction]

    def _predict_way(self, tensor: Mapping[str, Any], zero: int | None) -> Prediction | None:
        """Return the prediction with MICRO_BATCH_SIZE, if it is set, else with the largest
        micro-batch that fits.
        """
        groups, stated = self.plan.gpus // tensor["size"], self.config["MICRO_BATCH_SIZE"]
        samples, rest = divmod(self.plan.total_batch, groups)
        if self.plan.total_is_derived:
            samples, rest = self.plan.micro_batch * self.plan.accumulation, 0
        sizes = (
            [min(stated, samples)] if stated else range(min(samples, 2**16), 0, -1)
        )  # no GPU holds more
        config = {
            **self.config,
            "parallel": {"tensor": tensor},
            "zero": {"stage": zero} if zero else None,
        }
        return None if rest else self.predict_largest(config, samples, sizes)

    def predict_largest(
        self, config: Mapping[str, Any], samples: int, sizes: Sequence[int]
    ) -> Prediction | None:
        """Return the prediction for the first of the micro-batches ``sizes`` that fits, or the
        last; None without any.

        ``samples`` is what a data-parallel group has of the global batch.
        """
        prediction = None
        for micro_batch in sizes:
            if samples % micro_batch or not _can_cut(config, micro_batch):
                continue
            if (
                prediction and micro_batch != sizes[-1]
            ):  # the activations shrink with the micro-batch
                saved = (1 - micro_batch / prediction.micro_batch) * prediction.estimate.activations
                if prediction.estimate.peak - saved > USABLE * self.cluster.memory:
                    continue
            prediction = self.predict(config, micro_batch, samples // micro_batch)
            if prediction.fits:
                break
        return prediction

    def settings_of(self, prediction: Prediction) -> str:
        """Return the flags that start the run of ``prediction`` with this config."""
        tensor, own, zero = prediction.tensor, self.config["parallel"]["tensor"], prediction.zero
        values: dict[str, Any] = {}
        if tensor != own:
            values |= (
                {"parallel": None} if own["size"] > 1 else {}
            )  # from which the two keys must not differ
            values |= {
                "TENSOR_PARALLEL_SIZE": tensor["size"],
                "TENSOR_PARALLEL_MODE": tensor["mode"],
            }
            values |= (
                {"parallel.tensor.depth": tensor["depth"]} if tensor.get("depth", 1) > 1 else {}
            )
        if zero != (self.config["zero"] and self.config["zero"]["stage"]):
            values["zero"] = zero and f"'dict(stage={zero})'"
        if not self.config["MICRO_BATCH_SIZE"]:
            values["MICRO_BATCH_SIZE"] = prediction.micro_batch
        return " ".join(f"--set {key}={value}" for key, value in values.items())

    def predict(self, config: Mapping[str, Any], micro_batch: int, accumulation: int) -> Prediction:
        """Return the prediction for the mode of ``config`` and this micro-batch."""
        tensor, zero = config["parallel"]["tensor"], config["zero"] and config["zero"]["stage"]
        estimate = estimate_step(config, self.plan.gpus, micro_batch, accumulation)
        decoding = micro_batch * accumulation / self.cluster.decode
        slow, fast = (
            max(seconds, decoding) for seconds in self._step_times(estimate, accumulation)
        )
        fits, waits = estimate.peak <= USABLE * self.cluster.memory, fast <= 1.001 * decoding
        cut = self.plan.gpus // tensor["size"], micro_batch, accumulation
        return Prediction(tensor, zero, *cut, estimate, fits, slow, fast, waits)

    def _step_times(self, estimate: StepEstimate, accumulation: int) -> tuple[float, float]:
        """Return the seconds of a step without decoding, in the worst and in the best case, as in
        `Prediction`.
        """
        compute = estimate.flops / self.rate
        launches = LAUNCH * (count_blocks(self.config["MODEL"]) or BLOCKS) * accumulation
        update = (
            OPTIMIZERS[self.config["OPTIMIZER"]["name"]].traffic
            * estimate.gradients
            / MEMORY_BANDWIDTH
        )
        seconds = {True: 0.0, False: 0.0}  # of data-parallel and of tensor-parallel collectives
        for (name, ranks), nbytes in estimate.nbytes.items():
            calls = estimate.calls[name, ranks]
            seconds[ranks == estimate.data_ranks] += self.cluster.seconds(
                name, ranks, calls, nbytes
            )
        hidden = min(seconds[True], BACKWARD_SHARE * compute / self.speedup / accumulation)
        communication = seconds[True] + seconds[False]
        slow = max(compute, launches) + update + communication
        fast = max(compute / self.speedup, launches) + update + (communication - hidden)
        return slow, fast


def _ways(gpus: int, own: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tensor-parallel settings of up to 64 GPUs and ``own``; 2.5d has depth 2 to the
    side, as its paper.
    """
    tensors = [WHOLE, *({"mode": "1d", "size": size} for size in range(2, 65))]
    tensors += [{"mode": "2d", "size": side**2} for side in range(2, 9)]
    tensors += [
        {"mode": "2.5d", "size": n * side**2, "depth": n}
        for side in range(2, 9)
        for n in range(2, side + 1)
    ]
    tensors += [{"mode": "3d", "size": side**3} for side in range(2, 5)]
    fitting = [tensor for tensor in tensors if gpus % tensor["size"] == 0 and tensor["size"] <= 64]
    return fitting if own in fitting else [*fitting, own]


def _can_cut(config: Mapping[str, Any], micro_batch: int) -> bool:
    try:
        check_zero(config)
        check_compile(config)
        check_tensor_parallel(config["parallel"], config["MODEL"], micro_batch)
    except UserError:
        return False
    return True


def check_limits(config: Mapping[str, Any], plan: Plan, memory: float) -> None:
    """Raise `UserError` for a model that certainly needs more than ``memory`` bytes.

    This is a lower bound: weights, gradients and moments in float32 (16 bits with APEX O3).
    """
    model = config["MODEL"]
    parameters, trained = count_parameters(build_on_meta(model, config["FREEZE"]))
    number = 2 if (config["fp16"] or {}).get("opt_level") == "O3" else 4
    moments = sum(
        name != "step" for name in state_names(config["OPTIMIZER"], "blocks.0.mlp.fc1.weight")
    )
    state = number * (parameters + trained * (1 + moments))
    state //= plan.gpus if config["zero"] else plan.tensor_parallel
    if state > memory:
        raise UserError(
            f"MODEL={dict(model)}: {parameters:.3g} parameters take {state / 1e9:,.1f} GB per "
            "process, more than the "
            f"{memory / 1e9:,.1f} GB here: use a smaller model, or split it over more GPUs (zero, "
            "tensor parallelism)"
        )
