"""Colossal-AI's tensor-parallel layers, as its own tests ask: each against one process.

Every rank computes a row of a mode with the shards of weights, inputs and gradients, and compares
with PyTorch's layer on the full ones: output, gradient of the input and of each weight, and the
state_dict. The reference is computed on every rank, from the same seed.
"""

import functools
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from colossalai.legacy import nn as cnn
from torch import Tensor, nn

from common.engine.tensor_parallel.layout import (
    COL_2D,
    INPUT_3D,
    OUTPUT_3D,
    ROW_2D,
    ROW_2P5D,
    TENSOR,
    WEIGHT_3D,
    XZ_2P5D,
)
from common.engine.upstream import ParallelMode, all_gather, gpc, tensor_parallel_env
from common.testing.ranks import launched, run_ranks, slow

BATCH = 16
TOKENS = 4
WIDTH = 16
CLASSES = 8
# dimensions, and the groups over which they are cut
Cuts = tuple[tuple[int, ParallelMode], ...]


@dataclass
class Mode:
    """A parallel mode, and how activations [B, N, D] are cut in it."""

    ranks: int
    suffix: str  # of the layers' names
    tensor: dict[str, Any]  # the config's parallel.tensor, without its size
    samples: Cuts = ()
    channels: Cuts = ()

    def launch_config(self) -> dict[str, Any]:
        return {
            "parallel": {
                "pipeline": {"size": 1},
                "tensor": {"size": self.ranks, **self.tensor},
            }
        }


MODES = {
    "1d-2": Mode(2, "1D", {"mode": "1d"}),
    "2d-4": Mode(
        4,
        "2D",
        {"mode": "2d"},
        samples=((0, COL_2D),),
        channels=((2, ROW_2D),),
    ),
    "2.5d-4": Mode(
        4,
        "2p5D",
        {"mode": "2.5d", "depth": 1},
        samples=((0, XZ_2P5D),),
        channels=((2, ROW_2P5D),),
    ),
    "2.5d-8": Mode(
        8,
        "2p5D",
        {"mode": "2.5d", "depth": 2},
        samples=((0, XZ_2P5D),),
        channels=((2, ROW_2P5D),),
    ),
    "3d-8": Mode(
        8,
        "3D",
        {"mode": "3d"},
        samples=((0, WEIGHT_3D), (0, INPUT_3D)),
        channels=((2, OUTPUT_3D),),
    ),
}
# A linear layer of 3d leaves its output split over the other groups.
AFTER_LINEAR_3D: Cuts = ((0, WEIGHT_3D), (0, OUTPUT_3D), (2, INPUT_3D))


class Patches(nn.Module):
    """What upstream's patch embedding computes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 3, 2, 2))
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, WIDTH))

    def forward(self, images: Tensor) -> Tensor:
        x = nn.functional.conv2d(images, self.weight, self.bias, stride=2)  # [B, D, Y, X]
        x = x.flatten(2).mT  # [B, N, D]
        cls_tokens = self.cls_token.expand(len(x), -1, -1)
        return torch.cat([cls_tokens, x], 1) + self.pos_embed


class WithLabels(nn.Module):
    """A loss as a layer: it maps logits to their loss for labels that are the same on all ranks."""

    def __init__(self, criterion: nn.Module):
        super().__init__()
        self.criterion = criterion

    def forward(self, logits: Tensor) -> Tensor:
        return self.criterion(logits, torch.arange(BATCH) % CLASSES)


def with_replaced(layer: nn.Module) -> nn.Module:
    """Give a layer new parameters, as upstream's tests do."""
    for name, parameter in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(parameter.detach().clone()))
    return layer


@dataclass
class Row:
    """A layer, PyTorch's in its place, a full input, and how input and output are cut."""

    build: Callable[[], nn.Module]
    reference: Callable[[], nn.Module]
    x: Callable[[], Tensor]
    x_cuts: Cuts
    out_cuts: Cuts


def activations(*shape: int) -> Tensor:
    return torch.randn(*(shape or (BATCH, TOKENS, WIDTH)))


def tokens() -> Tensor:
    return torch.randint(CLASSES, (BATCH, TOKENS))


def images() -> Tensor:
    return torch.randn(BATCH, 3, 4, 4)


def tied(embedding: nn.Module, head: Callable[..., nn.Module]) -> nn.Module:
    return nn.Sequential(embedding, head(embedding.weight))


