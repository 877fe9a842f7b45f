"""The 15 config files of Colossal-AI's examples and benchmark, rebuilt from their values: what each
comes to here.
"""

from pathlib import Path

import pytest

from common.config.load import find_config, load_config, load_own_config
from common.config.plan import build_plan
from common.engine.upstream import AMP_TYPE
from common.errors import UserError
from common.task import find_task

SIZES = {
    "vanilla": (1, None),
    "1d": (2, "1d"),
    "2d": (4, "2d"),
    "2p5d": (4, "2.5d"),
    "3d": (8, "3d"),
}

IMAGENET = """
from colossalai.amp import AMP_TYPE
TOTAL_BATCH_SIZE = 4096
LEARNING_RATE = 3e-3
WEIGHT_DECAY = 0.3
{parallel}
NUM_EPOCHS = 300
WARMUP_EPOCHS = 32
fp16 = dict(mode=AMP_TYPE.TORCH, )
gradient_accumulation = 2
BATCH_SIZE = TOTAL_BATCH_SIZE // gradient_accumulation
clip_grad_norm = 1.0
LOG_PATH = f"./vit_{{TENSOR_PARALLEL_MODE}}_tp{{TENSOR_PARALLEL_SIZE}}_bs{{BATCH_SIZE}}_lr{{LEARNING_RATE}}/"
"""  # noqa: E501
CIFAR = """
BATCH_SIZE = 512
LEARNING_RATE = 2e-3
WEIGHT_DECAY = 3e-2
{parallel}
NUM_EPOCHS = 200
WARMUP_EPOCHS = 40
seed = 42
LOG_PATH = f"./vit_{{TENSOR_PARALLEL_MODE}}_cifar10_bs{{BATCH_SIZE}}_lr{{LEARNING_RATE}}/"
"""
AMP = "BATCH_SIZE = 128\nDROP_RATE = 0.1\nNUM_EPOCHS = 2\n{fp16}\nclip_grad_norm = 1.0\n"
DATA_PARALLEL = """
from colossalai.amp import AMP_TYPE
BATCH_SIZE = 256
DROP_RATE = 0.1
NUM_EPOCHS = 2
fp16 = dict(mode=AMP_TYPE.TORCH, )
gradient_accumulation = 16
clip_grad_norm = 1.0
dali = dict(gpu_aug=True, mixup_alpha=0.2)
"""


def parallel_lines(name: str) -> str:
    size, mode = SIZES[name]
    depth = "DEPTH = 1\n" if mode == "2.5d" else ""
    last = ", depth=DEPTH" if mode == "2.5d" else ""
    return (
        f"TENSOR_PARALLEL_SIZE = {size}\nTENSOR_PARALLEL_MODE = {mode!r}\n{depth}parallel = "
        "dict(\n    pipeline=1,\n"
        f"    tensor=dict(mode=TENSOR_PARALLEL_MODE, size=TENSOR_PARALLEL_SIZE{last}),\n)"
    )


CIFAR_1D = CIFAR.format(parallel=parallel_lines("1d"))
SCALED = (
    "fp16 = dict(mode=AMP_TYPE.NAIVE, initial_scale=8, growth_factor=4, hysteresis=2, "
    "num_losses=1, verbosity=0)\n"
)
SCALED += CIFAR_1D + "gradient_accumulation = 2\ndali = dict(root='/data')\n"
# name in the originals' repositories: the recipe of its task, the file
FILES = {"data_parallel/config.py": (find_task("imagenet_dali").recipe, DATA_PARALLEL)}
for name in SIZES:
    parallel = parallel_lines(name)
    FILES[f"imagenet1k/vit_{name}.py"] = "vit_s16_vanilla", IMAGENET.format(parallel=parallel)
    FILES[f"cifar/vit_{name}.py"] = (
        find_task("cifar10_benchmark").recipe,
        CIFAR.format(parallel=parallel),
    )
for mode in ("TORCH", "NAIVE", "APEX"):
    lines = f"from colossalai.amp import AMP_TYPE\nfp16 = dict(mode=AMP_TYPE.{mode})"
    FILES[f"amp/config_AMP_{mode.lower()}.py"] = (
        find_task("caltech101_amp").recipe,
        AMP.format(fp16=lines),
    )
FILES["amp/config_fp32.py"] = "config_fp32", AMP.format(fp16="")


def load(folder, text: str, base: str | None = None, *settings: str) -> dict:
    file = folder / "config.py"
    file.write_text(text)
    return load_config(str(file), settings, base)


# What the recipes' docstrings say that they change.
DECLARED = {
    "amp": {"NUM_EPOCHS"},
    "data_parallel": {"NUM_EPOCHS", "WARMUP_EPOCHS", "TOTAL_BATCH_SIZE", "gradient_accumulation"},
}


@pytest.mark.parametrize("name", FILES)
def test_our_recipe_of_the_same_name_is_the_same(name, tmp_path):
    base, text = FILES[name]
    folder, stem = name.removesuffix(".py").split("/")
    theirs = load(tmp_path, text, base)
    ours = load_config(
        "vit-b16" if stem == "config" else str(find_config(f"./configs/{stem}.py", base))
    )
    if ours["fp16"]:
        ours["fp16"].pop("opt_level", None)  # O1, which APEX means where no level is named
    differ = {key for key in theirs if theirs[key] != ours[key]}
    assert differ <= {"OUTPUT", "BATCH_SIZE", "GPUS", *DECLARED.get(folder, ())}


