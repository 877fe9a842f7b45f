"""Starting from pretrained weights: ours and timm's, other classes and image sizes, every parallel
mode.
"""

import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import nn

from common.checkpoint.save import newest_checkpoint
from common.checkpoint.saved_run import open_run
from common.checkpoint.weights import load_pretrained, open_source
from common.errors import UserError
from common.metrics.metrics_file import read_metrics
from common.model.build import build_model, timm_arguments
from common.model.fit import infer_model
from common.testing.ranks import run_ranks
from common.testing.tiny_task import MODEL, train
from common.tools import evaluate, export

OTHER = MODEL | {"num_classes": 7}


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory) -> Path:
    return train(data, tmp_path_factory.mktemp("task") / "run", "EMA=0.9")


@pytest.fixture
def saved(tmp_path) -> Path:
    """A file with the weights of a model like `OTHER`, of 9 classes."""
    path = tmp_path / "weights.safetensors"
    torch.manual_seed(1)
    save_file(build_model(**OTHER | {"num_classes": 9}).state_dict(), path)
    return path


@pytest.mark.parametrize("size", [16, 32, 56])
@pytest.mark.parametrize("pool", ["cls", "avg"])
@pytest.mark.parametrize("position", ["learned", "sincos2d"])
@pytest.mark.parametrize(
    "parts", [{}, {"reg_tokens": 4}, {"reg_tokens": 4, "no_embed_class": True, "init_values": 0.1}]
)
def test_other_classes_and_another_size_are_timms(pool, position, size, parts, tmp_path):
    arguments = OTHER | {"pool": pool, "position": position, "image_size": 32, **parts}
    theirs = VisionTransformer(**timm_arguments(**arguments | {"num_classes": 9}))
    source = build_model(**arguments | {"num_classes": 9})
    theirs.load_state_dict(theirs.state_dict() | {"pos_embed": source.state_dict()["pos_embed"]})
    wrap, prefix = (torch.compile, "_orig_mod.") if parts else (nn.DataParallel, "module.")
    saved = {"model" if parts else "state_dict": wrap(theirs).state_dict()}
    torch.save(saved, tmp_path / "timm.pth")
    ours = build_model(**arguments | {"image_size": size})
    own_head, own_position = ours.head.weight.clone(), ours.pos_embed.clone()
    done = load_pretrained(ours, str(tmp_path / "timm.pth"))
    assert torch.equal(ours.head.weight, own_head)
    reference = VisionTransformer(**timm_arguments(**arguments | {"image_size": size})).eval()
    heads = {f"head.{name}": p for name, p in ours.head.state_dict().items()}
    reference.load_state_dict(checkpoint_filter_fn(theirs.state_dict(), reference) | heads)
    if position == "sincos2d":  # timm knows of no fixed table, and would resample it
        assert torch.equal(ours.pos_embed, own_position)
        reference.pos_embed.data.copy_(own_position)
    images = torch.randn(3, 3, size, size)
    torch.testing.assert_close(ours.eval()(images), reference(images))
    expected = f"; position embedding resampled to {size // 8} x {size // 8} patches from 4 x 4" * (
        size != 32
    )
    expected = "; fixed positions in place of its" if position == "sincos2d" else expected
    heads = "MODEL.heads=2, which the weights do not tell; a new head of 7 classes, not its 9"
    start = f"starting from the weights of {tmp_path}/timm.pth (names without {prefix})"
    assert done == f"{start}; {heads}{expected}"


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
    saved = open_source(path).weights["head.weight"]
    model = build_model(**OTHER | {"num_classes": len(names.split())})
    own = model.head.weight.clone()
    assert said in load_pretrained(model, path, names.split(), option)
    expected = own if rows == "-" else saved[[*map(int, rows.split())]]
    assert torch.equal(model.head.weight, expected)


def test_an_order_is_refused_where_it_has_no_effect(trained, data, tmp_path):
    flags = ["--class-order", "timm", "--dry-run"]
    with pytest.raises(UserError, match="timm: only --init's weights have classes to name"):
        train(data, tmp_path / "run", flags=flags)
    with pytest.raises(UserError, match="--class-order timm: the model names its classes"):
        train(data, tmp_path / "run", f"INIT={trained}", flags=flags)


def test_hidden_channels_survive_the_rounding_of_their_ratio():
    arguments = OTHER | {"width": 176, "mlp_ratio": 240.5 / 176, "reg_tokens": 8}
    weights = build_model(**arguments).state_dict()  # int(176 * (240 / 176)) is 239
    assert int(176 * infer_model(weights)["mlp_ratio"]) == 240


def test_of_a_convolutional_stem_positions_are_resampled_and_heads_compared(tmp_path):
    arguments = OTHER | {"stem": "conv"}
    save_file(build_model(**arguments).state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"config": {"MODEL": {"heads": 2}}}')
    assert "resampled to 4 x 4" in load_pretrained(
        build_model(**arguments | {"image_size": 32}), str(tmp_path)
    )
    with pytest.raises(UserError, match="--set MODEL.heads=2 fits"):
        load_pretrained(build_model(**arguments | {"heads": 4}), str(tmp_path))


