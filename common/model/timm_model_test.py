"""Models of timm's: trained as timm's own with torch's optimizer, and what is refused."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import timm
import torch
from timm.optim import param_groups_layer_decay
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW

from common.checkpoint.saved_run import open_run
from common.checkpoint.weights import load_pretrained
from common.config.load import load_config
from common.engine.amp import Cast, MixedPrecision
from common.engine.amp_test import MODES
from common.engine.upstream import ParallelMode, gpc
from common.errors import UserError
from common.model.build import build_model, build_on_meta
from common.model.flops import flops_per_image
from common.optim.build import layers_above
from common.testing.ranks import launched, run_ranks, slow
from common.testing.tiny_task import train
from common.tools import evaluate, export, predict
from common.training import build_training

VIT = dict(image_size=32, depth=2, embed_dim=48, num_heads=2)
MODELS = {
    "convnext_atto": dict(timm="convnext_atto", image_size=32, depths=(1, 1, 2, 1)),
    "resnet18": dict(timm="resnet18", image_size=32),
    "registers and qk-norm": dict(timm="vit_tiny_patch16_224", reg_tokens=2, qk_norm=True, **VIT),
    "DINOv2": dict(
        timm="vit_small_patch14_dinov2", activation_checkpoint=True, **VIT | {"image_size": 28}
    ),
}
BEIT = dict(timm="beit_base_patch16_224", **VIT)
WITHOUT_LAYERS = ("csatv2", "caformer_b36", "pit_b_224")
CONFIG = dict(
    LEARNING_RATE=1e-3,
    WEIGHT_DECAY=0.1,
    OPTIMIZER=dict(name="adamw", layer_decay=0.7, decay_all=False),
)


def batches(size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 3, size, size, generator=generator).double(), torch.arange(8) % 5)
        for _ in range(3)
    ]


def build_double(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = build_model(**MODELS[name], num_classes=5).double()
    assert getattr(model, "grad_checkpointing", False) == (name == "DINOv2")
    with torch.no_grad():
        for parameter in model.parameters():  # LayerScale's, and heads that begin at 0
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def train_here(name: str, **config: Any) -> tuple[list[float], list[float]]:
    """Return the losses and gradient norms of three steps on this rank's share of the batches."""
    losses, norms = [], []
    with launched(**config):
        engine = build_training(CONFIG, F.cross_entropy, model=build_double(name)).engine
        rank, size = gpc.get_global_rank(), gpc.get_world_size(ParallelMode.DATA)
        engine.train()
        for images, labels in batches(MODELS[name]["image_size"]):
            engine.zero_grad()
            loss = F.cross_entropy(engine(x=images.chunk(size)[rank]), labels.chunk(size)[rank])
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            norms.append(engine.optimizer.grad_norm.item())
    return losses, norms


def train_timm(name: str, ranks: int) -> tuple[list[float], list[float]]:
    """Return what timm's model, groups of parameters and torch's AdamW make of it; batch norms see
    a rank's images.
    """
    arguments = {
        key: value for key, value in MODELS[name].items() if key != "activation_checkpoint"
    }
    size = arguments.pop("image_size")
    arguments |= {"img_size": size} if "vit" in arguments["timm"] else {}
    model = timm.create_model(arguments.pop("timm"), num_classes=5, **arguments).double()
    model.load_state_dict(build_double(name).state_dict())
    groups = param_groups_layer_decay(
        model, 0.1, getattr(model, "no_weight_decay", tuple)(), layer_decay=0.7
    )
    optimizer = AdamW([{**group, "lr": 1e-3 * group["lr_scale"]} for group in groups])
    losses, norms = [], []
    for images, labels in batches(size):
        optimizer.zero_grad()
        parts = zip(images.chunk(ranks), labels.chunk(ranks), strict=True)
        loss = sum(F.cross_entropy(model(part), wanted) for part, wanted in parts) / ranks
        loss.backward()
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


@pytest.mark.parametrize(
    ("ranks", "config", "tolerance"),
    [
        (1, {}, 1e-6),
        *(slow(2, {"zero": zero}, 1e-6) for zero in (None, {"stage": 1}, {"stage": 3})),
        *(slow(1, {"fp16": MODES[mode]}, 0.1) for mode in ("NAIVE bfloat16", "APEX O3 bfloat16")),
    ],
)
@pytest.mark.parametrize("name", MODELS)
def test_three_steps_equal_timms_model_with_torchs_optimizer(name, ranks, config, tolerance):
    """In float64; the logits are float32."""
    found, (losses, norms) = (
        run_ranks(ranks, partial(train_here, name, **config)),
        train_timm(name, ranks),
    )
    assert torch.tensor([of_rank for of_rank, _ in found]).mean(0).tolist() == pytest.approx(
        losses, rel=tolerance
    )
    assert all(of_rank == pytest.approx(norms, rel=tolerance) for _, of_rank in found)


