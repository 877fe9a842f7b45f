"""What a run prints when it starts, and refuses before it trains."""

import json
import os
import re
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch

from common.config.load import load_config
from common.config.plan import build_plan
from common.data.mixup import MixupLoss
from common.engine import amp
from common.engine.groups import shutdown
from common.errors import UserError
from common.planner.cluster import Cluster
from common.run.arguments import parse_arguments
from common.run.start_warnings import (
    explain_cpu,
    explain_cudnn,
    explain_rate,
    explain_sizes,
)
from common.task import data_root
from common.testing.commands import Ended, in_words, run_forked
from common.testing.ranks import run_ranks
from common.testing.simulated_gpu import simulate_gpu
from common.testing.tiny_task import train

TORCH = "fp16=dict(mode=AMP_TYPE.TORCH)"
STARTED = (  # no more samples a batch than there are, as --dry-run says
    "training and 45 evaluation images, 7 classes global batch 1 process x 14 x 1 = 14 10 "
    "steps, 5 per epoch; ends after 1 "
    "adamw, learning rate 0.002 after 0 steps of warm-up, then cosine to 0 "
    "FREEZE: 231 of 23,751 parameters are trained: the head fp16: float32 starting from the "
    "weights of "
)


def start(data: Path, output: Path, *settings: str) -> Ended:
    return run_forked(
        lambda words: train(data, output, "MAX_STEPS=1", f"OUTPUT={output}.unused", *words),
        settings,
    )


def test_the_first_lines_name_what_is_set_within_80_columns(data, tmp_path):
    settings = ("MODEL.num_classes=9", "EMA=0.99", "LOG.noise_scale=True")
    whole = start(data, tmp_path / "whole", *settings)
    init = f"INIT={tmp_path / 'whole'}"
    head = start(data, tmp_path / "head", init, "FREEZE=body", "MICRO_BATCH_SIZE=64")
    said = [
        "LOG.noise_scale: no effect: the noise scale needs several micro-batches in a step, this "
        "one has one: add --set gradient_accumulation=2",
        "EMA: evaluation uses averages over about 100 steps; evaluate.py --raw uses the weights",
        "warning: MODEL.num_classes=9 is more than the data set's 7 classes; None takes as many "
        "as it has",
    ]
    started = [STARTED, "a new head of 7 classes, not its 9"]
    longer = start(data, tmp_path / "whole", *settings, "MAX_STEPS=3")
    resumed = ["10 steps, 5 per epoch; ends after 3; 2 are left"]
    for ended, lines in ((whole, said), (head, started), (longer, resumed)):
        printed = [
            line for line in (ended.stdout + ended.stderr).splitlines() if str(tmp_path) not in line
        ]
        assert all(line in " ".join(" ".join(printed).split()) for line in lines)
        assert max(map(len, (line for line in printed if "loss=" not in line))) <= 80
    (first,) = json.loads((tmp_path / "head" / "config.json").read_text())["starts"]
    assert ": step-00000001); a new head" in first["init"]


def test_muon_on_weights_that_adamw_trained_is_warned_of_once(data, tmp_path):
    muon = "OPTIMIZER.name=muon"
    of_adamw, of_muon = (tmp_path / name for name in ("adamw", "muon"))
    start(data, of_adamw)
    init = f"INIT={of_adamw}"
    line = (
        f"warning: Muon fine-tunes weights of Adam or AdamW, as those of {of_adamw} may be, worse"
    )
    warned = start(data, of_muon, muon, init)
    assert " ".join(warned.stderr.split()).count(line) == 1
    for output, settings in {
        "muon": (muon, init, "MAX_STEPS=2"),  # resumed
        "same": (muon, f"INIT={of_muon}"),
        "head": (muon, init, "FREEZE=body"),
        "adam": (init,),
    }.items():
        assert "Muon" not in start(data, tmp_path / output, *settings).stderr


@pytest.mark.parametrize(
    ("settings", "is_warned"),
    [
        (["OPTIMIZER.name=muon"], True),
        (["OPTIMIZER=dict(name='muon')"], True),
        (["OPTIMIZER.name=muon", "LEARNING_RATE=6e-3"], False),
        (["OPTIMIZER.name=lamb"], False),
        (["OPTIMIZER.betas=(0.9, 0.95)"], False),
    ],
)
def test_another_optimizer_at_the_rate_of_the_configs_is_warned_of(settings, is_warned):
    args = parse_arguments(["--config=vit-b16", *in_words(*settings)], None)
    warning = explain_rate(args, load_config("vit-b16", settings), None)
    line = "warning: LEARNING_RATE=0.018 is the config's for lamb, not for muon: set it too"
    assert warning.startswith(line) == is_warned
    assert bool(warning) == is_warned


def train_alike(data: Path, output: Path, settings: list[str], lost: str) -> str:
    """Train on a copy of the data, which lacks ``lost`` on the second rank; return why not."""
    rank = int(os.environ["RANK"])
    own = Path(shutil.copytree(data, f"{output}.{rank}"))
    amp.is_fast = lambda dtype: rank == 0  # in this forked process
    if rank and lost:
        (own / lost).unlink()
    try:
        train(own, output, "MAX_STEPS=1", settings[rank])
    except UserError as error:
        return str(error)
    finally:
        shutdown()
    return ""


