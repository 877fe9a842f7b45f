"""Config files of others, and what recipes and plans come to, as a user starts them."""

import json
import re

import numpy as np
import pytest
import timm
import torch
import write_digits
from PIL import Image
from sklearn.datasets import load_digits

from caltech101_amp import train as train_caltech
from cifar10_benchmark import train as train_cifar10
from common.config.execute import CONFIGS
from common.config.load import load_config
from common.config.originals_test import FILES
from common.files import ROOT
from common.testing.commands import run_forked
from common.testing.photographs import write_colours
from imagenet_dali import train_dali

SMALL = (
    " --set MODEL.image_size=16 --set MODEL.patch_size=8 --set MODEL.width=32 --set MODEL.depth=1"
)
SMALL += " --set MODEL.heads=2 --set MODEL.num_classes=None"


def test_each_recipe_is_valid_and_gives_its_command():
    for path in CONFIGS.glob("[!_]*.py"):
        load_config(path.stem)
        text = path.read_text()
        assert "--config" in text or "bash scripts/" in text, path


def test_the_quickstarts_digits_are_scikit_learns(tmp_path):
    write_digits.main(str(tmp_path))
    digits = load_digits()
    assert len(list(tmp_path.glob("?/*.jpg"))) == 1797
    with Image.open(tmp_path / f"{digits.target[1796]}/1796.jpg") as image:
        shrunk = image.resize((8, 8), Image.Resampling.BOX)
    assert image.size == (32, 32)
    found = np.asarray(shrunk)[..., 0] * (16 / 255)
    difference = abs(found - digits.images[1796]).mean()
    assert difference == pytest.approx(0.762, abs=0.006)  # the enlargement's


def test_an_original_of_the_benchmark_trains_from_its_tasks_folder(tmp_path, monkeypatch):
    for split in ("train", "test"):
        write_colours(tmp_path / "data" / split, 32, 16, 16)
    text = FILES["cifar/vit_vanilla.py"][1].replace("BATCH_SIZE = 512", "BATCH_SIZE = 16")
    (tmp_path / "vit_vanilla.py").write_text(text.replace("./vit_", f"{tmp_path}/vit_"))
    monkeypatch.chdir(ROOT / "cifar10_benchmark")
    settings = f"--set DATA.root={tmp_path}/data --set MAX_STEPS=2{SMALL}"
    ended = run_forked(train_cifar10.main, f"--config {tmp_path}/vit_vanilla.py {settings}".split())
    assert "BATCH_SIZE as TOTAL_BATCH_SIZE=16, over all GPUs; left out" in ended.words
    assert ended.stdout.splitlines()[-1].startswith("top1=")
    saved = json.loads((tmp_path / "vit_None_cifar10_bs16_lr0.002" / "config.json").read_text())
    assert (saved["plan"]["total_batch"], saved["config"]["DATA"]["autoaugment"]) == (16, "cifar10")


@pytest.mark.parametrize(
    ("recipe", "name", "time"),
    [
        (
            "deit3_s16",
            "deit3_small_patch16_224",
            "800 epochs of 1,281,167 images: 14 hours (the host's limit)",
        ),
        ("deit3_l16", "deit3_large_patch16_224", "26-50 hours"),
        ("deit3_h14", "deit3_huge_patch14_224", "45-88 hours"),
        ("vit-b16", "vit_base_patch16_224", "5.1-7.2 hours (the lower is the host's limit)"),
    ],
)
def test_a_recipes_dry_run_is_of_timms_model_and_as_documented(recipe, name, time, capsys):
    train_dali.main(["--config", recipe, "--dry-run"])
    size = load_config(recipe)["MODEL"]["image_size"]
    with torch.device("meta"):
        count = sum(
            p.numel() for p in timm.create_model(name, img_size=size, num_classes=1000).parameters()
        )
    shown = " ".join(capsys.readouterr().out.split())
    assert f" {count:,} (" in shown
    assert f" {time}, on 8 H100" in shown
    assert torch.cuda.is_available() or " time here at least " in shown