@pytest.mark.parametrize("name", ["xcit_nano_12_p8_224", "mvitv2_tiny", "beit_base_patch16_224"])
def test_half_precision_takes_float32_and_tuples_between_layers(name):
    """Position encodings, layers with several outputs, and one that uses the weights of a layer in
    it.
    """
    model = build_on_meta(dict(timm=name, image_size=224))
    MixedPrecision(Cast.LAYERS, torch.bfloat16).apply(model)
    assert model(torch.empty(1, 3, 224, 224, device="meta")).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "name", ["resnet18", *(slow(name) for name in (*MODELS, "BEiT") if name != "resnet18")]
)
def test_tools_take_it(name, data, tmp_path, capsys):
    model = f"MODEL={(MODELS | {'BEiT': BEIT})[name]}"
    output = train(data, tmp_path / "run", model, "EMA=0.5")
    run = open_run(str(output))
    for target in export.FORMATS:
        assert export.export(run, target, tmp_path / target) < 1e-5
    theirs = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True)
    assert theirs.state_dict().keys() == run.load_weights().keys()
    export.main([str(output), "--raw", "--to", "safetensors"])
    evaluate.main([str(output), "--raw"])
    predict.main([str(output), str(next(data.rglob("*.png"))), "--raw"])
    shown = capsys.readouterr()
    assert "moving average" not in shown.out
    assert f"MODEL.timm: {run.config['MODEL']['timm']}, images of " in shown.out
    head = train(data, tmp_path / "head", model, f"INIT={output}", "FREEZE=body")
    mine, before = open_run(str(head), raw=True).load_weights(), run.load_weights()
    changed = {key.rpartition(".")[0] for key in mine if not torch.equal(mine[key], before[key])}
    assert changed == set(build_on_meta(run.config["MODEL"]).head_names)


def test_pretrained_weights_are_fitted_as_by_timm(tmp_path):
    """To other classes and another image size."""
    torch.manual_seed(0)
    theirs = timm.create_model("test_vit", img_size=64, num_classes=7)
    torch.save(theirs.state_dict(), tmp_path / "weights.pt")
    model = build_model(timm="test_vit", image_size=32, num_classes=3)
    done = load_pretrained(model, str(tmp_path / "weights.pt"))
    assert done.endswith("; a new head of 3 classes, not its 7")
    overlay = {"file": str(tmp_path / "weights.pt"), "num_classes": 7}
    expected = timm.create_model(
        "test_vit", img_size=32, num_classes=3, pretrained=True, pretrained_cfg_overlay=overlay
    )
    for name, value in expected.state_dict().items():
        assert name.startswith("head.") or torch.equal(model.state_dict()[name], value), name


def test_synchronised_batch_norms_keep_their_activations():
    images, logits = torch.randn(2, 3, 64, 64), []
    for sync_bn in (False, True):
        torch.manual_seed(0)
        model = build_model(timm="test_efficientnet", image_size=64, sync_bn=sync_bn).eval()
        assert any(isinstance(layer, nn.SyncBatchNorm) for layer in model.modules()) == sync_bn
        logits.append(model(images))
    torch.testing.assert_close(*logits)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["MODEL.timm=resnt18"],
            "^MODEL.timm='resnt18': timm has no such model; did you mean 'resnet18'",
        ),
        (["MODEL.timm=resnet18.a9_in1k"], "timm has no such weights; did you mean 'resnet18.a"),
        (
            ["MODEL.timm=resnet18", "MODEL.drop_rat=1"],
            "^MODEL.drop_rat: .* no such argument; did you mean 'drop_rate'",
        ),
        (["MODEL.timm=resnet18", "MODEL.in_chans=1"], "^MODEL.in_chans: .* no such argument"),
        (
            ["MODEL.timm=resnet18", "MODEL.depth=5"],
            "^MODEL.depth: .* no such argument; it takes block, layers, ",
        ),
        (
            ["MODEL.timm=inception_v3", "MODEL.image_size=20"],
            "^MODEL.image_size=20: the model takes no such images",
        ),
        (
            ["MODEL.timm=test_vit", "MODEL.image_size=20"],
            "no such images .Input height .20. should be divisible by",
        ),
        (
            ["MODEL.timm=resnet18", "MODEL.layers=[2,2,2,9999999]"],
            "^MODEL.layers=.*: expected a number up to 65536",
        ),
        (
            ["MODEL.timm=vit_tiny_patch16_224", "MODEL.embed_dim=7"],
            "^MODEL.timm='vit_tiny.*: timm does not build it",
        ),
    ],
)
def test_refusals(settings, message):
    with pytest.raises(UserError, match=message):
        flops_per_image(load_config("quickstart", ["MODEL=dict()", *settings])["MODEL"])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            ["MODEL.timm=test_vit", "TENSOR_PARALLEL_SIZE=2", "TENSOR_PARALLEL_MODE=1d"],
            "^MODEL.timm='test_vit' does not support tensor parallel mode '1d': set it to None, or "
            "give a plain ViT by the other keys of MODEL$",
        ),
        (
            ["MODEL.timm=vit_tiny_patch16_224", "IMAGE_SIZES=[(1, 64)]"],
            "^IMAGE_SIZES: 64 pixels: the model takes no .*MODEL.dynamic_img_size=True.$",
        ),
    ],
)
def test_what_a_model_of_timms_does_not_support_is_refused(settings, words, data, tmp_path):
    with pytest.raises(UserError, match=words):
        train(data, tmp_path, "MODEL=dict()", *settings, flags=["--dry-run", "--gpus", "2"])


@pytest.mark.slow
def test_every_family_is_planned():
    """Its model with the shortest name; all but three say their layers, for layer decay."""
    for module in timm.list_modules():
        name = min(timm.list_models(module=module), key=len, default=None)
        if name is None:
            continue
        model = load_config("quickstart", [f"MODEL=dict(timm={name!r}, num_classes=10)"])["MODEL"]
        assert flops_per_image(model) > 0, name
        body = build_on_meta(model, "body")
        assert any(p.requires_grad for p in body.parameters()), name
        with pytest.raises(UserError) if name in WITHOUT_LAYERS else nullcontext():
            assert max(layers_above(body).values()) > 1, name
