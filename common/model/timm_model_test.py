"""Models of timm's: in several processes, in the tools, and what is refused."""

import json
from dataclasses import dataclass

import pytest
import timm
import torch
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

from common.checkpoint.saved_run import open_run
from common.checkpoint.weights import load_pretrained
from common.config.load import load_config
from common.engine.upstream import ParallelMode, gpc
from common.errors import UserError
from common.metrics.metrics_file import read_metrics
from common.model.build import build_model, build_on_meta
from common.model.flops import flops_per_image
from common.testing.parity_cases import CASES
from common.testing.ranks import launched, run_ranks, slow
from common.testing.tiny_task import train
from common.tools import evaluate, export
from common.training import build_training

RESNET = dict(timm="resnet18", image_size=32)
SMALL = dict(depth=2, embed_dim=48, num_heads=2)
DINO = dict(
    timm="vit_small_patch14_dinov2",
    image_size=28,
    activation_checkpoint=True,
    **SMALL,
)
BEIT = dict(timm="beit_base_patch16_224", image_size=32, **SMALL)


@pytest.mark.parametrize("mode", ["dp2", slow("zero 1"), slow("zero 3")])
def test_several_processes_train_it_as_one(mode, data, tmp_path):
    world_size, options = CASES[mode]
    settings = [
        f"MODEL={DINO}",
        "TOTAL_BATCH_SIZE=16",
        "MAX_STEPS=4",
        "LOG.every=1",
    ]
    run_ranks(1, train, data, tmp_path / "one", *settings)
    settings += [f"{key}={value}" for key, value in options.items()]
    run_ranks(world_size, train, data, tmp_path / "several", *settings)
    one = read_metrics(tmp_path / "one")
    several = read_metrics(tmp_path / "several")
    for mine, other in zip(several, one, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4)


CONVNETS = {
    "batch norms": dict(timm="test_resnet", image_size=32),
    "layer norms": dict(timm="convnext_atto", image_size=32, depths=(1, 1, 2, 1)),
}


@dataclass
class Trained:
    losses: list[float]
    grad_norms: list[float]
    buffers: dict[str, Tensor]  # after the last step


def batches() -> list[tuple[Tensor, Tensor]]:
    """Return three batches of 8 images, with their classes, in float64."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(3, 8, 3, 32, 32, generator=generator, dtype=torch.float64)
    labels = torch.arange(8) % 5
    return [(batch, labels) for batch in images]


def build_double(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = build_model(**CONVNETS[name], num_classes=5).double()
    with torch.no_grad():
        for parameter in model.parameters():  # heads that begin at 0
            noise = torch.randn_like(parameter)
            parameter.add_(0.02 * noise)
    return model


def copy_of_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {key: buffer.clone() for key, buffer in model.named_buffers()}


def train_here(name: str) -> Trained:
    """Train on this rank's share of the batches."""
    losses = []
    norms = []
    config = dict(LEARNING_RATE=1e-3, WEIGHT_DECAY=0.1, OPTIMIZER=dict(name="adamw"))
    with launched():
        model = build_double(name)
        engine = build_training(config, F.cross_entropy, model=model).engine
        rank = gpc.get_global_rank()
        size = gpc.get_world_size(ParallelMode.DATA)
        engine.train()
        for images, labels in batches():
            local_images = images.chunk(size)[rank]
            local_labels = labels.chunk(size)[rank]
            engine.zero_grad()
            loss = F.cross_entropy(engine(local_images), local_labels)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            norms.append(engine.optimizer.grad_norm.item())
        return Trained(losses, norms, copy_of_buffers(model))


def train_timms(name: str, parts: int) -> Trained:
    """Train timm's model with torch's AdamW in one process; batch norms see a part of a batch.

    The buffers are those after the first parts alone.
    """
    arguments = CONVNETS[name].copy()
    timm_name = arguments.pop("timm")
    del arguments["image_size"]  # convnets take any
    model = timm.create_model(timm_name, num_classes=5, **arguments).double()
    model.load_state_dict(build_double(name).state_dict())
    optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    losses = []
    norms = []
    for images, labels in batches():
        optimizer.zero_grad()
        of_parts = []
        after_first_part = None
        for part, wanted in zip(images.chunk(parts), labels.chunk(parts), strict=True):
            loss = F.cross_entropy(model(part), wanted)
            of_parts.append(loss)
            after_first_part = after_first_part or copy_of_buffers(model)
        mean = sum(of_parts) / parts
        mean.backward()
        for key, buffer in model.named_buffers():
            buffer.copy_(after_first_part[key])
        gradients = [p.grad for p in model.parameters()]
        norms.append(nn.utils.get_total_norm(gradients).item())
        optimizer.step()
        losses.append(mean.item())
    return Trained(losses, norms, copy_of_buffers(model))


