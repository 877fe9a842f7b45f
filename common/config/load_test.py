from pathlib import Path

import pytest

from common.colossal import AMP_TYPE
from common.config.load import FOLDER, data_root, find_config, load_config, refuse_unused
from common.config.schema import describe_keys
from common.errors import UserError

MINIMAL = "TOTAL_BATCH_SIZE = 64\nNUM_EPOCHS = 10\nLEARNING_RATE = 1e-3\n"

# As printed in Colossal-AI's benchmark, which imports nothing.
BENCHMARK = """
TOTAL_BATCH_SIZE = 4096
LEARNING_RATE = 3e-3
WEIGHT_DECAY = 0.3

NUM_EPOCHS = 300
WARMUP_EPOCHS = 32

# data parallel only
TENSOR_PARALLEL_SIZE = 1
TENSOR_PARALLEL_MODE = None

# parallelism setting
parallel = dict(
    pipeline=1,
    tensor=dict(mode=TENSOR_PARALLEL_MODE, size=TENSOR_PARALLEL_SIZE),
)

fp16 = dict(mode=AMP_TYPE.TORCH, ) # amp setting

gradient_accumulation = 2 # accumulate 2 steps for gradient update

BATCH_SIZE = TOTAL_BATCH_SIZE // gradient_accumulation # actual batch size for dataloader

clip_grad_norm = 1.0 # clip gradient with norm 1.0
"""

MODES = {"1d": (2, "1d", {}), "2d": (4, "2d", {}), "2p5d": (4, "2.5d", {"depth": 1}), "3d": (8, "3d", {})}


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "config.py") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_the_benchmark_config_works_as_printed(write):
    config = load_config(write(BENCHMARK))
    assert config["fp16"] == {"mode": AMP_TYPE.TORCH}
    assert config["BATCH_SIZE"] == 2048
    assert config["parallel"] == {"pipeline": 1, "tensor": {"size": 1, "mode": None}}
    assert config["MODEL"]["image_size"] == 224  # a default


@pytest.mark.parametrize("path", ["colossalai.amp", "colossalai.legacy.amp"])
def test_amp_type_is_imported_under_its_old_and_new_path(write, path):
    config = load_config(write(f"from {path} import AMP_TYPE\n{MINIMAL}fp16 = dict(mode=AMP_TYPE.NAIVE)"))
    assert config["fp16"]["mode"] is AMP_TYPE.NAIVE


def test_what_the_file_derives_follows_a_setting(write):
    settings = ["gradient_accumulation=4", "TENSOR_PARALLEL_SIZE=2", "TENSOR_PARALLEL_MODE=1d"]
    config = load_config(write(BENCHMARK), settings)
    assert config["BATCH_SIZE"] == 1024
    assert config["parallel"]["tensor"] == {"mode": "1d", "size": 2}


def test_settings_reach_into_dicts_and_into_a_base_config(write):
    text = "from configs.vit_b16 import *\nNUM_EPOCHS = 400\n"
    config = load_config(write(text), ["MODEL.depth=2", "OPTIMIZER.variant=timm", "GPUS=2", "DATA.root=2012"])
    assert (config["MODEL"]["depth"], config["MODEL"]["width"]) == (2, 768)
    assert config["OPTIMIZER"] == {"name": "lamb", "variant": "timm"}
    assert (config["GPUS"], config["NUM_EPOCHS"], config["LEARNING_RATE"]) == (2, 400, 1.8e-2)
    assert config["DATA"]["root"] == "2012"
    assert load_config("vit-b16")["GPUS"] == 8  # nothing of the settings stays behind


