"""Models of timm's: in several processes, in the tools, and what is refused."""

import pytest
import timm
import torch
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import nn

from common.checkpoint.saved_run import open_run
from common.checkpoint.weights import load_pretrained
from common.config.load import load_config
from common.errors import UserError
from common.metrics.metrics_file import read_metrics
from common.model.build import build_model, build_on_meta
from common.model.flops import flops_per_image
from common.testing.parity_cases import CASES
from common.testing.ranks import run_ranks, slow
from common.testing.tiny_task import train
from common.tools import evaluate, export

VIT = dict(image_size=32, depth=2, embed_dim=48, num_heads=2)
RESNET = dict(timm="resnet18", image_size=32)
DINO = dict(timm="vit_small_patch14_dinov2", activation_checkpoint=True, **VIT | {"image_size": 28})
BEIT = "beit_base_patch16_224"


@pytest.mark.parametrize("mode", ["dp2", slow("zero 1"), slow("zero 3")])
def test_several_processes_train_it_as_one(mode, data, tmp_path):
    gpus, options = CASES[mode]
    settings = f"MODEL={DINO}", "TOTAL_BATCH_SIZE=16", "MAX_STEPS=4", "LOG.every=1"
    run_ranks(1, train, data, tmp_path / "one", *settings)
    own = [f"{key}={value}" for key, value in options.items()]
    run_ranks(gpus, train, data, tmp_path / "several", *settings, *own)
    one, several = (read_metrics(tmp_path / name) for name in ("one", "several"))
    for mine, other in zip(several, one, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4)


@pytest.mark.parametrize("model", [RESNET, slow(DINO), slow(dict(timm=BEIT, **VIT))])
def test_tools_take_it(model, data, tmp_path, capsys):
    output = train(data, tmp_path / "run", f"MODEL={model}", "EMA=0.5")
    run = open_run(str(output))
    for target in export.FORMATS:
        assert export.export(run, target, tmp_path / target) < 1e-5
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