@pytest.mark.parametrize("name", CONVNETS)
def test_two_processes_train_a_convnet_as_timms_in_one(name):
    """Batch norms that are not synchronised count the images of the first rank."""
    expected = train_timms(name, 2)
    first, second = run_ranks(2, train_here, name)
    means = [(a + b) / 2 for a, b in zip(first.losses, second.losses, strict=True)]
    assert means == pytest.approx(expected.losses, rel=1e-6)
    assert first.grad_norms == pytest.approx(expected.grad_norms, rel=1e-6)
    assert second.grad_norms == pytest.approx(expected.grad_norms, rel=1e-6)
    torch.testing.assert_close(first.buffers, expected.buffers, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model", [RESNET, slow(DINO), slow(BEIT)])
def test_tools_take_it(model, data, tmp_path, capsys):
    output = train(data, tmp_path / "run", f"MODEL={model}", "EMA=0.5")
    run = open_run(str(output))
    for target in export.FORMATS:
        difference = export.export(run, target, tmp_path / target)
        assert difference < 1e-5
    hf_config = json.loads((tmp_path / "timm" / "config.json").read_text())
    timms = timm.get_pretrained_cfg(model["timm"])
    assert hf_config["pretrained_cfg"]["classifier"] == timms.classifier
    evaluate.main([str(output)])
    assert f"MODEL.timm: {model['timm']}, image_size=" in capsys.readouterr().out

    head = train(data, tmp_path / "head", f"MODEL={model}", f"INIT={output}", "FREEZE=body")
    before = run.load_weights()
    after = open_run(str(head), raw=True).load_weights()
    changed = set()
    for key, value in after.items():
        if not torch.equal(value, before[key]):
            layer, _, _ = key.rpartition(".")
            changed.add(layer)
    head_names = build_on_meta(run.config["MODEL"]).head_names
    assert changed == set(head_names)


def test_pretrained_weights_are_fitted_as_by_timm(tmp_path):
    """To other classes and another image size."""
    torch.manual_seed(0)
    theirs = timm.create_model("test_vit", img_size=64, num_classes=7)
    file = tmp_path / "weights.pt"
    torch.save(theirs.state_dict(), file)
    model = build_model(timm="test_vit", image_size=32, num_classes=3)
    done = load_pretrained(model, str(file))
    assert done.endswith("; a new head of 3 classes, not its 7")
    smaller = timm.create_model("test_vit", img_size=32)
    expected = checkpoint_filter_fn(theirs.state_dict(), smaller)
    found = model.state_dict()
    for name, value in expected.items():
        if not name.startswith("head."):
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        # *args, **kwargs
        ("deit_tiny_distilled_patch16_224", dict(drop_path_rate=0.1)),
        # fields of a configuration
        ("regnety_002", dict(act_layer="silu")),
        # of the function that builds it
        ("test_efficientnet", dict(bn_eps=1e-4)),
    ],
)
def test_an_argument_that_timm_takes_is_taken(name, arguments):
    mine = build_on_meta(dict(timm=name, image_size=224, **arguments))
    with torch.device("meta"):
        theirs = timm.create_model(name, **arguments)
        plain = timm.create_model(name)
    assert repr(mine) == repr(theirs)
    assert repr(mine) != repr(plain)


def test_a_run_is_opened_at_another_image_size_as_by_timm(data, tmp_path):
    run = train(data, tmp_path / "run", "MODEL=dict(timm='test_vit', image_size=32)", "MAX_STEPS=1")
    opened = open_run(str(run), ["MODEL.image_size=64"])
    theirs = timm.create_model("test_vit", img_size=64, num_classes=7).eval()
    resampled = checkpoint_filter_fn(opened.load_weights(), theirs)
    theirs.load_state_dict(resampled)
    ours = opened.load_model()
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(ours(images), theirs(images))


def test_synchronised_batch_norms_keep_their_activations():
    arguments = dict(timm="test_efficientnet", image_size=64)
    plain = build_model(**arguments).eval()
    synchronised = build_model(**arguments, sync_bn=True).eval()
    assert any(isinstance(layer, nn.SyncBatchNorm) for layer in synchronised.modules())
    synchronised.load_state_dict(plain.state_dict())
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(synchronised(images), plain(images))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["MODEL.timm=resnt18"],
            "^MODEL.timm='resnt18': timm has no such model; did you mean 'resnet18'",
        ),
        (
            ["MODEL.timm=resnet18.a9_in1k"],
            "timm has no such weights; did you mean 'resnet18.a",
        ),
        (
            ["MODEL.timm=resnet18", "MODEL.drop_rat=1"],
            "^MODEL.drop_rat: .* no such argument; did you mean 'drop_rate'",
        ),
        (
            ["MODEL.timm=levit_128s", "MODEL.image_size=224", "MODEL.drop_pth_rate=0.1"],
            "^MODEL.drop_pth_rate: .* no such argument; did you mean 'drop_path_rate'",
        ),
        (
            ["MODEL.timm=resnet18", "MODEL.checkpoint_path=a.pth"],
            "^MODEL.checkpoint_path: it may",
        ),
        (
            ["MODEL.timm=resnet18", "MODEL.layers=[2,2,2,9999999]"],
            "^MODEL.layers=.*: expected a number up to 65536",
        ),
    ],
)
def test_refusals(settings, message):
    def build() -> None:
        config = load_config("quickstart", ["MODEL=dict()", *settings])
        flops_per_image(config["MODEL"])

    with pytest.raises(UserError, match=message):
        build()


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
            "^IMAGE_SIZES: the model takes no images of 64 pixels .Input height.*dynamic_img_size",
        ),
        (
            ["IMAGE_SIZES=[(1, 20)]"],
            "^IMAGE_SIZES: 20 .* MODEL.patch_size=16: set 16 or 32$",
        ),
    ],
)
def test_what_a_model_does_not_support_is_refused(settings, words, data, tmp_path):
    with pytest.raises(UserError, match=words):
        train(data, tmp_path, "MODEL=dict()", *settings, flags=["--dry-run", "--gpus", "2"])