@pytest.mark.parametrize(
    ("settings", "lost", "words"),
    [
        (["DATA.workers=0", "DATA.workers=1"], "", ()),
        ([TORCH, TORCH], "", ("fp16.dtype=float32 (rank 0: bfloat16)",)),
        (["SEED=1", "SEED=2"], "train/red/04.png", ("data=69 images", "SEED=2 (rank 0: 1); all ")),
    ],
)
def test_all_ranks_run_the_same_or_none(data, tmp_path, settings, lost, words):
    for said in run_ranks(2, train_alike, data, tmp_path / "run", settings, lost):
        assert bool(said) == bool(words)
        assert all(word in said for word in words)
    assert (tmp_path / "run" / "config.json").exists() == (not words)


def test_it_says_how_long_a_step_takes_on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("common.model.flops.peak_flops", lambda device, dtype: 1e12)
    # 17.6 x 10^9 multiply-adds forward, as timm's table has them, 2 FLOPs each, times 3
    words = "training on the CPU; a step of 65,536 images takes at least 3,453 s"
    assert words in explain_cpu(load_config("vit-b16"), 65_536, 2)
    assert not explain_cpu(load_config("quickstart"), 128, 1)


@pytest.mark.parametrize(
    ("memory", "words"),
    {
        80e9: "",
        1.8e9: "warning: from epoch 3 on, 32 images of 224 pixels are expected to take 1.7 GB,",
        0.2e9: "warning: from epoch 1 on, 32 images of 64 pixels are expected to take ",
    }.items(),
)
def test_a_later_size_of_images_that_does_not_fit_is_said_at_the_start(memory, words):
    settings = "TOTAL_BATCH_SIZE=64", "MICRO_BATCH_SIZE=32", "IMAGE_SIZES=[(2, 64)]"
    config = load_config("vit_s16_vanilla", settings)
    plan = build_plan(config, 1, None)
    said = explain_sizes(config, plan, Cluster(memory=memory))
    assert said.startswith(words)
    assert (f" GB, too much for a GPU with {memory / 1e9:.1f} GB: lower" in said) == bool(words)


def test_a_start_on_a_gpu_says_so(data, tmp_path):
    def train_on_small_gpu(words: list[str]) -> None:
        simulate_gpu()
        properties = torch.cuda.get_device_properties()
        properties.total_memory = 500_000  # with 8 pixels the training fits
        train(data, tmp_path, *words)

    settings = "IMAGE_SIZES=[(1, 8)]", "COMPILE=False", "MAX_STEPS=1"
    said = run_forked(train_on_small_gpu, settings).stderr
    assert "from epoch 2 on, 14 images of 16 pixels are expected to take" in " ".join(said.split())


@pytest.mark.parametrize(
    ("loaded", "words"),
    [
        (91_002, "warning: cuDNN 9.10.2 is loaded, which computes attention wrongly at"),
        (RuntimeError("cuDNN version incompatibility"), "may be wrong: cuDNN version incompat"),
        (91_501, ""),
    ],
)
def test_a_cudnn_that_computes_attention_wrongly_is_said(loaded, words, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "version", mock.Mock(side_effect=[loaded]))
    assert not explain_cudnn()  # without a GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    said = explain_cudnn()
    assert words in said
    assert bool(words) == bool(said)


def test_what_this_machine_lacks_is_refused_by_a_start_only(data, tmp_path):
    huge = tmp_path / "run", "MODEL.width=65536", "MODEL.depth=20", "IMAGE_SIZES=[(2, 8)]"
    refused = run_forked(lambda flags: train(data, *huge, flags=flags), code=2)
    assert (refused.stderr.count("\n"), "GB here" in refused.stderr) == (1, True)
    shown = run_forked(lambda flags: train(data, *huge, flags=flags), ["--dry-run"]).words
    assert (
        "70 training, 45 evaluation images, 7 classes steps 5 per epoch x 2 = 10, 0 of warm-up"
        in shown
    )
    assert " does not fit in the usable 72 GB (90%) of a GPU with 80 GB: lower" in shown
    assert " 2 epochs of 70 images: " in shown
    assert " IMAGE_SIZES 8 pixels in all steps; evaluation at full size " in shown
    assert not (tmp_path / "run").exists()


