"""The ViT against timm's, its dropout against the formula."""

import math

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from common.model.build import build_model, timm_arguments
from common.model.vit import MASK_LEVELS, Dropout, DropPath, attend

VIT_LITE = {
    "image_size": 32,
    "patch_size": 4,
    "width": 256,
    "depth": 7,
    "heads": 4,
    "mlp_ratio": 2,
    "num_classes": 10,
}
COUNT = 1 << 22  # values that dropout draws
TINY = {
    "image_size": 16,
    "patch_size": 4,
    "width": 24,
    "depth": 3,
    "heads": 3,
    "num_classes": 5,
}
MODERN = {"norm": "rmsnorm", "mlp": "swiglu"}


def build_pair(**arguments: object) -> tuple[nn.Module, nn.Module]:
    """Return our model and timm's with the same weights, loaded strictly; biases are random, to be
    seen.
    """
    torch.manual_seed(0)
    ours = build_model(**arguments)
    timms = timm_arguments(**arguments)
    with torch.device("meta"):  # its own initialisation would only cost time
        theirs = TimmVisionTransformer(**timms, dynamic_img_size=True)
    with torch.no_grad():
        for name, p in ours.named_parameters():
            if p.ndim == 1 or name.endswith("_token"):
                noise = torch.randn_like(p)
                p.add_(0.1 * noise)
    theirs.load_state_dict(ours.state_dict(), assign=True)
    for name, layer in list(theirs.named_modules()):
        if isinstance(layer, nn.Dropout):
            theirs.set_submodule(name, Dropout(layer.p))
    return ours, theirs


