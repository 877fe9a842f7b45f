"""Models of the Hugging Face Hub, here a folder: started from, and equal to timm's."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from huggingface_hub.errors import EntryNotFoundError
from PIL import Image
from safetensors.torch import save_file
from timm.data import create_transform, resolve_model_data_config

from common.checkpoint.weights import load_pretrained, resolve_source
from common.errors import UserError
from common.model.build import build_model
from common.testing.commands import run_forked
from common.testing.ranks import run_ranks
from common.testing.tiny_task import MODEL, train
from common.tools import predict

TINY = dict(img_size=16, patch_size=8, embed_dim=32, depth=2, num_heads=4, mlp_ratio=2.0)
MODELS = {"vit_tiny_patch16_224.augreg_in21k": TINY, "test_resnet.r160_in1k": {}}
CFG = {
    "mean": [0.5] * 3,
    "std": [0.25] * 3,
    "crop_pct": 0.9,
    "interpolation": "bicubic",
    "input_size": [3, 16, 16],
}

TESTED = {"test_input_size": [3, 24, 24], "test_crop_pct": 1.0}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for each model, with a tiny one in place of one of timm's."""
    torch.manual_seed(3)
    for name, arguments in MODELS.items():
        architecture = name.partition(".")[0]
        model = timm.create_model(architecture, **arguments)
        about = {
            "architecture": architecture,
            "num_classes": 1000,
            "model_args": arguments,
            "pretrained_cfg": CFG if arguments else CFG | TESTED,
        }
        folder = tmp_path / "hub" / "timm" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(about))
        save_file(model.state_dict(), folder / "model.safetensors")

    def download(repo_id: str, filename: str, **_: object) -> str:
        path = tmp_path / "hub" / repo_id / filename
        if not path.exists():
            raise EntryNotFoundError(f"{repo_id}/{filename}")
        return str(path)

    monkeypatch.setattr(timm.models._hub, "hf_hub_download", download)
    return tmp_path / "hub"


@pytest.mark.parametrize("name", MODELS)
def test_a_model_by_timms_name_answers_as_in_timm(name, hub, tmp_path, capsys):
    picture = Image.fromarray(np.random.default_rng(1).integers(0, 256, (40, 60, 3), np.uint8))
    picture.save(tmp_path / "picture.png")
    predict.main([name, str(tmp_path / "picture.png"), "--json"])
    model = timm.create_model(f"hf-hub:timm/{name}", pretrained=True).eval()
    transform = create_transform(**resolve_model_data_config(model, use_test_size=True))
    with torch.no_grad():
        shares = model(transform(picture)[None]).softmax(1)[0].topk(5)
    names = timm.data.ImageNetInfo().label_descriptions()
    answers = json.loads(capsys.readouterr().out)["classes"]
    for answer, label, share in zip(answers, shares.indices, shares.values, strict=True):
        assert (answer["label"], answer["class"]) == (label, names[label])
        assert answer["probability"] == pytest.approx(share.item(), abs=2e-4)


def test_two_processes_start_from_it_or_are_told_what_fits(hub, data, tmp_path, capfd):
    def start(words: list[str]) -> None:
        output, *settings = words
        train(data, tmp_path / output, "MAX_STEPS=1", *settings)

    name = "vit_tiny_patch16_224.augreg_in21k"
    run_ranks(2, start, ["run", f"INIT=hf_hub:timm/{name}", "MODEL.heads=4"])
    said = " ".join(capfd.readouterr().out.split())
    for words in ("a new head of 7 classes, not its 1000", "global batch ", "checkpoint ", "top1="):
        assert said.count(words) == 1
    about = json.loads((tmp_path / "run" / "config.json").read_text())
    assert about["config"]["INIT"].startswith("hf-hub:timm/")
    ended = run_forked(start, ["other", f"INIT={name}"], code=2)
    assert ended.stderr == (
        f"error: INIT=hf-hub:timm/{name}: its model differs from MODEL.heads=2: --set "
        "MODEL.heads=4 fits, or start from other weights\n"
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "vit_tiny_patch16_224.augreg_in22k",
            "no such weights; did you mean 'vit_tiny_patch16_224.augreg",
        ),
        ("test_resnet.r160_in1k", "test_resnet is no plain Vision Transformer"),
        ("hf-hub:user/clip", "has another activation, norm or"),
        (
            "hf-hub:user/none",
            "elsewhere from https://huggingface.co/user/none and pass --init FILE",
        ),
    ],
)
def test_a_plain_vit_starts_from_no_others(hub, name, words):
    shutil.copytree(hub / "timm" / "test_resnet.r160_in1k", hub / "user" / "clip")
    (hub / "user" / "clip" / "config.json").write_text(
        '{"architecture": "vit_base_patch32_clip_224"}'
    )
    with pytest.raises(UserError, match=words):
        load_pretrained(build_model(**MODEL), resolve_source(name))


def test_a_path_goes_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (
        resolve_source("vit_tiny_patch16_224")
        == "hf-hub:timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    )
    Path("vit_tiny_patch16_224").mkdir()
    assert resolve_source("vit_tiny_patch16_224", is_timm=True).startswith("hf-hub:timm/")
    assert resolve_source("vit_tiny_patch16_224") == str(tmp_path / "vit_tiny_patch16_224")
    Path("best").symlink_to("a run's")
    assert resolve_source("best") == str(tmp_path / "best")
    assert resolve_source("weights.pth") == str(tmp_path / "weights.pth")
