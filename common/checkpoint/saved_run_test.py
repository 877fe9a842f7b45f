"""Opening a run: which checkpoint is used, and how anything else is refused."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from common.checkpoint.saved_run import open_run
from common.colossal import AMP_TYPE
from common.errors import UserError
from common.metrics.curves import read_metrics
from common.testing.tiny_task import NAMES, train
from common.tools import evaluate


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory) -> Path:
    return train(data, tmp_path_factory.mktemp("task") / "run", "fp16.mode=AMP_TYPE.TORCH", "MODEL.num_classes=8")


@pytest.fixture
def run(trained, tmp_path) -> Path:
    return shutil.copytree(trained, tmp_path / "run", symlinks=True)


def evaluated(run: Path, *flags: str) -> dict:
    evaluate.main([str(run), *flags])
    folder = f"step-00000010{''.join(flag[1:] for flag in flags)}"
    return json.loads((run / "evaluation" / folder / "evaluation.json").read_text())


def test_a_run_is_its_newest_checkpoint_unless_there_is_a_best(run):
    checkpoints = run / "checkpoints"
    (checkpoints / "best").unlink()
    shutil.copytree(checkpoints / "step-00000010", checkpoints / "step-00000004")
    (checkpoints / "step-00000011").mkdir()  # not complete
    assert open_run(str(run)).checkpoint == checkpoints / "step-00000010"
    (checkpoints / "best").symlink_to("step-00000004")
    for name in (run, checkpoints / "best", checkpoints / "step-00000004"):
        opened = open_run(str(name))
        assert (opened.checkpoint, opened.folder) == (checkpoints / "step-00000004", run)


def test_the_averages_are_used_unless_the_weights_themselves_are_asked_for(data, tmp_path):
    run = train(data, tmp_path / "run", "EMA=0.9")
    averaged, raw = open_run(str(run)), open_run(str(run), raw=True)
    assert averaged.chosen == "the best; moving average of the weights"
    for opened, file in ((averaged, "ema.safetensors"), (raw, "model.safetensors")):
        expected = load_file(opened.checkpoint / file)
        assert all(torch.equal(p, expected[name]) for name, p in opened.load_model().named_parameters())
    assert not torch.equal(averaged.load_weights()["head.weight"], raw.load_weights()["head.weight"])
    measured, last = evaluated(run), read_metrics(run)[-1]
    assert measured.items() >= {name: last[name] for name in ("top1", "top5", "samples")}.items()
    assert measured["loss"] == pytest.approx(last["loss"], rel=1e-6)
    assert measured["weights"] == "ema.safetensors"
    assert evaluated(run, "--raw")["loss"] != pytest.approx(last["loss"], rel=1e-4)  # in a folder of its own


def test_the_config_comes_back_as_it_was(trained):
    opened = open_run(str(trained), ["MICRO_BATCH_SIZE=5", "DATA.eval_crop=1.0"])
    assert opened.config["fp16"] == {"mode": AMP_TYPE.TORCH}
    assert opened.config["DATA"]["crop_scale"] == (0.08, 1.0)
    assert (opened.batch, opened.config["DATA"]["eval_crop"]) == (5, 1.0)
    assert open_run(str(trained)).batch == 14
    assert opened.class_names == [*NAMES, "7"]


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("../../config.json", "neither a run (it has no config.json) nor a checkpoint (no COMPLETE)"),
        ("COMPLETE", "no complete checkpoint in"),
    ],
)
def test_anything_else_is_refused(run, file, words):
    (run / "checkpoints" / "step-00000010" / file).unlink()
    with pytest.raises(UserError, match=re.escape(words)):
        open_run(str(run))
