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
        train(
            tmp_path,
            "run",
            f"DATA.root={colours}",
            "DATA.workers=0",
            *settings,
            flags=flags,
        )
        return capsys.readouterr().out

    slow_plan = train_on(False, flags=["--dry-run"])
    assert "precision              float32 on this CPU" in slow_plan
    fast_plan = train_on(True, flags=["--dry-run"])
    assert "precision              bfloat16 on this CPU" in fast_plan
    lacks = f"\nfp16: AMP_TYPE.TORCH in float32: this CPU ({instruction_set()}) has no bfloat16"
    assert lacks in train_on(False, "MAX_STEPS=4")
    assert "computing in bfloat16 from here on (was float32)\n" in train_on(True, "MAX_STEPS=8")
    assert "computing in float32 from here on (was bfloat16)\n" in train_on(False)
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert written["plan"]["dtype"] == "float32"
    dtypes = [start["dtype"] for start in written["starts"]]
    assert dtypes == ["float32", "bfloat16", "float32"]


def test_dry_run_of_the_benchmarks_file_needs_no_data(tmp_path):
    """Its model is that of the script's recipe."""
    _, benchmarks_file = FILES["imagenet1k/vit_2p5d.py"]
    (tmp_path / "vit_2p5d.py").write_text(benchmarks_file)

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
        RANK="1",
        LOCAL_RANK="1",
        WORLD_SIZE="8",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",
    )
    assert run_forked(main, command, **other_rank) == ("", "")
    help_text = run_forked(main, [script, "--help"]).stdout
    assert "recipe is vit_s16_vanilla" in help_text


def printed_words(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the standard output as one line, however it was wrapped."""
    return " ".join(capsys.readouterr().out.split())


def test_every_data_set_has_its_own_evaluation(tmp_path, capsys):
    """From a folder of {train,Valid,test} and a test set of class folders that is prepared."""
    images = tmp_path / "images"
    tested = tmp_path / "testset"
    output = tmp_path / "run"
    other = tmp_path / "other"
    shards = tmp_path / "shards"
    counts = {
        images / "train": 48,
        images / "Valid": 9,
        images / "test": 15,
        tested: 30,
        other / "val": 8,
    }
    for number, (folder, count) in enumerate(counts.items()):
        write_colours(folder, count, height=20, width=24, kind="jpg", seed=number)
    train(tmp_path, "run", f"DATA.root={images}", *FOLDER)
    said = printed_words(capsys)
    assert "validation: Valid/; test is left out, prepare and evaluate take --split test" in said
    prepare.prepare(tested, shards, split="test")
    counted = f"test: the whole folder\n{shards}: 30 test images in 1 shard\n"
    assert counted in capsys.readouterr().out
    evaluations = [
        ("", f"{images}: 9 images, Valid/"),
        ("--split=test", f"{images}: 15 images, test/"),
        (f"--data={shards} --split=test", f"{shards}: 30 images, the prepared test split"),
        (f"--data={other}", f"{other}: 8 images, val/"),
    ]
    for flags, place in evaluations:
        evaluate.main([str(output), *flags.split()])
        printed = capsys.readouterr()
        assert f"data {place}" in " ".join(printed.out.split())
        assert "the run was trained on" not in printed.err
    found = {}
    for path in output.glob("evaluation/*/evaluation.json"):
        found[path.parent.name] = json.loads(path.read_text())
    samples = [found[name]["samples"] for name in sorted(found)]
    assert samples == [9, 15, 8, 30]
    assert found["step-00000001"]["top1"] == read_metrics(output)[-1]["top1"]


def test_the_folder_that_a_run_trained_on_is_evaluated_on_what_it_held_out(tmp_path, capsys):
    images = tmp_path / "images"
    output = tmp_path / "run"
    write_colours(images, 60, height=20, width=24, kind="jpg", seed=0)
    train(tmp_path, "run", f"DATA.root={images}", *FOLDER)
    capsys.readouterr()
    data_line = r"data \S+ \d+ images, .* held out"
    evaluate.main([str(output)])
    of_the_run = re.search(data_line, printed_words(capsys))
    evaluate.main([str(output), "--data", str(images)])
    of_the_folder = re.search(data_line, printed_words(capsys))
    assert of_the_run[0] == of_the_folder[0]


@pytest.mark.parametrize("trained_on", ["images/train", "shards"])
def test_images_that_a_run_was_trained_on_are_told(trained_on, tmp_path, capsys):
    """They lie in its data set, or in what that was prepared from."""
    images = tmp_path / "images" / "train"
    others = tmp_path / "images" / "val"
    write_colours(images, 60, height=20, width=24, kind="jpg", seed=60)
    write_colours(others, 10, height=20, width=24, kind="jpg", seed=10)
    prepare.prepare(tmp_path / "images", tmp_path / "shards")
    train(tmp_path, "run", f"DATA.root={tmp_path / trained_on}", *FOLDER)
    warning = f"warning: {images}: the run was trained on images of {images}\n"
    output = str(tmp_path / "run")
    capsys.readouterr()
    evaluate.main([output, "--data", str(images)])
    # Of the folder that it trained on, evaluate takes what was held out.
    assert (warning in capsys.readouterr().err) == (trained_on == "shards")
    predict.main([output, str(images)])
    assert warning in capsys.readouterr().err
    predict.main([output, str(others)])
    assert warning not in capsys.readouterr().err


def test_a_run_of_an_earlier_version_keeps_its_split(tmp_path):
    config = load_config("quickstart")
    del config["DATA"]["split"]
    config["MODEL"]["num_classes"] = 10
    written = json.dumps({"config": config}, default=str)
    (tmp_path / "config.json").write_text(written)
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