def test_the_plan_of_several_batches_has_their_steps_and_bytes_in_80_columns(data, tmp_path):
    settings = ["TOTAL_BATCH_SIZE=32", "NUM_EPOCHS=4", "WARMUP_EPOCHS=1.5", "IMAGE_SIZES=[(1, 8)]"]

    def plan(flags: list[str], *batches: str) -> Ended:
        own = *settings, *batches, "MICRO_BATCH_SIZE=4"
        return run_forked(lambda argv: train(data, tmp_path / "run", *own, flags=argv), flags)

    listed = plan(["--dry-run", "--gpus", "4"], "BATCH_SIZES=[(2, 8)]")
    # 8 steps of 8 images in each of two epochs, then 2 of 32; a GPU sends as much in each
    rows = re.findall(r"^\|(.*)\|$", listed.stdout, re.MULTILINE)[2:5]
    cells = [[cell.strip() for cell in row.split("|")] for row in rows]
    assert [row[:5] for row in cells] == [
        ["1-1", "8", "8", "4x2x1", "8"],
        ["2-2", "16", "8", "4x2x1", "8"],
        ["3-4", "16", "32", "4x4x2", "4"],
    ]
    assert "\ntogether: 20 steps, " in listed.stdout
    assert "\nbatches of 8 throughout: 32 steps, " in listed.stdout
    assert "steps 20 of several batches, 12 of warm-up " in listed.words
    assert "times as fast as batches of 8 throughout, by GPUs: 1.0" in listed.words
    chosen = plan(["--dry-run"], "BATCH_SIZES=noise", "SMALLEST_BATCH=8")
    assert "BATCH_SIZES 8 images to epoch 4, or sooner up to 32 as the noise scale " in chosen.words
    rows = re.findall(r"^\| *each *\|(.*)\|$", chosen.stdout, re.MULTILINE)
    assert [row.split("|")[1].strip() for row in rows] == ["8", "16", "32"]
    for line in (listed.stdout + chosen.stdout).splitlines():
        assert len(line) <= 80 or line.startswith(("1d", "2d", "data parallel", "zero"))


@pytest.mark.parametrize(
    "settings",
    [
        ["MIXUP=0.2"],
        ["CUTMIX=0.2"],
        ["MODEL=dict(timm='test_resnet', image_size=32)"],
        # of 1 x 1 features at the smaller size alone
        ["MODEL=dict(timm='test_resnet', image_size=64)", "IMAGE_SIZES=[(1, 32)]"],
    ],
)
def test_what_needs_several_images_is_refused_with_micro_batches_of_one(settings, data, tmp_path):
    with pytest.raises(UserError, match=": a micro-batch is a single image; raise MICRO"):
        train(data, tmp_path / "run", "MICRO_BATCH_SIZE=1", *settings, flags=["--dry-run"])


def test_batch_norms_across_gpus_are_refused_on_a_cpu(data, tmp_path):
    synchronised = "MODEL=dict(timm='test_resnet', image_size=32, sync_bn=True)"
    with pytest.raises(UserError, match="^MODEL.sync_bn=True: torch's SyncBatchNorm needs GPUs"):
        train(data, tmp_path / "run", synchronised)
    train(data, tmp_path / "run", synchronised, flags=["--dry-run"])  # for another machine


def test_help_on_a_key_needs_no_config(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        parse_arguments(["--help-config", "fp16"], "")
    text = capsys.readouterr().out
    assert "fp16.dtype: compute dtype; `None`".replace("`", "") in text
    assert "MIXUP" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    {
        "--help-config Depth": "Depth: unknown key; did you mean 'MODEL.depth'",
        "--allow-change Depth": "Depth: unknown key; did you mean 'MODEL.depth'",
        "--resume run --profile 3": "--resume run: .* use --init",
        "--gpus 8": "--gpus has no effect without --dry-run",
        "--links 300 25": "--links has no effect without --dry-run",
    }.items(),
)
def test_what_is_refused(words, message):
    with pytest.raises(UserError, match=message):
        parse_arguments(["--config", "quickstart", *words.split()], "")


def test_out_of_memory_is_one_line_with_the_micro_batch_that_should_fit(data, tmp_path):
    def main(argv: list[str]) -> None:
        def fail(*_: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        MixupLoss.forward = fail
        settings = "TOTAL_BATCH_SIZE=32", "gradient_accumulation=2", "IMAGE_SIZES=[(1, 8, 32)]"
        train(data, tmp_path / "run", *settings)

    assert run_forked(main, code=2).stderr.splitlines()[-1] == (
        "error: out of memory with micro-batches of 16 images: lower those in IMAGE_SIZES; or "
        "--set MICRO_BATCH_SIZE=8 --set gradient_accumulation=4 "
        "is expected to fit, with the same batch (CUDA out of memory. Tried to allocate 2.00 GiB.)"
    )


def test_data_root_comes_from_the_config_else_from_the_environment(tmp_path, monkeypatch):
    def find(root, download=""):
        return data_root({"root": root, "download": False}, download)

    with pytest.raises(UserError, match="DATA.root is not set: .*=True fetches Digits"):
        find(None, "Digits")
    monkeypatch.setenv("DATA", str(tmp_path))
    with pytest.raises(UserError, match="is empty: .*DATA.download=True fetches Digits"):
        find(None, "Digits")
    (tmp_path / "train").mkdir()
    assert find(None) == str(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert find(f"~/{tmp_path.name}") == str(tmp_path)
    with pytest.raises(UserError, match="=/.*/absent is not a folder: .*scripts/prepare.py"):
        find("absent")
