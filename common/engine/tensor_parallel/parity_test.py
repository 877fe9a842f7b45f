"""Every parallel mode equals a plain PyTorch loop in one process.

Compared in float32, from the same weights and data: losses, both noise scales, clipped gradients
and weights after 2 accumulated steps of each optimizer, some on a model with LayerScale and
registers, or RMSNorm and SwiGLU, with layer decay, Mixup and label smoothing, and of the head
alone. Skipped steps, which the plain loop does not have, leave no trace. An error is max|a - b| /
max|b| of the worst tensor.

On GPUs, in all modes for which there are enough: python -m pytest FILE --backend nccl
"""

import functools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from common.engine.tensor_parallel.layout import Sharding
from common.engine.tensor_parallel.sharding import gather_full, named_shards
from common.engine.upstream import ParallelMode, gpc
from common.optim.build import build_optimizer
from common.testing.late_collectives import Entry, late_collectives, stall
from common.testing.parity_cases import (
    ACCUMULATION,
    CASES,
    MAX_NORM,
    MICRO_BATCH,
    MODERN,
    OPTIMIZERS,
    STEPS,
    blended_loss,
    build_engine,
    build_tiny_model,
    fit,
    launched_clipping,
    micro_batches,
)
from common.testing.ranks import run_ranks, slow

ON_GPUS = os.environ.get("TEST_BACKEND") == "nccl"
# A GPU's kernels depend on the shapes that a mode gives them, and Muon's are in bfloat16.
DEVICE = "cuda" if ON_GPUS else "cpu"
TOLERANCE = 1e-4 if ON_GPUS else 1e-5
# optimizer, what is frozen, and what the model has beside the plain one's parts
TRAINED = {name: (name, None, {}) for name in OPTIMIZERS} | {
    "lamb": ("lamb", None, {"init_values": 0.5, "reg_tokens": 2, "no_embed_class": True}),
    # matrices that are stacked, square, wide and tall
    "muon": ("muon", None, MODERN | {"mlp_ratio": 4.0}),
    "sgd": ("sgd", None, {"position": "sincos2d", "pool": "avg"}),
    # 9 classes: `zero` over 4 ranks leaves nothing of the head to the last one
    "lamb, head": ("lamb", "body", {"dropout": 0.1, "drop_path": 0.1, "num_classes": 9}),
}
# The optimizers that have collectives of their own, and AdamW.
AWAITED = ("adamw", "lamb", "muon")
# The length of a tensor's update, given the optimizer.
FIXED_LENGTHS: dict[str, Callable[[Any, Tensor], float]] = {
    "lamb": lambda _, p: p.norm().item(),
    "muon": lambda optimizer, p: p.numel() ** 0.5 if p in optimizer.matrices else 0.0,
}
# losses, last gradient norm, noise scales; gradients; weights
Curve = tuple[list[float], dict[str, Tensor], dict[str, Tensor]]


@functools.cache
def plain_training(name: str, dp_size: int) -> Curve:
    """Train in one process with nothing of this project but model and optimizer.

    The noise scale is that of micro-batches shared out over ``dp_size`` ranks.
    """
    if ON_GPUS:
        # in a process of its own: this one forks the ranks
        return run_ranks(1, _train_plainly, name, dp_size)[0]
    return _train_plainly(name, dp_size)


