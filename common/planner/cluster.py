"""Hardware of a cluster, for predictions."""

import argparse
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from common.errors import UserError
from common.planner.traffic import Route, sent_share

LATENCY = 20e-6  # least seconds per collective; an assumption


@dataclass(frozen=True)
class Cluster:
    """GPUs and their hosts.

    ``memory`` in bytes; ``node`` GPUs per node; ``inside``, ``between``: bytes/s that a GPU sends within and between
    nodes; ``decode``: images/s that the host decodes per GPU; ``images_per_s``: measured rate of one GPU training the
    whole model, without communication.
    """

    memory: float = 80e9
    node: int = 8
    inside: float = 450e9
    between: float = 50e9
    decode: float = 8000.0
    images_per_s: float | None = None

    def seconds(self, name: str, ranks: tuple[int, ...], calls: int, nbytes: int) -> float:
        """Return the time of collectives: a ring sends their bytes over its slowest link.

        In a group that spans nodes, each member has its own network link.
        """
        members = self._members(ranks)
        bandwidth = self.inside if members == len(ranks) else min(self.inside, members * self.between)
        return 0.0 if len(ranks) == 1 else calls * LATENCY + sent_share(name, len(ranks)) * nbytes / bandwidth

    def sent(self, nbytes_by_route: Mapping[Route, int]) -> tuple[float, float]:
        """Return the bytes that a GPU sends in groups within a node, and in groups that span nodes."""
        sent = {True: 0.0, False: 0.0}
        for (name, ranks), nbytes in nbytes_by_route.items():
            sent[self._members(ranks) == len(ranks)] += sent_share(name, len(ranks)) * nbytes
        return sent[True], sent[False]

    def _members(self, ranks: tuple[int, ...]) -> int:
        """Return the largest number of ``ranks`` on one node."""
        return max(Counter(rank // self.node for rank in ranks).values())


FLAGS = ("gpu_memory", "gpus_per_node", "links", "images_per_s", "decode_images_per_s")


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `parse_cluster` reads."""
    group = parser.add_argument_group("prediction", "with --dry-run --gpus N; defaults: DGX H100 nodes")
    group.add_argument("--gpu-memory", type=float, help="GPU memory in GB (default: 80)")
    group.add_argument("--gpus-per-node", type=int, help="default: 8")
    links = "bandwidth per GPU within and between nodes (default: 450 50: NVLink 4, one 400 Gb/s link per GPU)"
    group.add_argument("--links", type=float, nargs=2, metavar="GB/S", help=links)
    group.add_argument("--images-per-s", type=float, help="measured training rate of one GPU with the whole model")
    group.add_argument("--decode-images-per-s", type=float, help="images/s the host decodes per GPU (default: 8000)")


def parse_cluster(args: argparse.Namespace) -> Cluster:
    """Return the cluster described by the flags; raise `UserError` for a value that is not positive."""
    for name in FLAGS:
        value = getattr(args, name)
        if value is not None and not all(0 < one < math.inf for one in (value if name == "links" else [value])):
            raise UserError(f"--{name.replace('_', '-')} {value}: must be above 0 and finite")
    given = dict(memory=args.gpu_memory and 1e9 * args.gpu_memory, node=args.gpus_per_node)
    given["inside"], given["between"] = (1e9 * value for value in args.links) if args.links else (None, None)
    given["images_per_s"], given["decode"] = args.images_per_s, args.decode_images_per_s
    return Cluster(**{name: value for name, value in given.items() if value is not None})
