"""Models of the Hugging Face Hub, here a folder: started from, and equal to timm's."""

import json
import shutil
from pathlib import Path

import pytest
import timm
import torch
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import save_file
from timm.data import create_transform, resolve_model_data_config

from common.checkpoint.weights import load_pretrained, resolve_source
from common.errors import UserError
from common.model.build import build_model
from common.testing.photographs import noise_image
from common.testing.ranks import run_ranks
from common.testing.tiny_task import MODEL, train
from common.tools import predict

TINY = dict(img_size=16, patch_size=8, embed_dim=32, depth=2, num_heads=4, mlp_ratio=2.0)
CFG = {
    "mean": [0.5, 0.5, 0.5],
    "std": [0.25, 0.25, 0.25],
    "crop_pct": 0.9,
    "interpolation": "bicubic",
    "input_size": [3, 16, 16],
}
MODELS = {
    "vit_tiny_patch16_224.augreg_in21k": (TINY, CFG),
    "test_resnet.r160_in1k": ({}, CFG | {"test_input_size": [3, 24, 24], "test_crop_pct": 1.0}),
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for each model, with a tiny one in place of one of timm's."""
    torch.manual_seed(3)
    for name, (arguments, cfg) in MODELS.items():
        architecture = name.partition(".")[0]
        model = timm.create_model(architecture, **arguments)
        hf_config = {
            "architecture": architecture,
            "num_classes": 1000,
            "model_args": arguments,
            "pretrained_cfg": cfg,
        }
        folder = tmp_path / "hub" / "timm" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(hf_config))
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
    picture = noise_image(40, 60, seed=1)
    picture.save(tmp_path / "picture.png")
    predict.main([name, str(tmp_path / "picture.png"), "--json"])
    model = timm.create_model(f"hf-hub:timm/{name}", pretrained=True).eval()
    transform = create_transform(**resolve_model_data_config(model, use_test_size=True))
    with torch.no_grad():
        shares = model(transform(picture)[None]).softmax(1)[0].topk(5)
    names = timm.data.ImageNetInfo().label_descriptions()
    answers = json.loads(capsys.readouterr().out)["classes"]
    assert [answer["label"] for answer in answers] == shares.indices.tolist()
    assert [answer["class"] for answer in answers] == [
        names[label] for label in shares.indices.tolist()
    ]
    found = [answer["probability"] for answer in answers]
    assert found == pytest.approx(shares.values.tolist(), abs=2e-4)


def test_two_processes_start_from_it(hub, data, tmp_path, capfd):
    settings = "MAX_STEPS=1", "INIT=hf_hub:timm/vit_tiny_patch16_224.augreg_in21k", "MODEL.heads=4"
    run_ranks(2, train, data, tmp_path / "run", *settings)
    said = " ".join(capfd.readouterr().out.split())
    assert said.count("a new head of 7 classes, not its 1000") == 1
    metadata = json.loads((tmp_path / "run" / "config.json").read_text())
    assert metadata["config"]["INIT"].startswith("hf-hub:timm/")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("vit_tiny_patch16_224.augreg_in21k", "MODEL.heads=2: --set MODEL.heads=4 fits, or start"),
        ("test_resnet.r160_in1k", "test_resnet is no plain Vision Transformer"),
        ("hf-hub:user/clip", "has another activation, norm or"),
        (
            "hf-hub:user/none",
            "elsewhere from https://huggingface.co/user/none and pass --init FILE",
        ),
    ],
)
def test_what_a_plain_vit_does_not_start_from(hub, name, words):
    shutil.copytree(hub / "timm" / "test_resnet.r160_in1k", hub / "user" / "clip")
    (hub / "user" / "clip" / "config.json").write_text(
        '{"architecture": "vit_base_patch32_clip_224"}'
    )
    with pytest.raises(UserError, match=words):
        load_pretrained(build_model(**MODEL), resolve_source(name))


def test_a_path_goes_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "vit_tiny_patch16_224"
    assert resolve_source(name) == f"hf-hub:timm/{name}.augreg_in21k_ft_in1k"
    Path(name).symlink_to(tmp_path)  # as a run's `best`: the link stays
    assert resolve_source(name, is_timm=True).startswith("hf-hub:timm/")
    for path in (name, "weights.pth"):
        assert resolve_source(path) == str(tmp_path / path)
