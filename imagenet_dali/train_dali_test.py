"""From the command line to a run: dry runs, resumed runs, evaluation, mistakes."""

import json
import re
import runpy
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import pytest

from common.config.load import load_config
from common.config.originals_test import FILES
from common.hardware import instruction_set
from common.metrics.metrics_file import read_metrics
from common.run.prepare import choose_split
from common.shards import prepare
from common.testing.commands import in_words, run_forked
from common.testing.photographs import write_colours
from common.tools import evaluate, predict
from imagenet_dali.testing import run, train, write_config

FOLDER = "DATA.loader=torchvision", "DATA.workers=0", "MAX_STEPS=1"


def test_a_run_resumes_on_a_cpu_with_other_instructions(colours, tmp_path, capsys, monkeypatch):
    """The recipe's fp16 names no dtype: it is bfloat16 where that is fast, and recorded."""

    def train_on(is_fast: bool, *settings: str, flags: Sequence[str] = ()) -> str:
        monkeypatch.setattr("common.engine.amp.is_fast", lambda _: is_fast)
        place = f"DATA.root={colours}", "DATA.workers=0"
        train(tmp_path, "run", *place, *settings, flags=flags)
        return capsys.readouterr().out

    for is_fast, dtype in ((False, "float32"), (True, "bfloat16")):
        planned = train_on(is_fast, flags=["--dry-run"])
        assert f"precision              {dtype} on this CPU" in planned
    lacks = f"\nfp16: AMP_TYPE.TORCH in float32: this CPU ({instruction_set()}) has no bfloat16"
    assert lacks in train_on(False, "MAX_STEPS=4")
    assert "computing in bfloat16 from here on (was float32)\n" in train_on(True, "MAX_STEPS=8")
    assert "computing in float32 from here on (was bfloat16)\n" in train_on(False)
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert written["plan"]["dtype"] == "float32"
    assert [start["dtype"] for start in written["starts"]] == ["float32", "bfloat16", "float32"]


def test_dry_run_of_the_benchmarks_file_needs_no_data(tmp_path):
    """Its model is that of the script's recipe."""
    (tmp_path / "vit_2p5d.py").write_text(FILES["imagenet1k/vit_2p5d.py"][1])

    def main(argv: list[str]) -> None:
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")

    script = Path(__file__).with_name("train.py")
    command = [script, "--dry-run", "--config", tmp_path / "vit_2p5d.py"]
    command += in_words(f"DATA.root={tmp_path}/none")
    printed = run_forked(main, command).words
    assert "8 GPUs = 2 data parallel x 4 tensor parallel" in printed
    assert "times assume 1,281,167 images" in printed
    assert "22.1 M" in printed  # ViT-S/16 in arXiv 2012.12877, table 1
    other_rank = dict(
        RANK="1", LOCAL_RANK="1", WORLD_SIZE="8", MASTER_ADDR="127.0.0.1", MASTER_PORT="1"
    )
    assert run_forked(main, command, **other_rank) == ("", "")
    assert "recipe is vit_s16_vanilla" in run_forked(main, [script, "--help"]).stdout


def test_every_data_set_has_its_own_evaluation(tmp_path, capsys):
    """From a folder of {train,Valid,test} and a test set of class folders that is prepared."""
    images = tmp_path / "images"
    tested = tmp_path / "testset"
    output = tmp_path / "run"
    counts = {"train": 48, "Valid": 9, "test": 15, "../testset": 30, "../other/val": 8}
    for number, (folder, count) in enumerate(counts.items()):
        write_colours(images / folder, count, 20, 24, "jpg", seed=number)
    train(tmp_path, "run", f"DATA.root={images}", *FOLDER)
    said = " ".join(capsys.readouterr().out.split())
    assert "validation: Valid/; test is left out, prepare and evaluate take --split test" in said
    prepare.prepare(tested, tmp_path / "shards", split="test")
    counted = f"test: the whole folder\n{tmp_path}/shards: 30 test images in 1 shard\n"
    assert counted in capsys.readouterr().out
    test_split = f"{tmp_path}/shards: 30 images, the prepared test split"
    for more, place in (
        ([], f"{images}: 9 images, Valid/"),
        (["--split", "test"], f"{images}: 15 images, test/"),
        (["--data", str(tmp_path / "shards"), "--split", "test"], test_split),
        (["--data", str(tmp_path / "other")], f"{tmp_path}/other: 8 images, val/"),
    ):
        evaluate.main([str(output), *more])
        printed = capsys.readouterr()
        assert f"data {place}" in " ".join(printed.out.split())
        assert "the run was trained on" not in printed.err
    found = {}
    for path in output.glob("evaluation/*/evaluation.json"):
        found[path.parent.name] = json.loads(path.read_text())
    assert [found[name]["samples"] for name in sorted(found)] == [9, 15, 8, 30]
    assert found["step-00000001"]["top1"] == read_metrics(output)[-1]["top1"]


def test_the_folder_that_a_run_trained_on_is_evaluated_on_what_it_held_out(tmp_path, capsys):
    write_colours(tmp_path / "images", 60, 20, 24, "jpg", seed=0)
    train(tmp_path, "run", f"DATA.root={tmp_path}/images", *FOLDER)
    capsys.readouterr()
    data_lines = set()
    for more in ([], ["--data", f"{tmp_path}/images"]):
        evaluate.main([str(tmp_path / "run"), *more])
        said = " ".join(capsys.readouterr().out.split())
        data_lines.add(re.search(r"data \S+ \d+ images, .* held out", said)[0])
    assert len(data_lines) == 1


@pytest.mark.parametrize("trained_on", ["images/train", "shards"])
def test_images_that_a_run_was_trained_on_are_told(trained_on, tmp_path, capsys):
    """They lie in its data set, or in what that was prepared from."""
    for folder, count in (("train", 60), ("val", 10)):
        write_colours(tmp_path / "images" / folder, count, 20, 24, "jpg", seed=count)
    images = tmp_path / "images" / "train"
    prepare.prepare(tmp_path / "images", tmp_path / "shards")
    train(tmp_path, "run", f"DATA.root={tmp_path / trained_on}", *FOLDER)
    warning = f"warning: {images}: the run was trained on images of {images}\n"
    for command, words, expected in (
        (evaluate, ["--data", str(images)], trained_on == "shards"),
        (predict, [str(images)], True),
        (predict, [str(tmp_path / "images" / "val")], False),
    ):
        capsys.readouterr()
        command.main([str(tmp_path / "run"), *words])
        assert (warning in capsys.readouterr().err) == expected


def test_a_run_of_an_earlier_version_keeps_its_split(tmp_path):
    config = load_config("quickstart")
    del config["DATA"]["split"]
    config["MODEL"]["num_classes"] = 10
    (tmp_path / "config.json").write_text(json.dumps({"config": config}, default=str))
    now = load_config("quickstart")
    args = Namespace(output=tmp_path, resume="auto", config="")
    assert choose_split(args, now) == "counted"


@pytest.mark.slow
def test_torchruns_own_lines_do_not_hide_a_mistake(tmp_path):
    """The launch script shows our line alone, of the first rank."""
    arguments = f"train_dali.py --config {write_config(tmp_path)} --output {tmp_path}/run"
    command = f"bash ../scripts/train_torchrun.sh {arguments}"
    answer = run(command, code=2, NPROC_PER_NODE="2", DATA=f"{tmp_path}/none")
    assert re.fullmatch(f"error: DATA.root={tmp_path}/none is not .*\n", answer.stderr)