def test_a_run_a_checkpoint_a_file_and_exports_give_the_averaged_weights_and_heads(
    trained, tmp_path
):
    for target in ("timm", "safetensors"):
        export.main([str(trained), "--to", target, "--output", str(tmp_path / target)])
    shutil.copy(tmp_path / "safetensors" / "model.safetensors", tmp_path / "alone.safetensors")
    checkpoint = newest_checkpoint(trained / "checkpoints")
    expected = load_file(checkpoint / "ema.safetensors")
    assert open_run(str(trained), raw=True).weights == "model.safetensors"
    files = (checkpoint / "ema.safetensors", tmp_path / "timm", tmp_path / "alone.safetensors")
    for source in (trained, checkpoint, *files):
        model = build_model(**OTHER)
        chosen = (
            f" (the best; moving average of the weights: {checkpoint.name})"
            if source == trained
            else ""
        )
        assert (
            load_pretrained(model, str(source)) == f"starting from the weights of {source}{chosen}"
        )
        assert all(torch.equal(p, expected[name]) for name, p in model.named_parameters())
        with pytest.raises(UserError, match="differs from MODEL.heads=4: --set MODEL.heads=2 fits"):
            load_pretrained(build_model(**OTHER | {"heads": 4}), str(source))


@pytest.mark.parametrize(("gpus", "mode"), [(2, None), (2, "1d"), (4, "2d")])
def test_every_mode_starts_from_the_same(trained, data, gpus, mode, tmp_path):
    """At a learning rate of 0, the evaluation after a step is that of the initial weights."""
    parallel = [f"TENSOR_PARALLEL_SIZE={gpus}", f"TENSOR_PARALLEL_MODE={mode}"] if mode else []
    settings = [f"INIT={trained}", "LEARNING_RATE=1e-50", "MAX_STEPS=1", *parallel]
    run_ranks(gpus, train, data, tmp_path / "run", *settings)
    found, expected = read_metrics(tmp_path / "run")[-1], read_metrics(trained)[-1]
    assert found["top1"] == expected["top1"]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    evaluate.main([str(tmp_path / "run")])  # in one process


def test_the_head_alone_is_trained_and_then_the_whole(trained, data, tmp_path):
    settings = ("EMA=0.9", "MODEL.dropout=0.1")
    train(data, tmp_path / "run", f"INIT={trained}", "FREEZE=body", *settings)
    source = load_file(newest_checkpoint(trained / "checkpoints") / "ema.safetensors")
    last = newest_checkpoint(tmp_path / "run" / "checkpoints")
    for file in ("model.safetensors", "ema.safetensors"):
        changed = {
            name
            for name, tensor in load_file(last / file).items()
            if not torch.equal(tensor, source[name])
        }
        assert changed == {"head.weight", "head.bias"}
    moments = {
        f"{key}/head.{name}"
        for key in ("step", "exp_avg", "exp_avg_sq")
        for name in ("weight", "bias")
    }
    assert load_file(last / "optimizer.safetensors").keys() == moments
    train(data, tmp_path / "tuned", *settings, "NUM_EPOCHS=3", flags=["--resume", str(last)])
    tuned = load_file(newest_checkpoint(tmp_path / "tuned" / "checkpoints") / "model.safetensors")
    assert not any(torch.equal(tensor, source[name]) for name, tensor in tuned.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"mlp_ratio": 3, "reg_tokens": 2, "init_values": 1e-6, "no_embed_class": True},
            "from MODEL.mlp_ratio=3.0, MODEL.no_embed_class=True, MODEL.reg_tokens=2, "
            "MODEL.init_values=1e-06: "
            "--set MODEL.mlp_ratio=2.0 --set MODEL.no_embed_class=False --set MODEL.reg_tokens=0 "
            "--set MODEL.init_values=None fits",
        ),
        (
            {"image_size": 28, "patch_size": 7, "width": 48, "heads": 3, "position": "sincos2d"},
            "from MODEL.patch_size=7, MODEL.width=48: --set MODEL.patch_size=8 --set "
            "MODEL.width=32 fits",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(saved, change, message):
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
    for name, words in {
        "code.pth": "not by torch.save, or more than tensors",
        "short.safetensors": "holds no weights that can be read",
        "empty": "holds no weights that can be read \\(No such file",
        "other.pth": "is no state_dict",
        "none.pth": r"holds no weights that can be read \(\[Errno 2\] No such file",
    }.items():
        with pytest.raises(UserError, match=f"{tmp_path / name}: .*{words}") as raised:
            open_source(str(tmp_path / name))
        assert "\n" not in str(raised.value)