NOTES = """\
config.py: dali.mixup_alpha as MIXUP=0.2; dali.gpu_aug=True as nothing: DALI
    decodes on a GPU if there is one; DROP_RATE as MODEL.dropout=0.1; BATCH_SIZE
    as MICRO_BATCH_SIZE=256, per GPU; left out, so as in the recipe vit-b16:
    GPUS, WARMUP_EPOCHS, LR_SCHEDULE, LEARNING_RATE, WEIGHT_DECAY, OPTIMIZER,
    MODEL
config.py: fp16.initial_scale as fp16.init_scale=8; without effect here:
    fp16.hysteresis, fp16.num_losses, fp16.verbosity; seed as SEED=42; LOG_PATH
    as OUTPUT='./vit_1d_cifar10_bs512_lr0.002/'; dali.root as DATA.root='/data';
    BATCH_SIZE as TOTAL_BATCH_SIZE=1024, over all GPUs; left out, so as in the
    recipe vit_lite_vanilla: GPUS, LABEL_SMOOTHING, MODEL, DATA, GRAPHS, TF32
"""


def test_a_line_says_how_each_key_was_read(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    load(Path(), DATA_PARALLEL, "vit-b16")
    load(Path(), SCALED, "vit_lite_vanilla")
    assert capsys.readouterr().out == NOTES


def test_own_scripts_take_recipes_and_naives_options_and_are_checked(capsys):
    for recipe in ("quickstart", "dinov2_s14_finetune"):
        assert load_own_config(recipe) == load_config(recipe)
    with pytest.raises(UserError, match="^zero={'stage': 1} does not support torch_ddp="):
        load_own_config({"zero": {"stage": 1}, "torch_ddp": {"static_graph": True}})
    fp16 = dict(mode=AMP_TYPE.NAIVE, initial_scale=2**32)
    assert load_own_config({"fp16": fp16})["fp16"]["init_scale"] == 2**32
    assert capsys.readouterr().out == "config: fp16.initial_scale as fp16.init_scale=4294967296\n"
    settings = ["fp16.mode=AMP_TYPE.NAIVE", "fp16.initial_scale=8", "fp16.hysteresis=2"]
    assert load_config("quickstart", settings)["fp16"]["init_scale"] == 8


def test_settings_go_before_the_file_and_before_the_recipe(tmp_path):
    text = DATA_PARALLEL.replace("NUM_EPOCHS = 2", "")
    config = load(
        tmp_path, text, "vit-b16", "SEED=7", "MODEL.dropout=0.0", "NUM_EPOCHS=4", "MIXUP=0"
    )
    assert [config[key] for key in ("SEED", "NUM_EPOCHS", "WARMUP_EPOCHS", "MIXUP")] == [7, 4, 2, 0]
    assert config["MODEL"]["dropout"] == 0.0
    text = f"{CIFAR_1D}dali = dict(root='/data/x')\n"
    config = load(tmp_path, text, "vit_lite_vanilla", "BATCH_SIZE=64", "SEED=1")
    assert (config["TOTAL_BATCH_SIZE"], config["SEED"]) == (64, 1)
    assert (config["DATA"]["root"], config["DATA"]["std"][0]) == ("/data/x", 0.2023)
    config = load(tmp_path, DATA_PARALLEL, "vit-b16", "BATCH_SIZE=128")  # per GPU
    assert build_plan(config, 8, None).total_batch == 128 * 16 * 8


COMPLETE = "TOTAL_BATCH_SIZE = 8\nNUM_EPOCHS = 1\nLEARNING_RATE = 1.0\nMODEL = dict(depth=1)\n"


@pytest.mark.parametrize("text", [COMPLETE, "from configs.vit_s16_plain import *\n"])
def test_a_config_with_a_model_or_a_recipe_is_complete(tmp_path, capsys, text):
    assert load(tmp_path, text, "vit_s16_vanilla")["LABEL_SMOOTHING"] == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("lines", "words"),
    {
        "seed = 1\nSEED = 2": "seed=1 and SEED=2 are the same key: keep SEED",
        "HIDDEN_SIZE = 768": "unknown key HIDDEN_SIZE",
        "dali = dict(mixup=1)": "unknown key dali.mixup; did you mean 'MIXUP'",
        "DROP_RATE = 2": "MODEL.dropout=2: expected number >= 0 and < 1",
        "BATCH_SIZE = 'all'": "BATCH_SIZE='all': expected integer",
        "gradient_accumulation = '4'": "^gradient_accumulation='4': expected integer",
        "NUM_EPOCHS = LEARNING_RATE = 1\nDROP_RATE = 0.1\nMODEL = 'small'": (
            "MODEL='small': expected dict"
        ),
        "zero = dict(type='ZeroRedundancyOptimizer_Level_2')": (
            "unknown key zero.type; did you mean 'zero.stage'"
        ),
    }.items(),
)
def test_what_cannot_be_meant_is_refused(tmp_path, lines, words):
    with pytest.raises(UserError, match=words):
        load(tmp_path, f"BATCH_SIZE = 8\n{lines}\n", "vit_s16_vanilla")
