"""Flip single bits on one rank while REPLAY_EVERY computes twice; count the finds.

python -m common.testing.bit_flips              the table of docs/reliability.md
python -m common.testing.bit_flips --steps 10000     alarms without a flip, and the cost
"""

import argparse
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import cycle, product
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from common.engine import repeated_pass
from common.engine.engine import Engine
from common.engine.tensor_parallel.sharding import named_shards
from common.engine.upstream import ParallelMode, gpc
from common.testing.parity_cases import CASES, build_engine, micro_batches
from common.testing.ranks import launched, run_ranks

# Bits of a float32; of the exponent any.
BITS = {
    "sign": [31],
    "exponent": range(23, 31),
    "mantissa's top": [22],
    "mantissa's middle": [11],
}
REPEATED = dict(REPLAY_EVERY=1, MAX_REPLAY_FAULTS=10**9)


class Found(NamedTuple):
    place: str
    bit: str
    ranks: list[int]  # that differ, as the check says
    changed: bool  # whether this rank's gradients, or weights and state, differ in any bit


def draw_index(tensor: Tensor, draw: random.Random) -> tuple[int, ...]:
    return tuple(draw.randrange(size) for size in tensor.shape)


def flip(tensor: Tensor, index: tuple[int, ...], bit: int) -> None:
    """Flip a bit of an element in place."""
    bits = tensor.detach().view(torch.int32)
    bits[index] ^= -(2**31) if bit == 31 else 1 << bit


@contextmanager
def flipped(tensors: list[Tensor], draw: random.Random, bit: int) -> Iterator[None]:
    """Flip a bit of one of ``tensors``, and flip it back."""
    tensor = draw.choice(tensors)
    index = draw_index(tensor, draw)
    flip(tensor, index, bit)
    yield
    flip(tensor, index, bit)


@contextmanager
def flipped_weight(engine: Engine, draw: random.Random, bit: int) -> Iterator[None]:
    """Flip a bit of a weight in one pass."""
    shards = named_shards(engine.model).values()
    not_empty = [shard for shard in shards if shard.numel()]
    with flipped(not_empty, draw, bit):
        yield


@contextmanager
def flipped_activation(engine: Engine, draw: random.Random, bit: int) -> Iterator[None]:
    """Flip a bit in the output of a layer in one pass."""

    def change(_layer: nn.Module, _inputs: Any, output: Tensor) -> None:
        flip(output.data, draw_index(output, draw), bit)

    layer = draw.choice(list_layers(engine.model))
    handle = layer.register_forward_hook(change)
    yield
    handle.remove()


@contextmanager
def flipped_gradient(engine: Engine, draw: random.Random, bit: int) -> Iterator[None]:
    """Flip a bit in the gradient of a layer's output in one pass."""

    def change(grad: Tensor) -> Tensor:
        changed = grad.clone()
        flip(changed, draw_index(grad, draw), bit)
        return changed

    def watch(_layer: nn.Module, _inputs: Any, output: Tensor) -> None:
        output.register_hook(change)

    layer = draw.choice(list_layers(engine.model))
    handle = layer.register_forward_hook(watch)
    yield
    handle.remove()


@contextmanager
def flipped_state(engine: Engine, draw: random.Random, bit: int) -> Iterator[None]:
    """Flip a bit of the optimizer's state in one update."""
    momenta = [entry["exp_avg"] for entry in engine.optimizer.optim.state.values()]
    not_empty = [momentum for momentum in momenta if momentum.numel()]
    with flipped(not_empty, draw, bit):
        yield


def list_layers(model: nn.Module) -> list[nn.Module]:
    """Return the linear layers and norms, of whatever mode."""
    layers = []
    for layer in model.modules():
        name = type(layer).__name__
        if "Linear" in name or "Norm" in name:
            layers.append(layer)
    return layers


PLACES = {
    "weight": flipped_weight,
    "activation": flipped_activation,
    "gradient": flipped_gradient,
    "state": flipped_state,
}


def build(**arguments: Any) -> tuple[Engine, list[Any]]:
    """Return an engine of the tiny model that has trained for a step, and batches on the device."""
    _, _, engine = build_engine("adamw", **arguments)
    engine.train()
    rank = gpc.get_local_rank(ParallelMode.DATA)
    size = gpc.get_world_size(ParallelMode.DATA)
    batches = list(micro_batches(2, rank, size))[:2]
    list(engine.train_step(iter(batches)))
    return engine, batches