# Of docs/parallel-modes.md's command, on a CPU with AVX512_BF16
DRY_RUN = """\
processes              16 GPUs = 16 data parallel x 1 tensor parallel
global batch           16 GPUs x 256 x 8 = 32,768
parameters             86,567,656 (86.6 M)
computation            105.4 GFLOP per image, forward and backward
precision              bfloat16 on this CPU (AVX512_BF16), bfloat16 on GPUs
data                   none (set DATA=... or DATA.root): steps are not counted,
                       times assume 1,281,167 images
memory per GPU         22.707 GB at the peak: 0.346 weights, 0.346 gradients,
                       0.693 optimizer, 20.922 activations and temporaries, 0.4
                       NCCL's buffers for 1 group; fits in the usable 36 GB
                       (90%) of a GPU with 40 GB
time                   300 epochs of 1,281,167 images: 6.7 hours, on 16 H100s

keys that are not at their defaults:
TOTAL_BATCH_SIZE       32768
MICRO_BATCH_SIZE       256
GPUS                   8
NUM_EPOCHS             300
WARMUP_EPOCHS          150.0
LEARNING_RATE          0.018
WEIGHT_DECAY           0.1
LR_SCHEDULE            'linear'
OPTIMIZER.name         'lamb'
MODEL.width            768
MODEL.heads            12
MODEL.num_classes      1000
MODEL.dropout          0.1
MIXUP                  0.2
fp16.mode              AMP_TYPE.TORCH
gradient_accumulation  8
clip_grad_norm         1.0

- A GPU trains 1,000 images/s (measured). A GPU with a shard of the model
  reaches the same fraction of its peak.
- A micro-batch takes at least 1 ms per block, the time to launch its kernels
  (assumed).
- A GPU sends 300 GB/s within its node of 4 and 25 GB/s beyond (--links); a
  collective takes at least 20 us. The slower time assumes no overlap of
  computation and communication.
- The host decodes and augments 3,000 images/s per GPU (--decode-images-per-s).
  A * marks steps that wait for it.
- Memory and bytes are counted, except NCCL's buffers: 0.4 GB for each group of
  GPUs (assumed). 90% of 40 GB is usable.
- batch: data parallel x micro-batch x accumulation; GB: memory of a GPU; sent
  GB: by a GPU in a step, within + between nodes.

| mode           |     batch |    GB |   sent GB |     step ms |      images/s |
| -------------- | --------: | ----: | --------: | ----------: | ------------: |
| data parallel  |  16x256x8 | 22.71 |    0+0.65 | 2,050-2,057 | 15,930-15,981 |
| 1d 2           |  8x256x16 | 15.54 | 59.8+0.31 | 2,273-2,280 | 14,375-14,414 |
| 1d 4           |  4x256x32 | 11.81 |  179+0.14 | 2,705-2,711 | 12,089-12,113 |
| 2d 2 x 2       |  4x256x32 |  7.44 |  162+0.13 | 2,990-2,995 | 10,941-10,961 |
| 2d 4 x 4       | 1x256x128 |  2.77 |  470+16.9 |       7,237 |         4,528 |
| 2.5d 2 x 2 x 2 |  2x256x64 |  5.64 |  165+2.36 | 3,428-3,432 |   9,548-9,558 |
| 3d 2 x 2 x 2   |  2x256x64 |  6.77 |  62.2+181 | 9,866-9,868 |         3,321 |

collectives in a step: data parallel: 1; 1d 2: 787; 1d 4: 1,571; 2d 2 x 2:
    20,132; 2d 4 x 4: 154,243; 2.5d 2 x 2 x 2: 40,261; 3d 2 x 2 x 2: 21,829

data parallel: this config
1d 2: --set TENSOR_PARALLEL_SIZE=2 --set TENSOR_PARALLEL_MODE=1d
1d 4: --set TENSOR_PARALLEL_SIZE=4 --set TENSOR_PARALLEL_MODE=1d
2d 2 x 2: --set TENSOR_PARALLEL_SIZE=4 --set TENSOR_PARALLEL_MODE=2d
2d 4 x 4: --set TENSOR_PARALLEL_SIZE=16 --set TENSOR_PARALLEL_MODE=2d
2.5d 2 x 2 x 2: --set TENSOR_PARALLEL_SIZE=8 --set TENSOR_PARALLEL_MODE=2.5d \
--set parallel.tensor.depth=2
3d 2 x 2 x 2: --set TENSOR_PARALLEL_SIZE=8 --set TENSOR_PARALLEL_MODE=3d

fastest that fits: data parallel, 15,930-15,981 images/s
300 epochs of 1,281,167 images: 6.7 hours, without evaluation
"""


