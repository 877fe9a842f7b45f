"""Models of timm's: in several processes, in the tools, and what is refused."""

import json

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

VIT = dict(image_size=32, depth=2, embed_dim=48, num_heads=2)
RESNET = dict(timm="resnet18", image_size=32)
DINO = dict(timm="vit_small_patch14_dinov2", activation_checkpoint=True, **VIT | {"image_size": 28})
BEIT = "beit_base_patch16_224"


@pytest.mark.parametrize("mode", ["dp2", slow("zero 1"), slow("zero 3")])
def test_several_processes_train_it_as_one(mode, data, tmp_path):
    world_size, options = CASES[mode]
    settings = f"MODEL={DINO}", "TOTAL_BATCH_SIZE=16", "MAX_STEPS=4", "LOG.every=1"
    run_ranks(1, train, data, tmp_path / "one", *settings)
    own = [f"{key}={value}" for key, value in options.items()]
    run_ranks(world_size, train, data, tmp_path / "several", *settings, *own)
    one, several = (read_metrics(tmp_path / name) for name in ("one", "several"))
    for mine, other in zip(several, one, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4)


CONVNETS = {
    "batch norms": dict(timm="test_resnet", image_size=32),
    "layer norms": dict(timm="convnext_atto", image_size=32, depths=(1, 1, 2, 1)),
}
Losses = list[float]


def batches() -> list[tuple[Tensor, Tensor]]:
    """Return three batches of 8 images, with their classes, in float64."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(3, 8, 3, 32, 32, generator=generator, dtype=torch.float64)
    return [(batch, torch.arange(8) % 5) for batch in images]


def build_double(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = build_model(**CONVNETS[name], num_classes=5).double()
    with torch.no_grad():
        for parameter in model.parameters():  # heads that begin at 0
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def train_here(name: str) -> tuple[Losses, Losses, dict[str, Tensor]]:
    """Return losses and gradient norms of this rank's share of the batches, and buffers at last."""
    losses, norms = [], []
    config = dict(LEARNING_RATE=1e-3, WEIGHT_DECAY=0.1, OPTIMIZER=dict(name="adamw"))
    with launched():
        model = build_double(name)
        engine = build_training(config, F.cross_entropy, model=model).engine
        rank, size = gpc.get_global_rank(), gpc.get_world_size(ParallelMode.DATA)
        engine.train()
        for images, labels in batches():
            engine.zero_grad()
            loss = F.cross_entropy(engine(images.chunk(size)[rank]), labels.chunk(size)[rank])
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            norms.append(engine.optimizer.grad_norm.item())
        return losses, norms, {key: buffer.clone() for key, buffer in model.named_buffers()}


def train_timms(name: str, parts: int) -> tuple[Losses, Losses, dict[str, Tensor]]:
    """Train timm's model with torch's AdamW in one process; batch norms see a part of a batch.

    The buffers are those after the first parts alone.
    """
    arguments = {key: value for key, value in CONVNETS[name].items() if key in ("timm", "depths")}
    model = timm.create_model(arguments.pop("timm"), num_classes=5, **arguments).double()
    model.load_state_dict(build_double(name).state_dict())
    optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    losses, norms = [], []
    for images, labels in batches():
        optimizer.zero_grad()
        before = None
        total = 0
        for part, wanted in zip(images.chunk(parts), labels.chunk(parts), strict=True):
            total += F.cross_entropy(model(part), wanted) / parts
            before = before or {key: buffer.clone() for key, buffer in model.named_buffers()}
        total.backward()
        for key, buffer in model.named_buffers():
            buffer.copy_(before[key])
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
        optimizer.step()
        losses.append(total.item())
    return losses, norms, dict(model.named_buffers())