def tied_linear(bias: bool) -> nn.Module:
    embedding = nn.Embedding(CLASSES, WIDTH)
    head = nn.Linear(WIDTH, CLASSES, bias=bias)
    head.weight = embedding.weight
    return nn.Sequential(embedding, head)


def rows_of(case: str) -> dict[str, Row]:
    """Return the rows of a mode by name."""
    mode = MODES[case]
    suffix = mode.suffix
    samples = mode.samples
    channels = mode.channels
    is_1d = suffix == "1D"
    is_3d = suffix == "3D"
    split = samples + channels
    after = AFTER_LINEAR_3D if is_3d else split
    # Where a vocabulary-parallel classifier leaves the classes.
    classes = ((2, TENSOR),) if is_1d else after

    def new(name: str, *args: Any, **options: Any) -> Callable[[], nn.Module]:
        return lambda: getattr(cnn, name + suffix)(*args, **options)

    def linear(width: int = WIDTH, **options: Any) -> Callable[[], nn.Module]:
        return lambda: nn.Linear(WIDTH, width, **options)

    def embedding() -> nn.Module:
        return nn.Embedding(CLASSES, WIDTH)

    def norm() -> nn.Module:
        layer = nn.LayerNorm(WIDTH)
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
        return layer

    def shifted() -> Tensor:
        # E[x^2] - E[x]^2 would lose three digits.
        return activations() + 30

    classify = linear(CLASSES)
    rows = {
        "LayerNorm": Row(
            new("LayerNorm", WIDTH, eps=1e-5),
            norm,
            activations,
            split,
            split,
        ),
        "LayerNorm of a large mean": Row(
            new("LayerNorm", WIDTH, eps=1e-5),
            norm,
            shifted,
            split,
            split,
        ),
        "PatchEmbedding": Row(
            new("PatchEmbedding", 4, 2, 3, WIDTH),
            Patches,
            images,
            (),
            split,
        ),
        "Embedding": Row(
            new("Embedding", CLASSES, WIDTH),
            embedding,
            tokens,
            (),
            split,
        ),
        "Embedding with padding": Row(
            new("Embedding", CLASSES, WIDTH, padding_idx=1),
            lambda: nn.Embedding(CLASSES, WIDTH, padding_idx=1),
            tokens,
            (),
            split,
        ),
        "VocabParallelEmbedding": Row(
            new("VocabParallelEmbedding", CLASSES, WIDTH),
            embedding,
            tokens,
            (),
            split,
        ),
        "Classifier": Row(
            new("Classifier", WIDTH, CLASSES),
            classify,
            activations,
            split,
            samples,
        ),
        "Classifier without bias": Row(
            new("Classifier", WIDTH, CLASSES, bias=False),
            linear(CLASSES, bias=False),
            activations,
            split,
            samples,
        ),
        "VocabParallelClassifier": Row(
            new("VocabParallelClassifier", WIDTH, CLASSES),
            classify,
            activations,
            split,
            classes,
        ),
        "Classifier with the embedding's weight": Row(
            lambda: tied(
                new("Embedding", CLASSES, WIDTH)(),
                lambda weight: new("Classifier", WIDTH, CLASSES, weight=weight)(),
            ),
            lambda: tied_linear(bias=True),
            tokens,
            (),
            samples,
        ),
        "VocabParallelClassifier with the embedding's weight": Row(
            lambda: tied(
                new("VocabParallelEmbedding", CLASSES, WIDTH)(),
                lambda weight: new(
                    "VocabParallelClassifier", WIDTH, CLASSES, weight=weight, bias=False
                )(),
            ),
            lambda: tied_linear(bias=False),
            tokens,
            (),
            classes,
        ),
    }
    local_classes = tuple((1, group) for _, group in channels) or ((1, TENSOR),)
    rows["VocabParallelCrossEntropyLoss"] = Row(
        lambda: WithLabels(new("VocabParallelCrossEntropyLoss")()),
        lambda: WithLabels(nn.CrossEntropyLoss()),
        lambda: activations(BATCH, CLASSES),
        samples + local_classes,
        (),
    )
    if is_1d:
        rest = {
            "Linear_Col": ("Linear1D_Col", {}, (), ((2, TENSOR),)),
            "Linear_Col, gathered": ("Linear1D_Col", {"gather_output": True}, (), ()),
            "Linear_Row": ("Linear1D_Row", {}, ((2, TENSOR),), ()),
            "Linear_Row of full input": ("Linear1D_Row", {"parallel_input": False}, (), ()),
            "Linear": ("Linear", {}, (), ((2, TENSOR),)),
            "VocabParallelClassifier, gathered": (
                "VocabParallelClassifier1D",
                {"gather_output": True},
                (),
                (),
            ),
        }
        for name, (class_name, options, x_cuts, out_cuts) in rest.items():
            layer_class = getattr(cnn, class_name)
            build = functools.partial(layer_class, WIDTH, 2 * WIDTH, **options)
            rows[name] = Row(build, linear(2 * WIDTH), activations, x_cuts, out_cuts)
        rows["Linear_Col of 2 dimensions"] = Row(
            functools.partial(cnn.Linear1D_Col, WIDTH, WIDTH),
            linear(),
            lambda: activations(BATCH, WIDTH),
            (),
            ((1, TENSOR),),
        )
        return rows
    rows["Linear"] = Row(
        new("Linear", WIDTH, 32),
        linear(32),
        activations,
        split,
        after,
    )
    rows["Linear without bias"] = Row(
        new("Linear", WIDTH, 32, bias=False),
        linear(32, bias=False),
        activations,
        split,
        after,
    )
    rows["Linear twice"] = Row(
        lambda: nn.Sequential(cnn.Linear(WIDTH, 32), cnn.Linear(32, WIDTH)),
        lambda: nn.Sequential(nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)),
        activations,
        split,
        split,
    )
    rows["Linear with other weights"] = Row(
        lambda: with_replaced(new("Linear", WIDTH, 32)()),
        linear(32),
        activations,
        split,
        after,
    )
    rows["CrossEntropyLoss"] = Row(
        lambda: WithLabels(new("CrossEntropyLoss", label_smoothing=0.1)()),
        lambda: WithLabels(nn.CrossEntropyLoss(label_smoothing=0.1)),
        lambda: activations(BATCH, CLASSES),
        samples,
        (),
    )
    # In 3d the groups are swapped when the tokens are split.
    rows["Embedding, Linear"] = Row(
        lambda: nn.Sequential(cnn.Embedding(CLASSES, WIDTH), cnn.Linear(WIDTH, WIDTH)),
        lambda: nn.Sequential(nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH)),
        tokens,
        (),
        after,
    )
    return rows


