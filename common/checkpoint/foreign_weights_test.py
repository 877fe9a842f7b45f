"""Files that other programs save: started from, and opened by the tools."""

from argparse import Namespace

import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from timm.utils import CheckpointSaver, ModelEmaV3
from torch import nn
from torch.optim import SGD

from common.checkpoint.weights import load_pretrained, open_model
from common.model.build import build_model, timm_arguments
from common.testing.tiny_task import MODEL


def test_the_encoder_of_mae_gets_a_norm_for_the_mean_of_its_patches(tmp_path):
    arguments = timm_arguments(**MODEL, num_classes=7)
    theirs = VisionTransformer(**arguments)
    saved = theirs.state_dict(prefix="model.backbone.")
    saved["model.backbone.mask_token"] = torch.ones(1)
    saved["decoder_embed.weight"] = torch.ones(1)
    # Lightning's checkpoints look like this.
    file = tmp_path / "last.ckpt"
    torch.save({"state_dict": saved, "epoch": 1}, file)
    ours = build_model(**MODEL, pool="avg", num_classes=7)
    done = load_pretrained(ours, str(file))
    assert done.endswith(
        "last.ckpt (names without model.backbone.); a new norm for the mean of the patches, "
        "without its class token; MODEL.heads=2, which the weights do not tell; without 2 "
        "parameters of pre-training: mask_token, decoder_embed.weight"
    )
    expected = theirs.state_dict()
    del expected["cls_token"]
    del expected["norm.weight"]
    del expected["norm.bias"]
    expected["pos_embed"] = expected["pos_embed"][:, 1:]
    expected |= nn.LayerNorm(32).state_dict(prefix="fc_norm.")
    torch.testing.assert_close(ours.state_dict(), expected, rtol=0, atol=0)


def test_tools_take_the_average_and_prepare_images_as_timms_train_py(tmp_path):
    trained = timm.create_model("test_resnet", num_classes=5)
    average = timm.create_model("test_resnet", num_classes=5).eval()
    saver = CheckpointSaver(
        trained,
        SGD(trained.parameters(), lr=1.0),
        Namespace(model="test_resnet", img_size=32, crop_pct=0.9),
        ModelEmaV3(average),
        checkpoint_dir=tmp_path,
    )
    saver.save_checkpoint(epoch=3, metric=71.5)
    run = open_model(str(tmp_path / "last.pth.tar"))
    opened = run.load_model()
    size = run.config["MODEL"]["image_size"]
    images = torch.randn(2, 3, size, 32)
    assert torch.equal(opened(images), average(images))
    assert run.config["DATA"]["eval_crop"] == 0.9
    assert "state_dict_ema, the moving average" in run.chosen
