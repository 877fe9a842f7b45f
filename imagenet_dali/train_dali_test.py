"""From the command line to a checkpoint that timm loads: shards, training on two processes, dry runs, mistakes."""

import json
import re
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file

from common.checkpoint.save import newest_checkpoint
from common.config.model_arguments import timm_arguments
from common.config.schema import Data
from common.errors import run_command
from common.hardware import instruction_set
from common.metrics.curves import read_metrics
from common.tools import evaluate
from imagenet_dali import train_dali
from imagenet_dali.task import build_eval_loader, open_images
from imagenet_dali.testing import MODEL, prepare_data, run, write_config

ROOT = Path(__file__).parent.parent
VIT_E = ("MODEL.width=1792", "MODEL.depth=56", "MODEL.heads=16", "MODEL.mlp_ratio=8.5715")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return prepare_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def config(tmp_path) -> Path:
    return write_config(tmp_path)


def timm_top1(checkpoint: Path, data: Path) -> tuple[int, int]:
    """Return (correct, samples) of timm's own model on the validation images, loaded strictly."""
    model = timm.models.vision_transformer.VisionTransformer(**timm_arguments(**MODEL)).eval()
    model.load_state_dict(load_file(checkpoint / "model.safetensors"), strict=True)
    reading = Data(root=str(data), loader="torchvision", workers=0).model_dump()
    loader = build_eval_loader(reading, 7, image_size=16, dp_rank=0, dp_size=1, device=torch.device("cpu"))
    correct = samples = 0
    with torch.no_grad():
        for images, labels in loader:
            correct += (model(images).argmax(1) == labels).sum().item()
            samples += (labels >= 0).sum().item()
    return correct, samples


@pytest.mark.slow
def test_the_small_server_command_trains_on_two_processes(config, data, tmp_path):
    """The command of vit-b16_4gpu.py, with two processes on the CPU."""
    command = f"python -m torch.distributed.launch --nproc_per_node 2 train_dali.py --world_size 2 --config {config}"
    answer = run(f"{command} --output {tmp_path}/run", DATA=str(data))
    assert "global batch 2 processes x 4 x 2 = 16" in answer.stdout
    records = read_metrics(tmp_path / "run")
    train, evaluations = ([r for r in records if r["kind"] == kind] for kind in ("train", "eval"))
    assert [r["step"] for r in train] == [2, 4, 6, 8, 10, 12]
    assert [(r["step"], r["epoch"]) for r in evaluations] == [(9, 3), (12, 4)]
    # linear: 3 steps up, then down to 0 after step 12; the record holds the rate that its step was made with
    assert [r["lr"] for r in train] == pytest.approx([1e-2 * x for x in (2 / 4, 1, 7 / 9, 5 / 9, 3 / 9, 1 / 9)])
    assert all(r["grad_norm"] > 0 and r["samples_per_s"] > 0 and 0 <= r["data_wait"] <= 1 for r in train)
    assert all(r["skipped"] == 0 for r in train)
    assert all(0 < r["mfu"] < 1 for r in train)
    assert train[-1]["loss"] < train[0]["loss"]

    last = evaluations[-1]
    checkpoint = newest_checkpoint(tmp_path / "run" / "checkpoints")
    assert checkpoint.name == "step-00000012"
    correct, samples = timm_top1(checkpoint, data)
    assert last["samples"] == samples == len(open_images(dict(root=data, loader="dali"), "validation"))
    assert last["top1"] == pytest.approx(correct / samples)
    assert last["top5"] == 1  # of 3 classes
    assert answer.stdout.splitlines()[-1] == f"top1={last['top1']:.4f}"
    assert {p.name for p in (tmp_path / "run").iterdir()} == {
        "config.json", "metrics.jsonl", "tensorboard", "loss.jpeg", ".lock", "acc.jpeg", "checkpoints",
        "loss.png", "acc.png"
    }  # fmt: skip
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (written["config"]["gradient_accumulation"], written["plan"]["gpus"]) == (2, 2)

    evaluate.main([str(checkpoint)])  # one process instead of two
    found = json.loads((tmp_path / "run" / "evaluation" / checkpoint.name / "evaluation.json").read_text())
    assert (found["top1"], found["top5"], found["samples"]) == (last["top1"], last["top5"], last["samples"])