@pytest.mark.parametrize("name", ["vit-b16", "vit-b16.py", "config/vit-b16.py", "configs/vit-b16"])
def test_a_recipe_is_found_by_each_of_its_names(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config(name) == FOLDER / "vit-b16.py"


def test_every_recipe_loads_and_says_how_to_run_it():
    for path in FOLDER.glob("*.py"):
        if path.stem != "__init__":
            load_config(path.stem)
            assert "--config" in path.read_text() or "bash scripts/" in path.read_text(), path


@pytest.mark.parametrize("recipe", ["vit_lite", "vit_s16"])
@pytest.mark.parametrize("mode", MODES)
def test_a_parallel_config_differs_from_vanilla_in_the_parallelism_alone(recipe, mode):
    vanilla, parallel = load_config(f"{recipe}_vanilla"), load_config(f"{recipe}_{mode}")
    keys = ("TENSOR_PARALLEL_SIZE", "TENSOR_PARALLEL_MODE", "parallel")
    assert {key for key in vanilla if vanilla[key] != parallel[key]} == set(keys)
    size, name, extra = MODES[mode]
    tensor = {"mode": name, "size": size, **extra}
    assert [parallel[key] for key in keys] == [size, name, {"pipeline": 1, "tensor": tensor}]


def test_the_two_tensor_parallel_keys_are_enough(write):
    config = load_config(write(MINIMAL), ["TENSOR_PARALLEL_SIZE=4", "TENSOR_PARALLEL_MODE=2.5d"])
    assert config["parallel"] == {"pipeline": 1, "tensor": {"size": 4, "mode": "2.5d", "depth": 1}}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["LERNING_RATE=1"], "unknown key; did you mean 'LEARNING_RATE'"),
        (["MODEL.widht=1"], "did you mean 'MODEL.width'"),
        (["LEARNING_RATE=fast"], "LEARNING_RATE='fast' is a str, not int or float"),
        (["NUM_EPOCHS=2.5"], "NUM_EPOCHS=2.5 is a float, not int"),
        (["NUM_EPOCHS=True"], "NUM_EPOCHS=True is a bool"),
        (["NUM_EPOCHS"], "write it as KEY=VALUE"),
        (["TOTAL_BATCH_SIZE=0"], "TOTAL_BATCH_SIZE=0 is less than 1"),
        (["LR_SCHEDULE=cosin"], "none of 'linear', 'cosine'; did you mean 'cosine'"),
        (["WARMUP_EPOCHS=10"], "WARMUP_EPOCHS=10 .* less than NUM_EPOCHS=10"),
        (["fp16.mode=AMP_TYPE.FAST"], "unknown mixed precision; known: APEX, TORCH, NAIVE"),
        (["parallel.pipeline=2"], "parallel.pipeline=2: pipeline parallelism is not supported"),
        (["TENSOR_PARALLEL_SIZE=2"], "size=2 needs parallel.tensor.mode"),
        (["TENSOR_PARALLEL_MODE=4d"], "none of None, '1d'"),
        (["TENSOR_PARALLEL_SIZE=5", "TENSOR_PARALLEL_MODE=2d"], "size=5 is not a square .* nearest that are: 4 or 9"),
        (["parallel.tensor=4"], "write it as dict"),
    ],
)
def test_a_wrong_setting_is_refused(write, settings, words):
    with pytest.raises(UserError, match=words):
        load_config(write(MINIMAL), settings)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (MINIMAL + "WARMUP_EPOCH = 1", "unknown key WARMUP_EPOCH; did you mean 'WARMUP_EPOCHS'"),
        ("NUM_EPOCHS = 1", "TOTAL_BATCH_SIZE is missing"),
        (MINIMAL + "SEED = 1 +", "SyntaxError"),
        (MINIMAL + "SEED = SEDE", "NameError"),
        ("from configs.vit_b17 import *", "No module named 'configs.vit_b17'"),
        (
            MINIMAL + "TENSOR_PARALLEL_SIZE = 2\nparallel = dict(tensor=dict(size=4, mode='2d'))",
            "TENSOR_PARALLEL_SIZE=2, .* contradict parallel.tensor",
        ),
    ],
)
def test_a_wrong_file_is_refused(write, text, words):
    with pytest.raises(UserError, match=words):
        load_config(write(text))


def test_a_missing_config_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'vit-b16'"):
        find_config("vit-b61")


def test_data_root_comes_from_the_config_else_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("DATA", raising=False)
    with pytest.raises(UserError, match="DATA.root is not set"):
        data_root({"DATA": {"root": None, "download": False}})
    monkeypatch.setenv("DATA", str(tmp_path))
    with pytest.raises(UserError, match="is empty"):
        data_root({"DATA": {"root": None, "download": False}})
    (tmp_path / "train").mkdir()
    assert data_root({"DATA": {"root": None, "download": False}}) == str(tmp_path)
    with pytest.raises(UserError, match="is not a folder"):
        data_root({"DATA": {"root": str(tmp_path / "absent"), "download": False}})
    # the task makes it
    assert data_root({"DATA": {"root": str(tmp_path / "absent"), "download": True}}) == str(tmp_path / "absent")


def test_a_key_that_a_task_does_not_read_is_refused_unless_it_is_left_alone():
    data = load_config("vit-b16", ["DATA.workers=3"])["DATA"]
    refuse_unused(data, ["crop_scale", "crop_padding"])
    with pytest.raises(UserError, match="DATA.workers=3 has no effect in this task: leave it out"):
        refuse_unused(data, ["crop_scale", "workers"])


def test_the_documentation_lists_the_keys_as_they_are():
    page = Path(__file__).parents[2] / "docs" / "config.md"
    assert describe_keys() in page.read_text()