def cut(tensor: Tensor, cuts: Cuts) -> Tensor:
    for dim, group in cuts:
        shards = tensor.chunk(gpc.get_world_size(group), dim)
        tensor = shards[gpc.get_local_rank(group)]
    return tensor.clone()


def compare_row(row: Row) -> dict[str, float]:
    """Return the greatest difference of this rank from one process, by what is compared."""
    torch.manual_seed(0)
    reference = row.reference()
    x = row.x()
    layer = row.build()
    names = [name for name, _ in layer.named_parameters()]
    full = dict(zip(names, reference.parameters(), strict=True))
    # A shared weight is in a state_dict twice.
    state = dict(zip(layer_keys(layer), reference.state_dict().values(), strict=True))
    layer.load_state_dict(state)
    pairs = {}
    for key, value in layer.state_dict().items():
        pairs[f"saved {key}"] = value, state[key]
    local = cut(x, row.x_cuts)
    # Images have no gradient, as in a training.
    has_gradient = x.is_floating_point() and x.ndim < 4
    if has_gradient:
        x.requires_grad_()
        local.requires_grad_()
    out = reference(x)
    local_out = layer(local)
    pairs["output"] = local_out, cut(out, row.out_cuts)
    grad = torch.randn(out.shape)
    out.backward(grad)
    local_out.backward(cut(grad, row.out_cuts))
    if has_gradient:
        pairs["gradient of the input"] = local.grad, cut(x.grad, row.x_cuts)
    for name, parameter in layer.named_parameters():
        sharding = getattr(parameter, "sharding", None)
        expected = full[name].grad
        if sharding:
            expected = sharding.cut(expected)
        pairs[f"gradient of {name}"] = parameter.grad, expected
    return {name: difference(*pair) for name, pair in pairs.items()}


def layer_keys(layer: nn.Module) -> list[str]:
    return [name for name, _ in layer.named_parameters(remove_duplicate=False)]