class FaultyPass:
    """Stands in for ``compute`` of `repeated_pass`: ``fault`` acts in its first calls."""

    def __init__(
        self,
        compute: Callable[..., Tensor],
        fault: AbstractContextManager[None],
        passes: int,
    ):
        self.compute = compute
        self.fault = fault
        self.passes = passes
        self.calls = 0
        self.results: list[list[Tensor]] = [[], []]  # of each pass

    def __call__(self, *args: Any) -> Tensor:
        if self.calls == 0 and self.passes:
            self.fault.__enter__()
        with mock.patch.object(repeated_pass, "_sum_bits", self.keep):
            sums = self.compute(*args)
        self.calls += 1
        if self.calls == self.passes:
            self.fault.__exit__(None, None, None)
        return sums

    def keep(self, tensor: Tensor) -> Tensor:
        self.results[self.calls].append(tensor.view(torch.int32).clone())
        return sum_bits(tensor)


sum_bits = repeated_pass._sum_bits


def find_flips(mode: str, flips: int, faulty: int, lasting: bool) -> list[Found]:
    """Inject ``flips`` on rank ``faulty`` in turns of `PLACES` and `BITS`; return what was found.

    A flip is in one of two passes or updates. With ``lasting`` those of weights are in both, and
    there are no others.
    """
    rows = []
    places = ["weight"] if lasting else [*PLACES]
    kinds = cycle(product(BITS, places))
    _, config = CASES[mode]
    with launched(**config, **REPEATED):
        engine, batches = build()
        check = engine.repeated_pass
        assert check
        passes = 0
        if gpc.get_global_rank() == faulty:
            passes = 2 if lasting else 1
        for number, (bit, place) in zip(range(flips), kinds, strict=False):
            draw = random.Random(number)
            inject = PLACES[place]
            fault = inject(engine, draw, draw.choice(BITS[bit]))
            name = "_sum_update" if place == "state" else "_sum_gradients"
            compute = getattr(repeated_pass, name)
            faulty_pass = FaultyPass(compute, fault, passes)
            batch = engine._load_batch(iter(batches))
            with (
                mock.patch.object(repeated_pass, name, faulty_pass),
                mock.patch.object(check, "_report") as report,
            ):
                check.check(engine, *batch)
                if place == "state":
                    engine._add_gradients(*batch)
                    check.check_update(engine)
                    engine.optimizer.accumulated = 0
            said = report.call_args.args[2] if report.called else ()
            ranks = [int(text.split()[1]) for text in said]
            first, second = faulty_pass.results
            changed = not all(map(torch.equal, first, second))
            rows.append(Found(place, bit, ranks, changed))
    return rows


def count(mode: str, flips: int, lasting: bool = False) -> None:
    """Print a row for each place: found of injected, by bit."""
    world_size, _ = CASES[mode]
    by_rank = run_ranks(world_size, find_flips, mode, flips, 1, lasting)
    changed = 0
    for of_flip in zip(*by_rank, strict=True):
        changed += any(row.changed for row in of_flip)
    rows = by_rank[0]
    for place in dict.fromkeys(row.place for row in rows):
        of_place = [row for row in rows if row.place == place]
        cells = []
        for bit in BITS:
            injected = [row for row in of_place if row.bit == bit]
            noticed = [row for row in injected if row.ranks]
            cells.append(f"{bit} {len(noticed)} of {len(injected)}")
        print(f"{mode}, {place}: {', '.join(cells)}", flush=True)
    found = [row.ranks for row in rows if row.ranks]
    alone = found.count([1])
    print(
        f"{mode}: {changed} of {flips} changed a result; found {len(found)}, in {alone} rank 1 "
        "alone is named",
        flush=True,
    )


def train_clean(steps: int) -> None:
    """Train a model of the quickstart's size with a check in every step; print alarms and cost."""
    with launched(REPLAY_EVERY=1):
        engine, batches = build(width=128, depth=4)
        check = engine.repeated_pass
        seconds = {True: 0.0, False: 0.0}
        for step in range(2 * steps):
            engine.repeated_pass = check if step % 2 else None  # interleaved
            begun = time.process_time()
            list(engine.train_step(iter(batches)))
            seconds[bool(step % 2)] += time.process_time() - begun
        assert check
        share = seconds[True] / seconds[False] - 1
        print(
            f"{steps} checked steps, alarms: {check.differing}; a check costs {share:.2f} steps of "
            f"CPU time: with REPLAY_EVERY=1000 {share / 1000:.3%}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--flips", type=int, default=100)
    args = parser.parse_args()
    if args.steps:
        torch.set_num_threads(1)
        train_clean(args.steps)
    else:
        for mode in ("dp2", "1d-2", "zero 3"):
            count(mode, args.flips)
        print("a weight's flip that stays, in both passes:")
        count("dp2", args.flips // 4, lasting=True)
