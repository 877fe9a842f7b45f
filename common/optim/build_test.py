import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from timm.optim import param_groups_layer_decay
from timm.optim.lamb import Lamb as TimmLamb
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from common.config.model_arguments import timm_arguments
from common.model.vit import build_model
from common.optim.build import build_optimizer
from common.optim.lamb import Lamb
from common.optim.lr_schedule import build_lr_scheduler

TINY = {"image_size": 8, "patch_size": 4, "width": 16, "depth": 1, "heads": 2, "num_classes": 3}


def train(model: nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def build_copies() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model, copy = build_model(**TINY), build_model(**TINY)
    copy.load_state_dict(model.state_dict())
    return model, copy


@pytest.mark.parametrize(
    ("name", "options", "reference"),
    [
        ("adamw", {}, lambda p: AdamW(p, lr=1e-2, weight_decay=0.3)),
        ("adamw", {"betas": (0.8, 0.9)}, lambda p: AdamW(p, lr=1e-2, weight_decay=0.3, betas=(0.8, 0.9))),
        ("sgd", {}, lambda p: SGD(p, lr=1e-2, weight_decay=0.3, momentum=0.9)),
        ("sgd", {"momentum": 0}, lambda p: SGD(p, lr=1e-2, weight_decay=0.3)),
        ("lamb", {"variant": "apex"}, lambda p: Lamb(p, lr=1e-2, weight_decay=0.3, variant="apex")),
    ],
)
def test_trains_as_the_optimizer_it_names(name: str, options: dict, reference: object) -> None:
    model, copy = build_copies()
    mine = train(model, build_optimizer(model, name, learning_rate=1e-2, weight_decay=0.3, **options))
    expected = train(copy, reference(copy.parameters()))
    for a, b in zip(mine, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_decays_all_unless_told() -> None:
    model = build_model(**TINY)
    (group,) = build_optimizer(model, weight_decay=0.1).param_groups
    assert len(group["params"]) == len(list(model.parameters()))
    assert group["weight_decay"] == 0.1

    wrapped = nn.ModuleDict({"module": model})  # as wrappers rename parameters
    decayed, plain = build_optimizer(wrapped, weight_decay=0.1, decay_all=False).param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    assert decayed["weight_decay"] == 0.1
    assert plain["weight_decay"] == 0
    layers = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    expected = {"patch_embed.proj.weight", "head.weight", *(f"blocks.0.{layer}.weight" for layer in layers)}
    assert {names[id(p)] for p in decayed["params"]} == expected
    assert len(decayed["params"]) + len(plain["params"]) == len(names)


def test_leaves_out_frozen_parameters() -> None:
    model = build_model(**TINY, position="sincos2d")
    for decay_all in (True, False):
        groups = build_optimizer(model, decay_all=decay_all).param_groups
        assert all(p is not model.pos_embed for group in groups for p in group["params"])


def timm_scales(**arguments: object) -> dict[str, tuple[float, float]]:
    """Return by parameter the learning rate and the weight decay at a rate of 1, layer decay 0.65 and decay 0.1."""
    model = VisionTransformer(**timm_arguments(**arguments))
    names = {id(param): name for name, param in model.named_parameters()}
    groups = param_groups_layer_decay(model, 0.1, model.no_weight_decay(), layer_decay=0.65)
    return {names[id(p)]: (group["lr_scale"], group["weight_decay"]) for group in groups for p in group["params"]}


@pytest.mark.parametrize(
    "parts",
    [
        {"depth": 12},
        {"pool": "avg", "reg_tokens": 2, "init_values": 0.1, "depth": 3},
        {"reg_tokens": 2, "no_embed_class": True, "init_values": 0.1},
    ],
)
def test_layer_decay_has_timms_groups(parts: dict) -> None:
    model = build_model(**TINY | parts)
    names = {id(param): name for name, param in model.named_parameters()}
    groups = build_optimizer(model, learning_rate=1, weight_decay=0.1, decay_all=False, layer_decay=0.65).param_groups
    scales = {names[id(p)]: (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    assert scales == {name: pytest.approx(scale) for name, scale in timm_scales(**TINY | parts).items()}
    (group,) = build_optimizer(model, learning_rate=1, layer_decay=1.0).param_groups
    assert len(group["params"]) == len(names)


@pytest.mark.parametrize(
    ("name", "options", "reference"),
    [
        ("adamw", {}, AdamW),
        ("lamb", {"variant": "timm"}, TimmLamb),
        ("sgd", {}, lambda groups: SGD(groups, momentum=0.9)),
    ],
)
def test_layer_decay_trains_as_a_learning_rate_for_each_parameter(name: str, options: dict, reference: object) -> None:
    model, copy = build_copies()
    mine = build_optimizer(model, name, 1e-2, weight_decay=0.1, decay_all=False, layer_decay=0.65, **options)
    schedule = build_lr_scheduler(mine, "linear", 10, 2)
    scales = timm_scales(**TINY)
    in_order = [scales[name] for name, _ in copy.named_parameters()]
    theirs = reference(
        [{"params": [p], "weight_decay": d} for p, (_, d) in zip(copy.parameters(), in_order, strict=True)]
    )
    generator = torch.Generator().manual_seed(1)
    for factor in (1 / 3, 2 / 3, 1):
        for param, other in zip(model.parameters(), copy.parameters(), strict=True):
            param.grad = torch.randn(param.shape, generator=generator)
            other.grad = param.grad.clone()
        for group, (scale, _) in zip(theirs.param_groups, in_order, strict=True):
            group["lr"] = factor * 1e-2 * scale
        mine.step()
        theirs.step()
        schedule.step()
    for param, other in zip(model.parameters(), copy.parameters(), strict=True):
        torch.testing.assert_close(param, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "adam"}, "name='adam' is none of adamw, lamb, sgd; did you mean 'adamw'"),
        ({"name": "sgd", "betas": (0.9, 0.99)}, "unexpected keyword argument 'betas'"),
        ({"name": "lamb", "varient": "apex"}, "varient is not an option of LAMB"),
        ({"name": "lamb", "variant": "nvidia"}, "variant='nvidia' is none of"),
        ({"name": "adamw", "betas": (1.5, 0.9)}, "Invalid beta"),
        ({"name": "sgd", "nesterov": True, "momentum": 0}, "Nesterov"),
    ],
)
def test_bad_arguments(arguments: dict, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        build_optimizer(build_model(**TINY), **arguments)