def difference(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape, (one.shape, other.shape)
    # relative to 1 where values are large
    scale = other.abs().clamp(min=1)
    relative = (one - other).abs() / scale
    return relative.max().item()


def compare_mode(case: str) -> dict[str, dict[str, float]]:
    found = {}
    with launched(**MODES[case].launch_config()):
        before = dict(vars(tensor_parallel_env))
        for name, row in rows_of(case).items():
            # Layers of 1d and 3d say there what those after them are to do.
            vars(tensor_parallel_env).update(before)
            try:
                found[name] = compare_row(row)
            except Exception:
                found[name] = {traceback.format_exc(): float("inf")}
    return found


@functools.cache
def on_ranks(case: str) -> list[dict[str, dict[str, float]]] | Exception:
    try:
        return run_ranks(MODES[case].ranks, compare_mode, case)
    except (RuntimeError, TimeoutError) as error:
        # Cached: each row would wait again for ranks that hang.
        return error


ROWS = [
    (slow if case == "2.5d-8" else pytest.param)(case, name, id=f"{case} {name}")
    for case in MODES
    for name in rows_of(case)
]


@pytest.mark.parametrize(("case", "name"), ROWS)
def test_a_layer_computes_what_one_process_does(case, name):
    ranks = on_ranks(case)
    if isinstance(ranks, Exception):
        raise ranks
    for rank, found in enumerate(ranks):
        wrong = {what: error for what, error in found[name].items() if not error < 1e-5}
        assert not wrong, f"rank {rank}: {wrong}"


def look_around(case: str) -> dict[str, Any]:
    """Return masks of dropout, a weight as it is built, and whether copies of weights are equal."""
    with launched(**MODES[case].launch_config()):
        # In 1d the output of the first linear layer is split, that of the second is not.
        first = cnn.Linear(WIDTH, WIDTH)
        dropout = cnn.Dropout()
        second = cnn.Linear(WIDTH, WIDTH)
        last_dropout = cnn.Dropout()
        head = cnn.Classifier(WIDTH, CLASSES)
        spreads = []
        for parameter in nn.ModuleList([first, second, head]).parameters():
            group = parameter.sharding.replicated_over
            if group:
                copies = all_gather(parameter.detach()[None], 0, group)
                spread = (copies - copies[:1]).abs().max()
                spreads.append(spread.item())
        ones = torch.ones(64)
        return {
            "masks": [dropout(ones), dropout(ones)],
            "last mask": last_dropout(ones),
            "weight": next(first.parameters()).detach(),
            "spread": max(spreads),
        }


def half_precision(case: str) -> dict[str, Any]:
    """Return the dtypes of layers' gradients in autocast, and the error of outputs."""
    mode = MODES[case]
    with launched(**mode.launch_config()):
        torch.manual_seed(0)
        x = cut(activations(), mode.samples + mode.channels)
        layers = [
            cnn.Classifier(WIDTH, CLASSES),
            cnn.LayerNorm(WIDTH),
            cnn.Linear(WIDTH, WIDTH),
        ]
        found = {}
        for layer in layers:
            expected = layer(x)
            with torch.autocast("cpu", torch.bfloat16):
                out = layer(x.bfloat16())
            out.sum().backward()
            grads = {parameter.grad.dtype for parameter in layer.parameters()}
            error = (out - expected).abs().max() / expected.abs().max()
            found[type(layer).__name__] = grads, error.item()
        return found


@pytest.mark.parametrize("case", ["1d-2", "2d-4", "2.5d-4", slow("3d-8")])
def test_layers_compute_in_the_dtype_of_autocast(case):
    for found in run_ranks(MODES[case].ranks, half_precision, case):
        for name, (grads, error) in found.items():
            assert grads == {torch.float32}
            # bfloat16 has three digits
            assert 1e-4 < error < 0.02, name


def count_distinct(tensors: list[Tensor]) -> int:
    return len({tuple(tensor.flatten().tolist()) for tensor in tensors})


@pytest.mark.parametrize("case", ["1d-2", "2d-4", slow("2.5d-8"), slow("3d-8")])
def test_ranks_draw_masks_and_weights_of_their_own_and_share_those_of_copies(case):
    found = run_ranks(MODES[case].ranks, look_around, case)
    ranks = len(found)
    masks = []
    for rank in found:
        masks += rank["masks"]
    last_masks = [rank["last mask"] for rank in found]
    weights = [rank["weight"] for rank in found]
    assert count_distinct(masks) == 2 * ranks
    assert count_distinct(last_masks) == (1 if case == "1d-2" else ranks)
    squares = 2 if case == "2.5d-8" else 1
    assert count_distinct(weights) == ranks / squares
    assert max(rank["spread"] for rank in found) == 0