def test_a_dry_run_prints_what_the_documentation_shows(capsys, monkeypatch):
    monkeypatch.setattr("common.engine.amp.is_fast", lambda _: True)
    monkeypatch.setattr("common.planner.dry_run.instruction_set", lambda: "AVX512_BF16")
    page = (ROOT / "docs" / "parallel-modes.md").read_text().replace("\\\n", "")
    train_dali.main(re.search("train_dali.py (.* --links .*)", page)[1].split())
    assert capsys.readouterr().out == DRY_RUN
    shown = re.search("```text\n([^`]+)```", page)[1]
    assert re.search(".*".join(map(re.escape, shown.split("[...]\n"))), DRY_RUN, re.DOTALL)
    page = (ROOT / "docs" / "recipes.md").read_text()
    train_dali.main(re.search("train_dali.py (.*--images-per-s .*)", page)[1].split())
    assert re.search("```text\n.*\n([^`]+)```", page)[1] in capsys.readouterr().out


def test_the_flags_of_a_row_start_the_run_that_the_row_describes(capsys):
    command = ["--config", "vit_s16_vanilla", "--dry-run", "--set=MODEL.depth=2"]
    train_dali.main([*command, "--gpus", "8"])
    lines = capsys.readouterr().out.splitlines()
    assert "- A GPU computes 198-396 TFLOP/s: 20%-40% of the peak of an H100 (assumed;" in lines
    assert max(len(line) for line in lines if line.startswith("|")) <= 80
    assert "- The host decodes and augments 2,600 images/s per GPU (assumed;" in lines
    for name in ("1d 2", "2.5d 2 x 2 x 2"):
        row = next(line.split("|")[2:] for line in lines if re.match(rf"\| {name} *\|", line))
        flags = next(line.removeprefix(name) for line in lines if line.startswith(f"{name}: "))
        train_dali.main([*command, "--set=GPUS=8", *flags.removeprefix(": ").split()])
        plan = capsys.readouterr().out
        batch, memory, *_ = (cell.strip() for cell in row)
        groups, micro, accumulation = batch.split("x")
        value = re.search(r"memory per GPU +([\d.]+) GB at the peak", plan)[1]
        assert f"{float(value):.2f}" == memory
        assert re.search(rf"{groups} groups? of \d GPUs x {micro} x {accumulation} = 4,096", plan)


def test_a_comparison_gives_the_time_of_the_config_and_of_the_fastest(capsys):
    sharded = "--set TENSOR_PARALLEL_SIZE=4 --set TENSOR_PARALLEL_MODE=2d"
    command = f"--config vit_lite_vanilla --dry-run --set MODEL.depth=2 --set GPUS=4 {sharded}"
    train_cifar10.main(command.split())
    alone = re.search(r"time +(200 epochs of .*), on 4", capsys.readouterr().out)[1]
    train_cifar10.main([*command.split(), "--gpus", "4"])
    compared = capsys.readouterr().out
    assert re.search(r"time +(200 epochs of .*), on 4", compared)[1] == alone
    assert f"{alone}, without evaluation" not in compared


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (
            "0.4644",  # 0.4 of it for NCCL
            r"^proc.* not fit in .* zero=dict\(stage=1\) or 3 .* 12.5 GB/s .* is decoded. .* not "
            r"fit \| \| .* fastest that fits: 1d 2",
        ),
        (
            "0.001",
            "90% of 0.001 GB .* no mode fits in the usable 0.0009 GB .90%. of a GPU with 0.001 GB$",
        ),
    ],
)
def test_a_dry_run_says_what_fits_and_what_is_fastest(memory, words, capsys):
    command = (
        f"--config vit_lite_vanilla --dry-run --gpus 2 --links 300 12.5 --gpu-memory {memory} "
        "--set MODEL.depth=2"
    )
    train_cifar10.main(command.split())
    assert re.search(words, " ".join(capsys.readouterr().out.split()))


def test_the_amp_examples_command_downloads_to_data_or_says_where_to_put_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "caltech101_amp.task.URL", "http://127.0.0.1:9/caltech-101.zip"
    )  # nobody listens there
    ended = run_forked(train_caltech.main, ["--config", "config/config_AMP_torch.py"], code=2)
    assert (
        "DATA.root is not set: ./data, to which Caltech-101 (137 MB) is downloaded" in ended.words
    )
    (line,) = ended.stderr.splitlines()
    assert line.endswith(
        f"; rerun the command, or download the file to {tmp_path}/data/caltech-101.zip"
    )
