"""The GPUs and links of a prediction, and the flags of --dry-run that describe them."""

import argparse
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from common.errors import at_least_1
from common.model.flops import known_gpu
from common.planner.step_estimate import Route

LATENCY = 20e-6  # least seconds per collective; an assumption
# images/s that a host decodes and augments for a GPU, by loader: DALI's measured with an H200 that
# trains ViT-S/16, and 16 cores; torchvision's is 8 cores at 2.88 ms of CPU time an image
# (docs/performance.md)
DECODE = {"dali": 2600.0, "torchvision": 2800.0, "memory": math.inf}
# The flags that `add_cluster_arguments` adds.
CLUSTER_FLAGS = ("gpu_memory", "gpus_per_node", "links", "images_per_s", "decode_images_per_s")


@dataclass(frozen=True)
class Cluster:
    """GPUs and their hosts."""

    gpu: str = "H100"  # a key of PEAKS
    memory: float = 80e9  # bytes
    node: int = 8  # GPUs per node
    inside: float = 450e9  # bytes/s that a GPU sends within its node
    between: float = 50e9  # bytes/s that a GPU sends to other nodes
    decode: float = DECODE["dali"]  # images/s that the host decodes per GPU
    # measured images/s of one GPU training the whole model, without communication
    images_per_s: float | None = None

    def seconds(self, name: str, ranks: tuple[int, ...], calls: int, nbytes: int) -> float:
        """Return the time of ``calls`` collectives of ``nbytes`` in all, by a ring's slowest link.

        In a group that spans nodes, each member has its own network link.
        """
        if len(ranks) == 1:
            return 0.0
        bandwidth = self.inside
        members = self._members(ranks)
        if members < len(ranks):
            bandwidth = min(self.inside, members * self.between)
        return calls * LATENCY + sent_share(name, len(ranks)) * nbytes / bandwidth

    def sent(self, nbytes_by_route: Mapping[Route, int]) -> tuple[float, float]:
        """Return the bytes that a GPU sends in groups within a node, and in groups beyond it."""
        inside = 0.0
        between = 0.0
        for (name, ranks), nbytes in nbytes_by_route.items():
            sent = sent_share(name, len(ranks)) * nbytes
            if self._members(ranks) < len(ranks):
                between += sent
            else:
                inside += sent
        return inside, between

    def _members(self, ranks: tuple[int, ...]) -> int:
        """Return the largest number of ``ranks`` on one node."""
        return max(Counter(rank // self.node for rank in ranks).values())


def sent_share(name: str, size: int) -> float:
    """Return the bytes that a process sends for each byte of a message, averaged over a group.

    For ring algorithms, which are optimal (Patarasuk and Yuan, 2009).
    """
    return (2 if name == "all_reduce" else 1) * (size - 1) / size


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `parse_cluster` reads."""
    group = parser.add_argument_group("prediction", "with --dry-run; defaults: DGX H100 nodes")
    add = group.add_argument
    add("--gpu-memory", type=_positive, help="GPU memory in GB (default: 80)")
    add("--gpus-per-node", type=at_least_1, default=8, help="default: 8")
    add(
        "--links",
        type=_positive,
        nargs=2,
        default=(450, 50),
        metavar="GB/S",
        help="bandwidth per GPU within and between nodes (default: 450 50: NVLink 4, one 400 Gb/s "
        "link per GPU)",
    )
    add(
        "--images-per-s",
        type=_positive,
        help="measured training rate of one GPU with the whole model",
    )
    add(
        "--decode-images-per-s",
        type=_positive,
        help="images/s the host decodes per GPU (default: by the loader)",
    )


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0 and finite")
    return value


def parse_cluster(args: argparse.Namespace, decode: float) -> Cluster:
    """Return the cluster described by the flags, of GPUs like this machine's if it has one.

    ``decode`` is used without ``--decode-images-per-s``.
    """
    here = cluster_here()
    inside, between = args.links
    return replace(
        here,
        memory=1e9 * args.gpu_memory if args.gpu_memory else here.memory,
        node=args.gpus_per_node,
        inside=1e9 * inside,
        between=1e9 * between,
        images_per_s=args.images_per_s,
        decode=args.decode_images_per_s or decode,
    )


def cluster_here() -> Cluster:
    """Return a cluster of GPUs like this machine's, or of H100s with 80 GB without one."""
    if not torch.cuda.is_available():
        return Cluster()
    properties = torch.cuda.get_device_properties(0)
    return Cluster(known_gpu(properties.name) or "H100", properties.total_memory)