def test_a_run_resumes_on_a_cpu_with_other_instructions(config, data, tmp_path, capsys, monkeypatch):
    """The recipe's fp16 names no dtype: bfloat16 where that is fast, else float32; the choice is recorded."""

    def train(is_fast: bool, *more: str) -> tuple[str, str]:
        monkeypatch.setattr("common.colossal.amp.is_fast", lambda _: is_fast)
        arguments = ["--config", str(config), "--output", str(tmp_path / "run"), *more]
        train_dali.main([*arguments, "--set", f"DATA.root={data}", "--set", "DATA.workers=0"])
        return capsys.readouterr()

    dry_run = train(False, "--dry-run").out
    assert f"precision              float32 on this CPU ({instruction_set()}), bfloat16 on GPUs\n" in dry_run
    keys = dry_run.partition("\n\n")[0].splitlines()
    assert len({re.match(r"\S+  +", line).end() for line in keys}) == 1
    assert re.search(r"\nmemory per GPU         \d\.\d\d MB at the peak: 0\.\d[1-9] weights, ", dry_run)
    assert "precision              bfloat16 on this CPU" in train(True, "--dry-run").out
    first = train(False, "--set", "MAX_STEPS=4").out
    assert first.count(f"\nfp16: AMP_TYPE.TORCH in float32: this CPU ({instruction_set()}) has no bfloat16") == 1
    assert "float32" not in train(True, "--set", "MAX_STEPS=8").err
    outputs = train(False), train(True, "--set", "NUM_EPOCHS=5")
    assert [out.count("from here on (was ") for out, _ in outputs] == [2, 2]  # and MAX_STEPS, NUM_EPOCHS
    assert "computing in float32 from here on (was bfloat16)\n" in outputs[0][0]
    assert "computing in bfloat16 from here on (was float32)\n" in outputs[1][0]
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert written["hardware"]["instruction_set"] == instruction_set()
    assert written["plan"]["dtype"] == "bfloat16"
    assert [start["dtype"] for start in written["starts"]] == ["float32", "bfloat16", "float32", "bfloat16"]
    slow = train(False, "--output", str(tmp_path / "slow"), "--set", "MAX_STEPS=1", "--set", "fp16.dtype='bfloat16'")
    assert "\nfp16: AMP_TYPE.TORCH in bfloat16: operations, by autocast\n" in slow.out
    assert slow.err.count("warning: fp16.dtype='bfloat16': this CPU") == 1


def test_dry_run_needs_no_data_and_prints_once(capsys, monkeypatch):
    monkeypatch.delenv("DATA", raising=False)
    for words, expected in (
        (["vit-b16.py"], ["8 GPUs x 256 x 16 = 32,768", "86.6 M"]),
        (
            ["vit-b16_4gpu.py", "--set", "OPTIMIZER.layer_decay=0.65"],
            [
                "4 GPUs x 256 x 32 = 32,768",
                "OPTIMIZER.layer_decay learning rate x 0.65^13 = 0.0037 (embeddings) to 1 (head)",
            ],
        ),
        (
            ["vit-b16", "--world_size=1", *(f"--set={each}" for each in VIT_E)],
            [
                "1 GPU = 1 data parallel",
                "does not fit in the usable 72 GB (90%) of a GPU with 80 GB: lower MICRO_BATCH_SIZE",
                "time 300 epochs of 1,281,167 images: ",
            ],
        ),
    ):
        train_dali.main(["--dry-run", "--config", *words])
        printed = capsys.readouterr().out
        assert max(map(len, printed.splitlines())) <= 80
        assert all(text in " ".join(printed.split()) for text in expected)
    place = dict(RANK="1", LOCAL_RANK="1", WORLD_SIZE="8", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    train_dali.main(["--config", "vit-b16", "--dry-run"])
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_dry_run_compares_the_modes_on_more_gpus_than_the_recipe_has_micro_batches(capsys, monkeypatch):
    monkeypatch.delenv("DATA", raising=False)
    train_dali.main(["--config", "vit-b16", "--dry-run", "--gpus", "512"])
    out = capsys.readouterr().out
    assert "512 GPUs x 64 x 1 = 32,768" in out
    for mode in ("data parallel", "1d 4", "2d 2 x 2", "2.5d 2 x 2 x 2", "3d 2 x 2 x 2"):
        assert f"\n{mode} " in out
    assert max(map(len, out.splitlines())) <= 80
    assert "fastest that fits: data parallel, " in out
    assert "TFLOP/s: 23% to " in out
    assert " minutes, without evaluation" in out


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["TOTAL_BATCH=1"], "TOTAL_BATCH: unknown key; did you mean 'TOTAL_BATCH_SIZE'?"),
        (["TOTAL_BATCH_SIZE=17"], "TOTAL_BATCH_SIZE=17 is not divisible by gradient_accumulation=2"),
        (["TOTAL_BATCH_SIZE=64"], "TOTAL_BATCH_SIZE=64 is more than the 53 training images"),
        (["WARMUP_EPOCHS=4"], "WARMUP_EPOCHS=4 must be less than NUM_EPOCHS=4"),
        (["MODEL.num_classes=2"], "MODEL.num_classes=2: the data set has labels 0 to 2"),
        (["TENSOR_PARALLEL_SIZE=2", "TENSOR_PARALLEL_MODE=1d"], "parallel.tensor.size=2 does not divide"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(config, data, tmp_path, capfd, settings, words):
    arguments = [word for setting in [f"DATA.root={data}", *settings] for word in ("--set", setting)]
    with pytest.raises(SystemExit) as exit_:
        run_command(train_dali.main, ["--config", str(config), "--output", str(tmp_path / "run"), *arguments])
    assert exit_.value.code == 2
    error = capfd.readouterr().err
    assert error.startswith("error: ")
    assert words in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_torchruns_own_lines_do_not_hide_a_mistake(config, tmp_path):
    """The launch script shows our line alone."""
    arguments = f"train_dali.py --config {config} --output {tmp_path}/run --set TOTAL_BATCH_SIZ=1"
    ours = "error: --set TOTAL_BATCH_SIZ: unknown key; did you mean 'TOTAL_BATCH_SIZE'?"
    answer = run(f"bash ../scripts/train_torchrun.sh {arguments}", code=2, NPROC_PER_NODE="2")
    assert answer.stderr.splitlines() == [ours]