@pytest.mark.parametrize("name", CONVNETS)
def test_two_processes_train_a_convnet_as_timms_in_one(name):
    """Batch norms that are not synchronised count the images of the first rank."""
    losses, norms, buffers = train_timms(name, 2)
    by_rank = run_ranks(2, train_here, name)
    means = [sum(of_ranks) / 2 for of_ranks in zip(*(rank[0] for rank in by_rank), strict=True)]
    assert means == pytest.approx(losses, rel=1e-6)
    assert all(rank[1] == pytest.approx(norms, rel=1e-6) for rank in by_rank)
    torch.testing.assert_close(by_rank[0][2], buffers, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model", [RESNET, slow(DINO), slow(dict(timm=BEIT, **VIT))])
def test_tools_take_it(model, data, tmp_path, capsys):
    output = train(data, tmp_path / "run", f"MODEL={model}", "EMA=0.5")
    run = open_run(str(output))
    for target in export.FORMATS:
        assert export.export(run, target, tmp_path / target) < 1e-5
    exported = json.loads((tmp_path / "timm" / "config.json").read_text())["pretrained_cfg"]
    assert exported["classifier"] == timm.get_pretrained_cfg(model["timm"]).classifier
    evaluate.main([str(output)])
    assert f"MODEL.timm: {model['timm']}, image_size=" in capsys.readouterr().out
    head = train(data, tmp_path / "head", f"MODEL={model}", f"INIT={output}", "FREEZE=body")
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
    expected = checkpoint_filter_fn(theirs.state_dict(), timm.create_model("test_vit", img_size=32))
    for name, value in expected.items():
        assert name.startswith("head.") or torch.equal(model.state_dict()[name], value), name


@pytest.mark.parametrize(
    "timm_and_arguments",
    [
        dict(timm="deit_tiny_distilled_patch16_224", drop_path_rate=0.1),  # *args, **kwargs
        dict(timm="regnety_002", act_layer="silu"),  # fields of a configuration
        dict(timm="test_efficientnet", bn_eps=1e-4),  # of the function that builds it
    ],
)
def test_an_argument_that_timm_takes_is_taken(timm_and_arguments):
    mine = build_on_meta(dict(image_size=224, **timm_and_arguments))
    name = timm_and_arguments.pop("timm")
    with torch.device("meta"):
        theirs, plain = timm.create_model(name, **timm_and_arguments), timm.create_model(name)
    assert repr(mine) == repr(theirs) != repr(plain)


def test_a_run_is_opened_at_another_image_size_as_by_timm(data, tmp_path):
    run = train(data, tmp_path / "run", "MODEL=dict(timm='test_vit', image_size=32)", "MAX_STEPS=1")
    opened = open_run(str(run), ["MODEL.image_size=64"])
    theirs = timm.create_model("test_vit", img_size=64, num_classes=7).eval()
    theirs.load_state_dict(checkpoint_filter_fn(opened.load_weights(), theirs))
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(opened.load_model()(images), theirs(images))


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
        (["MODEL.timm=resnet18.a9_in1k"], "timm has no such weights; did you mean 'resnet18.a"),
        (
            ["MODEL.timm=resnet18", "MODEL.drop_rat=1"],
            "^MODEL.drop_rat: .* no such argument; did you mean 'drop_rate'",
        ),
        (
            ["MODEL.timm=levit_128s", "MODEL.image_size=224", "MODEL.drop_pth_rate=0.1"],
            "^MODEL.drop_pth_rate: .* no such argument; did you mean 'drop_path_rate'",
        ),
        (["MODEL.timm=resnet18", "MODEL.checkpoint_path=a.pth"], "^MODEL.checkpoint_path: it may"),
        (
            ["MODEL.timm=resnet18", "MODEL.layers=[2,2,2,9999999]"],
            "^MODEL.layers=.*: expected a number up to 65536",
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
            "^IMAGE_SIZES: the model takes no images of 64 pixels .Input height.*dynamic_img_size",
        ),
        (["IMAGE_SIZES=[(1, 20)]"], "^IMAGE_SIZES: 20 .* MODEL.patch_size=16: set 16 or 32$"),
    ],
)
def test_what_a_model_does_not_support_is_refused(settings, words, data, tmp_path):
    with pytest.raises(UserError, match=words):
        train(data, tmp_path, "MODEL=dict()", *settings, flags=["--dry-run", "--gpus", "2"])