def logits_and_gradients(model: nn.Module, images: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    logits = model(images)
    labels = torch.arange(len(images))
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    tensors = {"logits": logits.detach()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            tensors[name] = parameter.grad
    return tensors


@pytest.mark.parametrize(
    "options",
    [
        VIT_LITE,
        {"pool": "cls", "position": "learned"},
        {"pool": "cls", "position": "sincos2d"},
        {"pool": "avg", "position": "learned"},
        {"pool": "avg", "position": "sincos2d"},
        {"init_values": 0.3, "reg_tokens": 2, "no_embed_class": True},
        {"init_values": 0.3, "reg_tokens": 2, "pool": "avg"},
        {
            "init_values": 1e-6,
            "no_embed_class": True,
            "position": "sincos2d",
            "image_size": 28,
            "patch_size": 14,
        },
        {"drop_path": 0.5, "reg_tokens": 3},
        {"dropout": 0.1, "drop_path": 0.5},
        {"norm": "rmsnorm"},
        {"mlp": "swiglu", "mlp_ratio": 16 / 3},
        {
            "norm": "rmsnorm",
            "mlp": "swiglu",
            "pool": "avg",
            "dropout": 0.1,
            "init_values": 0.3,
        },
        {"images": 8},
        {"images": 24, "reg_tokens": 2, "no_embed_class": True},
        {"images": 12, "pool": "avg", "position": "sincos2d"},
    ],
)
def test_options_equal_timm(options):
    """In float64, gradients too. From one seed both draw the same masks, with our Dropout in
    timm's places. timm resamples positions in float32.
    """
    options = TINY | options
    # Positions are resampled to the grid of the images.
    side = options.pop("images", options["image_size"])
    ours, theirs = build_pair(**options)
    images = torch.randn(2, 3, side, side, dtype=torch.float64)
    mine = logits_and_gradients(ours.double(), images)
    reference = logits_and_gradients(theirs.double(), images)
    if options.get("position") == "sincos2d":
        del reference["pos_embed"]  # ours is fixed
    assert mine.keys() == reference.keys()
    bound = 1e-12 if side == 16 else 1e-6
    for name, value in mine.items():
        difference = value - reference[name]
        assert difference.abs().max() <= bound, name


@pytest.mark.parametrize("parts", [{}, MODERN])
def test_bfloat16_autocast_makes_the_residual_stream_bfloat16(parts):
    model = build_model(**TINY, reg_tokens=1, init_values=0.3, drop_path=0.2, **parts)
    images = torch.randn(2, 3, 16, 16)
    of_stream = set()

    def collect_dtypes(_: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        (x,) = inputs
        of_stream.add(x.dtype)
        of_stream.add(output.dtype)

    for block in model.blocks:
        block.register_forward_hook(collect_dtypes)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(images)
        logits.sum().backward()
    of_gradients = {parameter.grad.dtype for parameter in model.parameters()}
    assert of_stream == {torch.bfloat16}
    assert of_gradients == {torch.float32}


def test_attention_with_a_gradient_is_near_the_fused_in_bfloat16():
    q, k, v = torch.randn(3, 2, 3, 17, 8).bfloat16()
    fused = F.scaled_dot_product_attention(q, k, v)
    q.requires_grad_()
    ours = attend(q, k, v)
    torch.testing.assert_close(ours, fused, rtol=0, atol=0.02)


@pytest.mark.parametrize("is_compiling", [False, True])
@pytest.mark.parametrize("p", [1e-5, 0.1, 1 / 3, 0.97, 0.99998])
def test_dropouts_rate_and_scale_are_right_and_its_masks_are_independent(
    p, is_compiling, monkeypatch
):
    """Rates within five standard errors, for each of the values that share a random integer or a
    byte, and between calls.
    """
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: is_compiling)
    torch.manual_seed(0)
    dropout = Dropout(p)
    x = torch.randn(COUNT, requires_grad=True)
    y = dropout(x)
    y.sum().backward()
    kept_levels = round((1 - p) * MASK_LEVELS)
    kept = kept_levels / MASK_LEVELS
    # A keep probability may be as small as one level: rounding then changes it by up to 40 %.
    assert kept == pytest.approx(1 - p, rel=0.4)
    factors = torch.where(y == 0, 0, torch.tensor(1 / kept))
    assert torch.equal(y, x * factors)
    assert torch.equal(x.grad, factors)
    # masks less their mean
    first = (y != 0).double() - kept
    second = (dropout(x) != 0).double() - kept
    variance = kept * (1 - kept)
    rate_error = math.sqrt(8 * variance / COUNT)  # of one value in eight
    correlation_error = variance / math.sqrt(COUNT)
    rates = first.view(-1, 8).mean(0)
    assert rates.abs().max() < 5 * rate_error
    between_calls = (first * second).mean()
    assert between_calls.abs() < 5 * correlation_error
    for distance in (1, 2, 3, 4, 8, 65, 256):
        products = first[:-distance] * first[distance:]
        correlation = products.mean()
        assert correlation.abs() < 5 * correlation_error


def test_stochastic_depth_has_its_rate_in_compiled_code(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    branch = torch.randn(COUNT // 16, 1, 1)
    compiled = DropPath(0.3)(branch)
    is_dropped = compiled == 0
    expected = torch.where(is_dropped, 0, branch / 0.7)
    assert torch.allclose(compiled, expected)
    rate = is_dropped.double().mean().item()
    error = math.sqrt(0.3 * 0.7 / len(branch))
    assert rate == pytest.approx(0.3, abs=5 * error)


def exact_gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / 2**0.5)) / 2


@pytest.mark.parametrize(
    ("stem", "strided", "residual"),
    [
        ("conv", (0, 2, 4), {}),
        ("residual", (0, 2, 5), {2: 4, 5: 7}),
    ],
)
def test_convolutional_stems_and_sequence_pooling_equal_their_formulas(stem, strided, residual):
    """The blocks are those that equal timm's; pooling is the line of
    SHI-Labs/Compact-Transformers. In float64.
    """
    torch.manual_seed(0)
    model = build_model(**TINY, stem=stem, pool="seq").double()
    embedding = model.patch_embed
    convolutions = [embedding[i] for i in strided]
    branches = {embedding[i]: embedding[branch] for i, branch in residual.items()}
    inner = [branch.conv1 for branch in branches.values()]
    for branch in branches.values():  # it starts as the identity
        assert not branch.conv2.weight.any()
        assert not branch.conv2.bias.any()
    for layer in convolutions + inner:  # He's initialization
        expected = math.sqrt(2 / (9 * layer.in_channels))
        assert layer.weight.std().item() == pytest.approx(expected, rel=0.3)
        assert not layer.bias.any()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    images = torch.randn(3, 3, 16, 16, dtype=torch.float64)
    x = images
    for layer, stride in zip(convolutions, (1, 2, 2), strict=True):
        if stride == 2 and not branches:
            x = exact_gelu(x)
        x = F.conv2d(x, layer.weight, layer.bias, stride, padding=1)
        if branches:
            x = exact_gelu(x)
        if layer in branches:
            branch = branches[layer]
            inner = F.conv2d(x, branch.conv1.weight, branch.conv1.bias, padding=1)
            x = x + F.conv2d(exact_gelu(inner), branch.conv2.weight, branch.conv2.bias, padding=1)
    x = x.flatten(2).transpose(1, 2)
    x = x + model.pos_embed
    for block in model.blocks:
        x = block(x)
    x = F.layer_norm(x, (24,), model.norm.weight, model.norm.bias, eps=1e-6)
    shares = F.softmax(model.attention_pool(x), dim=1)
    x = torch.matmul(shares.transpose(-1, -2), x)
    expected = model.head(x.squeeze(-2))
    found = model(images)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("parts", [{}, MODERN])
def test_initialization_is_distributed_as_timms(parts):
    """Means and standard deviations agree within five standard errors, parameter by parameter."""
    torch.manual_seed(0)
    arguments = timm_arguments(**VIT_LITE, **parts)
    ours = build_model(**VIT_LITE, **parts).state_dict()
    theirs = TimmVisionTransformer(**arguments).state_dict()
    assert ours.keys() == theirs.keys()
    for name, reference in theirs.items():
        mine = ours[name]
        std = reference.std().item()
        mean = reference.mean().item()
        error = 5 / math.sqrt(reference.numel())
        assert mine.std().item() == pytest.approx(std, rel=error), name
        assert mine.mean().item() == pytest.approx(mean, abs=2 * std * error), name


def test_sincos2d_is_the_papers_formula():
    positions = build_model(**TINY, position="sincos2d").pos_embed
    assert not positions.requires_grad
    assert not positions[0, 0].any()  # the class token
    table = positions[0, 1:].unflatten(0, (4, 4))  # [4 rows, 4 columns, 24 channels]
    for row, column, i in [(0, 0, 0), (1, 3, 3), (2, 1, 5), (3, 3, 1)]:
        period = 10_000 ** (i / 5)
        x = column / period
        y = row / period
        expected = [
            math.sin(x),
            math.cos(x),
            math.sin(y),
            math.cos(y),
        ]
        found = table[row, column, i::6].tolist()
        assert found == pytest.approx(expected, abs=1e-5)
