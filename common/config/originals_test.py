"""The 15 config files of Colossal-AI's examples and benchmark, rebuilt from their values: what each comes to here."""

from pathlib import Path

import pytest

from common.config.load import find_config, load_config
from common.config.plan import build_plan
from common.errors import UserError

PAGE = Path(__file__).parents[2] / "docs" / "from-colossalai-examples.md"
SIZES = {"vanilla": (1, None), "1d": (2, "1d"), "2d": (4, "2d"), "2p5d": (4, "2.5d"), "3d": (8, "3d")}

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
"""
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
HYBRID = """
BATCH_SIZE = 256
IMG_SIZE = 224
PATCH_SIZE = 16
HIDDEN_SIZE = 768
DEPTH = 12
NUM_HEADS = 12
MLP_RATIO = 4
NUM_CLASSES = 1000
CHECKPOINT = True
SEQ_LENGTH = (IMG_SIZE // PATCH_SIZE) ** 2 + 1
SUMMA_DIM = 2
NUM_MICRO_BATCHES = 4
TENSOR_SHAPE = (BATCH_SIZE // NUM_MICRO_BATCHES, SEQ_LENGTH, HIDDEN_SIZE)
parallel = dict(pipeline={stages}, tensor=dict(mode={mode!r}, size={size}))
"""


def parallel_lines(name: str) -> str:
    size, mode = SIZES[name]
    depth = "DEPTH = 1\n" if mode == "2.5d" else ""
    last = ", depth=DEPTH" if mode == "2.5d" else ""
    return (
        f"TENSOR_PARALLEL_SIZE = {size}\nTENSOR_PARALLEL_MODE = {mode!r}\n{depth}parallel = dict(\n    pipeline=1,\n"
        f"    tensor=dict(mode=TENSOR_PARALLEL_MODE, size=TENSOR_PARALLEL_SIZE{last}),\n)"
    )


def fp16_lines(mode: str | None) -> str:
    return f"from colossalai.amp import AMP_TYPE\nfp16 = dict(mode=AMP_TYPE.{mode})" if mode else ""


# name in the originals' repositories: the task's script, its base, GPUs, the file
FILES: dict[str, tuple[str, str, int, str]] = {}
for name in SIZES:
    text = IMAGENET.format(parallel=parallel_lines(name))
    FILES[f"imagenet1k/vit_{name}.py"] = "imagenet_dali/train.py", "vit_s16_vanilla", 8, text
for name in SIZES:
    text = CIFAR.format(parallel=parallel_lines(name))
    FILES[f"cifar/vit_{name}.py"] = "cifar10_benchmark/train.py", "vit_lite_vanilla", 8, text
for name, mode in {"fp32": None, "AMP_torch": "TORCH", "AMP_naive": "NAIVE", "AMP_apex": "APEX"}.items():
    FILES[f"amp/config_{name}.py"] = "caltech101_amp/train.py", "config_fp32", 4, AMP.format(fp16=fp16_lines(mode))
FILES["data_parallel/config.py"] = "imagenet_dali/train_dali.py", "vit-b16", 8, DATA_PARALLEL
SHAPES = {(384, 16): "ViT-S/16", (768, 16): "ViT-B/16", (256, 4): "ViT-Lite-7/4"}


def describe(config: dict, gpus: int) -> list[str]:
    """Return the columns of the table: model, optimizer, batch, schedule, augmentation, loss, precision."""
    plan, model, data = build_plan(config, gpus, None), config["MODEL"], config["DATA"]
    optimizer = config["OPTIMIZER"]
    mode = config["parallel"]["tensor"]["mode"]
    cropped = f"crop with padding {data['crop_padding']}" if model["image_size"] == 32 else "random-resized crop"
    options = {"flip": data["flip"], "AutoAugment": data["autoaugment"], f"Mixup {config['MIXUP']}": config["MIXUP"]}
    augmentation = ", ".join([cropped, *[name for name, on in options.items() if on]])
    smoothing = config["LABEL_SMOOTHING"]
    precision = str(config["fp16"]["mode"]).removeprefix("AMP_TYPE.") if config["fp16"] else "float32"
    return [
        f"{SHAPES[model['width'], model['patch_size']]}, {model['image_size']} px, dropout {model['dropout']}",
        f"{optimizer['name']}, {config['LEARNING_RATE']}, weight decay {config['WEIGHT_DECAY']}",
        plan.batch_formula() + (f", {mode}" if mode else ""),
        f"{config['LR_SCHEDULE']}, warm-up {config['WARMUP_EPOCHS']:g} of {config['NUM_EPOCHS']} epochs",
        augmentation + (f", label smoothing {smoothing}" if smoothing else ""),
        precision + (f", clip {config['clip_grad_norm']}" if config["clip_grad_norm"] else ""),
    ]


def table(folder: Path) -> str:
    head = ["file", "script", "model", "optimizer, learning rate", "batch", "schedule", "augmentation", "precision"]
    rows = [head, ["---"] * len(head)]
    for name, (script, base, gpus, text) in FILES.items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        rows.append([f"`{name}`", f"`{script}`", *describe(load_config(str(file), [], base), gpus)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def load(folder: Path, text: str, base: str | None, *settings: str) -> dict:
    file = folder / "config.py"
    file.write_text(text)
    return load_config(str(file), settings, base)


def test_each_of_the_15_files_is_planned_as_the_page_says(tmp_path):
    assert len(FILES) == 15
    assert table(tmp_path) in PAGE.read_text()


@pytest.mark.parametrize("name", FILES)
def test_our_recipe_of_the_same_name_is_the_same(name, tmp_path):
    """But for how far they differ as the recipes' docstrings say."""
    _, base, gpus, text = FILES[name]
    stem = Path(name).stem
    theirs = load(tmp_path, text, base)
    ours = load_config("vit-b16" if stem == "config" else str(find_config(stem, base)))
    declared = {"NUM_EPOCHS"} if base in ("config_fp32", "vit-b16") else set()
    differ = {key for key in theirs if theirs[key] != ours[key]} - {"OUTPUT", "BATCH_SIZE", "GPUS"} - declared
    if base == "vit-b16":
        assert (theirs["WARMUP_EPOCHS"], ours["WARMUP_EPOCHS"]) == (1, 150)  # half of the epochs
        assert build_plan(theirs, gpus, None).total_batch == ours["TOTAL_BATCH_SIZE"] == 32768
        differ -= {"WARMUP_EPOCHS", "TOTAL_BATCH_SIZE", "gradient_accumulation"}
    if stem == "config_AMP_apex":  # O1 is what APEX means where no level is named
        assert ours["fp16"] == theirs["fp16"] | {"opt_level": "O1"}
        differ -= {"fp16"}
    assert not differ


def test_one_line_says_how_each_key_was_read(tmp_path, capsys):
    load(tmp_path, DATA_PARALLEL, "vit-b16")
    line = " ".join(capsys.readouterr().out.split())
    for words in (
        "DROP_RATE as MODEL.dropout=0.1",
        "BATCH_SIZE as MICRO_BATCH_SIZE=256, per GPU",
        "dali.mixup_alpha as MIXUP=0.2",
        "left out, so as in the recipe vit-b16: GPUS, WARMUP_EPOCHS, LR_SCHEDULE, LEARNING_RATE, ",
    ):
        assert words in line
    assert "MIXUP" not in line.partition("left out")[2]
    load(tmp_path, CIFAR.format(parallel=parallel_lines("1d")), "vit_lite_vanilla")
    line = " ".join(capsys.readouterr().out.split())
    assert "seed as SEED=42" in line
    assert "BATCH_SIZE as TOTAL_BATCH_SIZE=512, over all GPUs" in line
    assert "LOG_PATH as OUTPUT='./vit_1d_cifar10_bs512_lr0.002/'" in line


def test_settings_go_before_the_file_and_before_the_recipe(tmp_path):
    settings = "SEED=7", "MODEL.dropout=0.0", "NUM_EPOCHS=4", "MIXUP=0"
    config = load(tmp_path, DATA_PARALLEL, "vit-b16", *settings)
    assert [config[key] for key in ("SEED", "NUM_EPOCHS", "WARMUP_EPOCHS", "MIXUP")] == [7, 4, 2, 0]
    assert config["MODEL"]["dropout"] == 0.0
    config = load(tmp_path, CIFAR.format(parallel=parallel_lines("1d")), "vit_lite_vanilla", "BATCH_SIZE=64", "SEED=1")
    assert (config["TOTAL_BATCH_SIZE"], config["SEED"]) == (64, 1)
    config = load(tmp_path, DATA_PARALLEL, "vit-b16", "BATCH_SIZE=128")  # per GPU
    assert build_plan(config, 8, None).total_batch == 128 * 16 * 8


def test_the_models_keys_are_understood(tmp_path, capsys):
    config = load(tmp_path, HYBRID.format(stages=1, mode="1d", size=2), "vit_s16_vanilla")
    line = " ".join(capsys.readouterr().out.split()).replace("SEQ_LENGTH, ", "").replace("NUM_MICRO_BATCHES, ", "")
    assert "; TENSOR_SHAPE, SUMMA_DIM as nothing: no effect here; " in line
    names = ("image_size", "patch_size", "width", "depth", "heads", "mlp_ratio", "num_classes", "activation_checkpoint")
    assert [config["MODEL"][name] for name in names] == [224, 16, 768, 12, 12, 4, 1000, True]


def test_a_config_with_a_model_or_a_recipe_is_complete(tmp_path, capsys):
    lines = "TOTAL_BATCH_SIZE = 8\nNUM_EPOCHS = 1\nLEARNING_RATE = 1.0\nMODEL = dict(depth=1)\n"
    assert load(tmp_path, lines, "vit-b16")["MIXUP"] == 0
    # from which the base could not derive its own BATCH_SIZE
    assert load(tmp_path, lines, "vit_s16_vanilla", "gradient_accumulation=None")["MODEL"]["depth"] == 1
    assert load(tmp_path, "from configs.vit_s16_plain import *\n", "vit_s16_vanilla")["LABEL_SMOOTHING"] == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("stages", "mode", "size"), [(2, "1d", 2), (4, "2d", 4), (16, None, 1)])
def test_pipelines_are_refused_in_one_line(tmp_path, stages, mode, size):
    with pytest.raises(UserError, match=f"parallel.pipeline={stages}: pipeline parallelism is not supported"):
        load(tmp_path, HYBRID.format(stages=stages, mode=mode, size=size), "vit-b16")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("seed = 1\nSEED = 2", "seed=1 and SEED=2 are the same key: keep SEED"),
        ("dali = dict(mixup=1)", "unknown key dali.mixup: known are"),
        ("DROP_RATE = 2", "MODEL.dropout=2: expected number >= 0 and < 1"),
        ("BATCH_SIZE = 'all'", "BATCH_SIZE='all': expected integer"),
        ("NUM_EPOCHS = LEARNING_RATE = 1\nDROP_RATE = 0.1\nMODEL = 'small'", "MODEL='small': expected dict"),
        ("zero = dict(type='ZeroRedundancyOptimizer_Level_2')", "zero.stage=2: expected 1, 3"),
        ("zero = dict(model_config=dict(tensor_placement_policy='cpu'))", "offloading to the CPU is not supported"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path, lines, words):
    with pytest.raises(UserError, match=words):
        load(tmp_path, f"BATCH_SIZE = 8\n{lines}\n", "vit_s16_vanilla")


@pytest.mark.parametrize(
    ("lines", "stage"),
    [
        ("zero = dict(type='ZeroRedundancyOptimizer_Level_3')", 3),
        ("zero = dict(type='ZeroRedundancyOptimizer_Level_1')", 1),
        (
            "from colossalai.zero.shard_utils import TensorShardStrategy\n"
            "zero = dict(model_config=dict(shard_strategy=TensorShardStrategy()), optimizer_config=dict())",
            3,
        ),
    ],
)
def test_zero_is_read_as_its_stage(tmp_path, lines, stage):
    assert load(tmp_path, f"BATCH_SIZE = 8\n{lines}\n", "vit_s16_vanilla")["zero"] == {"stage": stage}


@pytest.mark.parametrize(
    ("name", "base", "recipe"),
    [
        ("configs/vit_vanilla.py", "vit_s16_vanilla", "vit_s16_vanilla"),
        ("configs/vit_2p5d.py", "vit_lite_vanilla", "vit_lite_2p5d"),
        ("vit_1d", "vit_lite_vanilla", "vit_lite_1d"),
        ("./config/config_AMP_naive.py", "config_fp32", "config_AMP_naive"),
        ("vit-b16.py", None, "vit-b16"),
        ("configs/vit-b16", None, "vit-b16"),
    ],
)
def test_a_recipe_is_found_by_each_of_its_names(name, base, recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config(name, base).stem == recipe
