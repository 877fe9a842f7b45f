"""Starting from pretrained weights: ours and timm's, other classes and image sizes, every parallel
mode.
"""

import shutil
from argparse import Namespace
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import Tensor

from common.checkpoint.save import newest_checkpoint
from common.checkpoint.saved_run import open_run
from common.checkpoint.weights import load_pretrained, open_source
from common.errors import UserError
from common.metrics.metrics_file import read_metrics
from common.model.build import build_model, timm_arguments
from common.testing.parity_cases import CASES
from common.testing.ranks import run_ranks
from common.testing.tiny_task import MODEL, train
from common.tools import export

OTHER = MODEL | {"num_classes": 7}


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory) -> Path:
    return train(data, tmp_path_factory.mktemp("task") / "run", "EMA=0.9")


@pytest.fixture
def saved(tmp_path) -> Path:
    """A file with the weights of a model like `OTHER`, of 9 classes."""
    path = tmp_path / "weights.safetensors"
    torch.manual_seed(1)
    model = build_model(**OTHER | {"num_classes": 9})
    save_file(model.state_dict(), path)
    return path


@pytest.mark.parametrize("size", [16, 32, 56])
@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"pool": "avg"},
        {"position": "sincos2d"},
        {"pool": "avg", "position": "sincos2d", "reg_tokens": 4},
        {"reg_tokens": 4},
        {"reg_tokens": 4, "no_embed_class": True, "init_values": 0.1},
        {"norm": "rmsnorm", "mlp": "swiglu"},
    ],
)
def test_other_classes_and_another_size_are_timms(parts, size, tmp_path):
    file = tmp_path / "timm.pth"
    source = build_model(**OTHER | parts | {"image_size": 32, "num_classes": 9})
    torch.save({"model": torch.compile(source).state_dict()}, file)
    arguments = OTHER | parts | {"image_size": size}
    ours = build_model(**arguments).eval()
    before = deepcopy(dict(ours.named_parameters()))
    done = load_pretrained(ours, str(file))

    reference = VisionTransformer(**timm_arguments(**arguments)).eval()
    expected = checkpoint_filter_fn(source.state_dict(), reference)
    expected["head.weight"] = before["head.weight"]
    expected["head.bias"] = before["head.bias"]
    if "position" in parts:  # timm knows of no fixed table, and would resample it
        expected["pos_embed"] = before["pos_embed"]
    reference.load_state_dict(expected)
    images = torch.randn(3, 3, size, size)
    torch.testing.assert_close(ours(images), reference(images))

    assert "(names without _orig_mod.); MODEL.heads=2, which the weights do not tell; " in done
    assert "; a new head of 7 classes, not its 9" in done
    grid = size // 8
    says_resampled = f"resampled to {grid} x {grid} patches from 4 x 4" in done
    is_resampled = size != 32 and "position" not in parts
    assert says_resampled == is_resampled


# weights; the data set's classes; the option; their rows of the head, "-" for a new one; and what
# is said
HEADS = """
trained | blue cyan green magenta$^$ red white yellow | | 0 1 2 3 4 5 6 |
trained | yellow white red magenta$^$ green cyan blue | | 6 5 4 3 2 1 0 | the rows of its head in
trained | a b c d e f g | | - | a new head of 7 classes, not its 7 others
saved | 0 1 10 2 3 4 5 6 7 | | 0 1 2 3 4 5 6 7 8 | timm's is 0, 1, 2, 3, 4 and 4 more (--class-order
saved | 0 1 10 2 3 4 5 6 7 | timm | 0 1 8 2 3 4 5 6 7 | the rows of its head in the order
saved | 0 1 10 2 3 4 5 6 7 | LICENSE | - | a new head of 9 classes, not its 9 others
"""


@pytest.mark.parametrize("case", HEADS.strip().splitlines())
def test_a_head_is_kept_for_classes_of_its_names(request, case):
    source, names, option, rows, said = map(str.strip, case.split("|"))
    path = str(request.getfixturevalue(source))
    saved = open_source(path).weights
    model = build_model(**OTHER | {"num_classes": len(names.split())})
    own = deepcopy(model.head.state_dict())
    assert said in load_pretrained(model, path, names.split(), option)
    for key, value in model.head.state_dict().items():
        if rows == "-":
            expected = own[key]
        else:
            order = [int(row) for row in rows.split()]
            expected = saved[f"head.{key}"][order]
        assert torch.equal(value, expected)