def _train_plainly(name: str, dp_size: int) -> Curve:
    optimizer_name, frozen, arguments = TRAINED[name]
    model = build_tiny_model(**arguments).to(DEVICE)
    losses = []
    squares = []
    noise = signal = big = 0.0  # by tensor
    if frozen:
        model.eval().requires_grad_(False).head.requires_grad_(True)
    optimizer = build_optimizer(model, optimizer_name, **OPTIMIZERS[optimizer_name])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    shards = [_move(micro_batches(STEPS, rank, dp_size), DEVICE) for rank in range(dp_size)]
    for number, (images, labels) in enumerate(_move(micro_batches(), DEVICE), start=1):
        for batches in shards:
            own_images, own_labels = batches[number - 1]
            own = torch.autograd.grad(blended_loss(model(own_images), **own_labels), trained)
            squares.append(torch.stack([grad.double().square().sum() for grad in own]))
        loss = blended_loss(model(images), **labels)
        losses.append(loss.item())
        (loss / ACCUMULATION).backward()
        if number % ACCUMULATION == 0:
            of_step = torch.stack([p.grad.double().square().sum() for p in trained])
            norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            assert norm > MAX_NORM  # clipping was needed
            small = sum(squares) / len(squares)
            squares.clear()
            b_big, b_small = ACCUMULATION * MICRO_BATCH, MICRO_BATCH / dp_size
            noise = 0.99 * noise + (small - of_step) / (1 / b_small - 1 / b_big)
            signal = 0.99 * signal + (b_big * of_step - b_small * small) / (b_big - b_small)
            big = 0.99 * big + of_step
            optimizer.step()
            if number < STEPS * ACCUMULATION:
                optimizer.zero_grad()
    losses += [norm.item(), (noise.sum() / signal.sum()).item()]
    if optimizer_name in FIXED_LENGTHS:
        lengths = [FIXED_LENGTHS[optimizer_name](optimizer, p) for p in trained]
        weights = torch.tensor(lengths, device=DEVICE).double() / big.sqrt()
        losses.append(((weights @ noise) / (weights @ signal)).item())
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return losses, _move(gradients, "cpu"), _move(weights, "cpu")


def _move(tensors: Any, device: str) -> Any:
    """Return the tensors in dicts, or in the tuples that an iterator yields, on ``device``."""
    tensors = tensors if isinstance(tensors, dict) else list(tensors)
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), tensors)


def sharded_training(
    config: dict[str, Any], names: Iterable[str] = TRAINED
) -> dict[str, tuple[Curve, dict[str, tuple]]]:
    """Return a rank's curve and its shards for each optimizer, by the ``names`` of `TRAINED`.

    Only the first rank of each model has tensors in its curve.
    """
    answers = {}
    # What is taken for a skipped update's momentum must not be 0 by chance.
    torch.empty_like = functools.partial(torch.full_like, fill_value=1e9)
    with launched_clipping(**config, LOG={"noise_scale": True}, TF32=False):
        for name in names:
            optimizer_name, frozen, arguments = TRAINED[name]
            model, optimizer, engine = build_engine(optimizer_name, frozen=frozen, **arguments)
            parameters = named_shards(model)
            # Of the head alone, `zero` may leave nothing to the last rank: it cannot tell others.
            losses = fit(engine, bad_rank=0 if frozen else -1)
            losses.append(engine.optimizer.grad_norm.item())
            losses.append(engine.noise_scale.value().item())
            if optimizer_name in FIXED_LENGTHS:
                losses.append(engine.noise_scale.optimizer_value().item())
            gradients = {
                name: gather_full(p, p.grad) for name, p in parameters.items() if p.requires_grad
            }
            assert len(optimizer.state) == len(gradients)
            weights = {name: gather_full(p) for name, p in parameters.items()}
            shards = {name: (_coordinates(p), p.detach()) for name, p in parameters.items()}
            answers[name] = (losses, gradients, weights), shards
    # A process that has used CUDA cannot fork the next ranks: the caller gets tensors of the CPU.
    return _move(answers, "cpu")


@dataclass
class Collectives:
    """What a rank has sent: the collectives, and how many asynchronous ones nothing awaited."""

    entries: list[Entry]
    asynchronous: int
    pending: int


def late_training(config: dict[str, Any]) -> tuple[dict, Collectives]:
    """Return `sharded_training` where the results of asynchronous collectives are late."""
    with late_collectives() as ledger:
        answers = sharded_training(config, AWAITED)
    return answers, Collectives(ledger.entries, ledger.asynchronous, ledger.pending)