def test_a_run_a_checkpoint_a_file_and_exports_give_the_averaged_weights_and_heads(
    trained, tmp_path
):
    for target in ("timm", "safetensors"):
        export.main([str(trained), "--to", target, "--output", str(tmp_path / target)])
    alone = shutil.copy(tmp_path / "safetensors" / "model.safetensors", tmp_path / "a.safetensors")
    checkpoint = newest_checkpoint(trained / "checkpoints")
    average = checkpoint / "model.safetensors"
    expected = load_file(average)
    for source in (trained, checkpoint, average, tmp_path / "timm", alone):
        model = build_model(**OTHER)
        done = f"starting from the weights of {source}"
        if source == trained:
            done += f" (the best; moving average of the weights: {checkpoint.name})"
        assert load_pretrained(model, str(source)) == done
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, expected[name])
        other = build_model(**OTHER | {"heads": 4})
        with pytest.raises(UserError, match="differs from MODEL.heads=4: --set MODEL.heads=2 fits"):
            load_pretrained(other, str(source))
    assert open_run(str(trained), raw=True).weights == "raw.safetensors"


@pytest.mark.parametrize("mode", ["dp2", "1d-2", "2d-4"])
def test_every_mode_starts_from_the_same(trained, data, mode, tmp_path):
    """At a learning rate of 0, the evaluation after a step is that of the initial weights."""
    world_size, options = CASES[mode]
    settings = [
        f"INIT={trained}",
        "LEARNING_RATE=1e-50",
        "MAX_STEPS=1",
        *(f"{key}={value}" for key, value in options.items()),
    ]
    run = tmp_path / "run"
    run_ranks(world_size, train, data, run, *settings)
    found = read_metrics(run)[-1]
    expected = read_metrics(trained)[-1]
    assert found["top1"] == expected["top1"]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_weights_that_do_not_fit_are_refused(saved):
    change = {
        "mlp_ratio": 3,
        "reg_tokens": 2,
        "init_values": 1e-6,
        "no_embed_class": True,
        "norm": "rmsnorm",
        "mlp": "swiglu",
    }
    message = (
        "from MODEL.mlp_ratio=3.0, MODEL.mlp=swiglu, MODEL.norm=rmsnorm, "
        "MODEL.no_embed_class=True, MODEL.reg_tokens=2, MODEL.init_values=1e-06: "
        "--set MODEL.mlp_ratio=2.0 --set MODEL.mlp=gelu --set MODEL.norm=layernorm "
        "--set MODEL.no_embed_class=False --set MODEL.reg_tokens=0 --set MODEL.init_values=None "
        "fits"
    )
    with pytest.raises(UserError, match=message) as raised:
        load_pretrained(build_model(**OTHER | change), str(saved))
    assert "\n" not in str(raised.value)


def test_weights_that_are_not_finite_are_refused(saved):
    weights = load_file(saved)
    weights["blocks.1.mlp.fc1.bias"][3] = torch.nan
    save_file(weights, saved)
    with pytest.raises(UserError, match="blocks.1.mlp.fc1.bias holds numbers that are not finite"):
        load_pretrained(build_model(**OTHER), str(saved))


def test_what_holds_no_weights_is_refused(tmp_path):
    weights = {"a": torch.ones(1)}
    args = Namespace(output=tmp_path)  # a class that is not read, in one that is
    torch.save({"model": weights, "args": args}, tmp_path / "code.pth")
    torch.save({"epoch": 3, "weights": weights}, tmp_path / "other.pth")
    (tmp_path / "short.safetensors").write_bytes(b"12345678{")
    (tmp_path / "empty").mkdir()
    messages = {
        "code.pth": "not by torch.save, or more than tensors",
        "short.safetensors": "holds no weights that can be read",
        "empty": "holds no weights that can be read \\(No such file",
        "other.pth": "is no state_dict",
    }
    for name, words in messages.items():
        path = tmp_path / name
        with pytest.raises(UserError, match=f"{path}: .*{words}") as raised:
            open_source(str(path))
        assert "\n" not in str(raised.value)


def test_the_head_alone_is_trained_and_then_the_whole(trained, data, tmp_path):
    settings = ("EMA=0.9", "MODEL.dropout=0.1")
    source = open_run(str(trained)).load_weights()

    def changed_in(weights: dict[str, Tensor]) -> set[str]:
        return {key for key in source if not torch.equal(weights[key], source[key])}

    head = train(data, tmp_path / "head", f"INIT={trained}", "FREEZE=body", *settings)
    last = newest_checkpoint(head / "checkpoints")
    for raw in (False, True):
        weights = open_run(str(last), raw=raw).load_weights()
        assert changed_in(weights) == {"head.weight", "head.bias"}
    entries = load_file(last / "optimizer.safetensors")
    moments = {entry.partition("/")[2] for entry in entries}
    assert moments == {"head.weight", "head.bias"}

    flags = ["--resume", str(last)]
    whole = train(data, tmp_path / "whole", *settings, "NUM_EPOCHS=3", flags=flags)
    tuned = open_run(str(whole), raw=True).load_weights()
    assert changed_in(tuned) == source.keys()