def _coordinates(parameter: Tensor) -> tuple[int, ...]:
    """Return the position of a shard in its parameter, which ranks with copies of it share."""
    sharding = getattr(parameter, "sharding", Sharding())
    groups = [group for _, group in sharding.cuts]
    if sharding.part is not None:
        groups.append(ParallelMode.DATA)
    return tuple(gpc.get_local_rank(group) for group in groups)


def error(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> float:
    """Return max|a - b| / max|b| of the worst tensor.

    The keys' bias is left out: softmax ignores it, so that its gradient is rounding noise, which
    AdamW scales up.
    """
    errors = []
    for name, full in plain.items():
        difference = (ours[name] - full).abs()
        if name.endswith("qkv.bias"):
            difference[len(full) // 3 : 2 * len(full) // 3] = 0
        errors.append((difference.max() / full.abs().max()).item())
    return max(errors)


def disagreements(shards_by_rank: list[dict[str, tuple]]) -> list[str]:
    """Return the parameters of which two ranks have the same shard with different bits."""
    seen: dict[tuple, Tensor] = {}
    names = set()
    for shards in shards_by_rank:
        for name, (coordinates, shard) in shards.items():
            if not torch.equal(seen.setdefault((name, coordinates), shard), shard):
                names.add(name)
    return sorted(names)


# By default, the smallest number of ranks that shows a mode: 2.5D's depth and 3D need eight.
SLOW = ("1d-4", "2.5d-4", "zero 1 x 1d-2", "dp2 x 2d-4", "dp2 x 2.5d-8", "dp2 x 3d-8")


@pytest.mark.parametrize("case", [slow(name) if name in SLOW else name for name in CASES])
def test_equals_one_process(case):
    """Losses, gradients and weights are those of the plain loop; copies agree bit for bit."""
    ranks, config = CASES[case]
    if ON_GPUS and ranks > torch.cuda.device_count():
        pytest.skip(f"{ranks} GPUs are needed, {torch.cuda.device_count()} are here")
    # The models' other parts know no data parallelism, and 16 processes are slow.
    names = AWAITED if ranks == 16 else TRAINED
    check_equality(case, run_ranks(ranks, sharded_training, config, names))


def check_equality(case: str, by_rank: list[dict[str, tuple[Curve, dict[str, tuple]]]]) -> None:
    """Compare the answers of `sharded_training` on all ranks with `plain_training`."""
    ranks, config = CASES[case]
    dp_size = ranks // config.get("parallel", {"tensor": {"size": 1}})["tensor"]["size"]
    for name in by_rank[0]:
        _, _, arguments = TRAINED[name]
        plain_losses, plain_gradients, plain_weights = plain_training(name, dp_size)
        losses, gradients, weights = by_rank[0][name][0]
        assert disagreements([answers[name][1] for answers in by_rank]) == []
        assert all(answers[name][0][0] == losses for answers in by_rank)
        initial = build_tiny_model(**arguments).state_dict()
        moved = {key for key in weights if not torch.equal(weights[key], initial[key])}
        assert moved == gradients.keys(), name
        assert losses == pytest.approx(plain_losses, rel=TOLERANCE)
        assert error(gradients, plain_gradients) < TOLERANCE, name
        assert error(weights, plain_weights) < TOLERANCE, name


@pytest.mark.slow
@pytest.mark.skipif(ON_GPUS, reason="NCCL itself is late there")
@pytest.mark.parametrize("case", [name for name, (ranks, _) in CASES.items() if ranks < 16])
def test_results_may_be_late_and_no_order_stalls(case):
    """On GPUs a forgotten wait would be a silent wrong number, two orders an endless wait."""
    ranks, config = CASES[case]
    answers, collectives = zip(*run_ranks(ranks, late_training, config), strict=True)
    check_equality(case, list(answers))
    assert stall([one.entries for one in collectives]) is None
    for one in collectives:
        assert one.pending == 0
        # SUMMA sends while it multiplies; the others' asynchronous collectives are PyTorch's own.
        is_summa = case.removeprefix("dp2 x ").startswith(("2d", "2.5d", "3d"))
        assert (one.asynchronous > 0) == is_summa
