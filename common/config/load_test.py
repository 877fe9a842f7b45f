import json
import re
from pathlib import Path

import pytest
from annotated_types import Ge, Le

from common.colossal import AMP_TYPE
from common.config.load import FOLDER, data_root, find_config, load_config, refuse_unused, restore_config
from common.config.originals_test import IMAGENET, parallel_lines
from common.config.schema import all_keys, keys_as_markdown
from common.errors import UserError

ROOT = Path(__file__).parents[2]
MINIMAL = "TOTAL_BATCH_SIZE = 64\nNUM_EPOCHS = 10\nLEARNING_RATE = 1e-3\n"

# Colossal-AI's benchmark prints it without an import.
BENCHMARK = IMAGENET.format(parallel=parallel_lines("vanilla")).replace("from colossalai.amp import AMP_TYPE\n", "")
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
    config = load_config(write(BENCHMARK), ["MICRO_BATCH_SIZE=64"])
    assert (config["MICRO_BATCH_SIZE"], config["gradient_accumulation"], config["BATCH_SIZE"]) == (64, None, None)
    config = load_config(write(MINIMAL + "MICRO_BATCH_SIZE = 64\n"), ["gradient_accumulation=4"])
    assert (config["MICRO_BATCH_SIZE"], config["gradient_accumulation"]) == (None, 4)
    text = MINIMAL.replace("64", "None") + "MICRO_BATCH_SIZE = 64\ngradient_accumulation = 4\n"  # which make the total
    for setting, both in {"gradient_accumulation=2": (64, 2), "MICRO_BATCH_SIZE=32": (32, 4)}.items():
        config = load_config(write(text), [setting])
        assert (config["MICRO_BATCH_SIZE"], config["gradient_accumulation"]) == both


def test_settings_reach_into_dicts_and_into_a_base_config(write):
    text = "from configs.vit_b16 import *\nNUM_EPOCHS = 400\n"
    config = load_config(write(text), ["MODEL.depth=2", "OPTIMIZER.variant=timm", "GPUS=2", "DATA.root=2012"])
    assert (config["MODEL"]["depth"], config["MODEL"]["width"]) == (2, 768)
    assert config["OPTIMIZER"] == {"name": "lamb", "variant": "timm"}
    assert (config["GPUS"], config["NUM_EPOCHS"], config["LEARNING_RATE"]) == (2, 400, 1.8e-2)
    assert config["DATA"]["root"] == "2012"
    assert load_config("vit-b16")["GPUS"] == 8  # nothing of the settings stays behind


@pytest.mark.parametrize("text", ["from configs.vit_b16 import *\n", "LEARNING_RATE = 0.1\n"])
@pytest.mark.parametrize(("more", "settings"), [("NUM_EPOCHS = '3'\n", []), ("", ["NUM_EPOCHS='3'"])])
def test_a_wrong_value_is_named_and_not_the_recipe_that_derives_from_it(write, text, more, settings):
    with pytest.raises(UserError, match="^NUM_EPOCHS='3': expected integer >= 1 .epochs.$"):
        load_config(write(text + more), settings, base="vit-b16")


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


OWN = {
    "TOTAL_BATCH_SIZE = 512": dict(TOTAL_BATCH_SIZE=512, BATCH_SIZE=256),
    "gradient_accumulation = 4": dict(gradient_accumulation=4, BATCH_SIZE=1024, TOTAL_BATCH_SIZE=4096),
    "TENSOR_PARALLEL_SIZE = 2\nTENSOR_PARALLEL_MODE = '1d'": dict(
        parallel={"pipeline": 1, "tensor": {"mode": "1d", "size": 2}}, BATCH_SIZE=2048
    ),
    # what changes the value it found is applied once
    "LEARNING_RATE = LEARNING_RATE * 2": dict(LEARNING_RATE=6e-3),
    "LEARNING_RATE *= 2": dict(LEARNING_RATE=6e-3),
    "_lr = LEARNING_RATE\nLEARNING_RATE = 2 * _lr\nNUM_EPOCHS += 1": dict(LEARNING_RATE=6e-3, NUM_EPOCHS=301),
    "OPTIMIZER = dict(name='lamb', variant='apex')": dict(OPTIMIZER={"name": "lamb", "variant": "apex"}),
}


@pytest.mark.parametrize("lines", OWN)
def test_what_a_base_config_derives_follows_the_config_that_imports_it(write, lines):
    config = load_config(write(f"from configs.vit_s16_vanilla import *\n{lines}\n"))
    base = load_config("vit_s16_vanilla")
    changed = {key: value for key, value in config.items() if value != base[key]}
    assert {key: config[key] for key in OWN[lines]} == OWN[lines]
    assert changed.keys() <= {*OWN[lines], "TENSOR_PARALLEL_SIZE", "TENSOR_PARALLEL_MODE"}


def test_dicts_of_a_base_config_can_be_changed_in_place_and_a_setting_goes_before(write):
    text = "from configs.vit_s16_1d import *\nMODEL['depth'] *= 2\nTOTAL_BATCH_SIZE = 512\n"
    config = load_config(write(text), ["gradient_accumulation=8"])
    assert (config["MODEL"]["depth"], config["BATCH_SIZE"]) == (24, 64)
    assert config["parallel"]["tensor"] == {"mode": "1d", "size": 2}
    assert load_config(write(text), ["TOTAL_BATCH_SIZE=64"])["BATCH_SIZE"] == 32


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["LERNING_RATE=1"], "unknown key; did you mean 'LEARNING_RATE'"),
        (["MODEL.widht=1"], "did you mean 'MODEL.width'"),
        (["LEARNING_RATE=fast"], "^LEARNING_RATE='fast': expected number > 0$"),
        (["NUM_EPOCHS=True"], "NUM_EPOCHS=True: expected integer >= 1"),
        (["NUM_EPOCHS"], "write it as KEY=VALUE"),
        (["LR_SCHEDULE=cosin"], "LR_SCHEDULE='cosin': expected 'linear', 'cosine'$"),
        (["LABEL_SMOOTHING=0.1", "BCE_THRESHOLD=0"], "BCE_THRESHOLD=0.* undoes LABEL_SMOOTHING=0.1: set"),
        (
            ["DATA.crop=simple", "DATA.crop_scale=(0.5, 1.0)"],
            r"crop_scale=\(0.5, 1.0\) has no effect with crop=.simple",
        ),
        (["WARMUP_EPOCHS=10"], "WARMUP_EPOCHS=10 .* less than NUM_EPOCHS=10"),
        (["fp16.mode=AMP_TYPE.FAST"], "expected AMP_TYPE.APEX, AMP_TYPE.TORCH, AMP_TYPE.NAIVE or None"),
        (["parallel.pipeline=2"], "parallel.pipeline=2: pipeline parallelism is not supported"),
        (["TENSOR_PARALLEL_SIZE=2"], "size=2 needs parallel.tensor.mode"),
        (["TENSOR_PARALLEL_SIZE=2", "TENSOR_PARALLEL_MODE=1d", "COMPILE=True"], "COMPILE=True does not support tensor"),
        (["TENSOR_PARALLEL_MODE=4d"], "TENSOR_PARALLEL_MODE='4d': expected None, '1d'"),
        (["TENSOR_PARALLEL_SIZE=5", "TENSOR_PARALLEL_MODE=2d"], "size=5 is not a square .* nearest: 4 or 9"),
        (["parallel.tensor=4"], r"parallel.tensor=4: expected dict\(size=..., mode=..., depth=...\)"),
        (["MODEL.heads=5"], "MODEL.width=384 is not a multiple of heads=5; the nearest that are: 380 or 385"),
        (
            ["OPTIMIZER.name=sgd", "OPTIMIZER.betas=(0.9,0.9)"],
            "OPTIMIZER.betas has no effect with name=sgd, which takes mom",
        ),
        (["fp16=dict(mode=AMP_TYPE.TORCH, opt_level='O2')"], "fp16.opt_level has no effect with mode=AMP_TYPE.TORCH"),
        (["fp16.dtype=float16"], "fp16.dtype has no effect with mode=None: set mode to one of AMP_TYPE$"),
        (["fp16.scale=3"], "--set fp16.scale: unknown key"),
        (["gradient_handler=[]"], r"gradient_handler=\[\]: expected None or .dict"),  # no rank would get the others'
        (["gradient_handler=[5]"], "None or .dict.type='DataParallelGradientHandler'..$"),
        # what no computation could use: not finite, of another length, of another type inside
        (["TIMEOUT=1e999"], r"TIMEOUT=inf: expected number >= 1 and <= 10000000 \(seconds\)$"),
        (
            ["DATA.crop_scale=(0.5, 0.1)"],
            r"\(0.5, 0.1\): expected \(low, high\), 0 < low <= high <= 1$",
        ),
        (["DATA.crop_scale=()"], r"DATA.crop_scale=\(\): expected \(low, high\)"),
        (["DATA.mean=(1, 2)"], r"DATA.mean=\(1, 2\): expected \(R, G, B\)$"),
        (["DATA.std=(1,0,1)"], r"expected \(R, G, B\), each >= 1e-6$"),
        (["LEARNING_RATE=0"], "LEARNING_RATE=0: expected number > 0$"),
        (["DATA.randaugment=(2,11)"], "expected None or .operations >= 1, magnitude from 0 to 10"),
        (["OPTIMIZER.name=lamb", "OPTIMIZER.trust_range=(1, 0)"], "OPTIMIZER.trust_range=.1, 0.: expected .low, high"),
        (["CHECKPOINT_EVERY=10 s"], "CHECKPOINT_EVERY='10 s': expected optimizer steps, as 500, or minutes"),
    ],
)
def test_a_wrong_setting_is_refused(write, settings, words):
    with pytest.raises(UserError, match=words):
        load_config(write(MINIMAL), settings)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (MINIMAL + "WARMUP_EPOCH = 1\nWARMUP_EPOCHS = WARMUP_EPOCH", "unknown key WARMUP_EPOCH; did you mean"),
        (MINIMAL + "lr = 1\nWAY_OFF = 2", "unknown key lr; did you mean 'LEARNING_RATE'"),
        ("from configs.vit_s16_vanila import *", "line 1: no recipe .*; did you mean 'configs.vit_s16_vanilla'"),
        ("from configs.vit_b16 import MODLE", "line 1: configs.vit_b16 has no MODLE"),
        (
            "from configs.vit_b16 import *\nNUM_EPOCHS *= 2",
            "line 1: configs.vit_b16 derives other keys from NUM_EPOCHS: a",
        ),
        (
            "from configs.vit_b16 import *\nWARMUP_EPOCHS = NUM_EPOCHS\nNUM_EPOCHS = 4",
            "derives other keys from NUM_EPOCHS",
        ),
        ("from configs.quickstart import *\nwith open('/dev/null') as f: pass", "unknown key f"),
        ("NUM_EPOCHS = 1", "config.py: LEARNING_RATE is missing: peak"),
        ("NUM_EPOCHS, LEARNING_RATE = 1, 1", "TOTAL_BATCH_SIZE is missing"),
        (MINIMAL + "SEED = float('nan')", "SEED=nan: expected integer"),
        (MINIMAL + "LEARNING_RATE = float('nan')", "LEARNING_RATE=nan: expected number"),
        (MINIMAL + "SEED = 1 +", "config.py, line 4: SyntaxError: invalid syntax$"),
        (MINIMAL + "SEED = (1,\n  SEDE)", "config.py, line 5: NameError: name 'SEDE' is not defined$"),
        (MINIMAL + "WARMUP_EPOCHS = NUM_EPOCHS / 0", "config.py, line 4: ZeroDivisionError: division by zero$"),
        (MINIMAL + "import sys\nsys.exit(0)", "config.py, line 5: SystemExit: 0$"),
        (MINIMAL + "raise BaseException('no')", "config.py, line 4: BaseException: no$"),
        (
            MINIMAL + "TENSOR_PARALLEL_SIZE = 2\nparallel = dict(tensor=dict(size=4, mode='2d'))",
            "TENSOR_PARALLEL_SIZE=2, .* contradict parallel.tensor",
        ),
    ],
)
def test_a_wrong_file_is_refused(write, text, words):
    with pytest.raises(UserError, match=words):
        load_config(write(text))


def test_a_variable_of_the_files_own_is_no_key(write):
    text = MINIMAL + "SIDE = 4\nMODEL = dict(image_size=8 * SIDE, patch_size=SIDE)\n"
    assert load_config(write(text))["MODEL"]["image_size"] == 32
    with pytest.raises(UserError, match="unknown key SIDE"):
        load_config(write(MINIMAL + "SIDE = 4\n"))


def test_values_are_taken_as_config_md_writes_them(write):
    settings = ["fp16=dict(mode=AMP_TYPE.NAIVE, dtype='bfloat16')", "DATA.crop_scale=[0.2, 1]", "LOG=dict(every=3)"]
    config = load_config(write(MINIMAL), [*settings, "parallel=dict(pipeline=1, tensor=dict(size=2, mode='1d'))"])
    assert config["fp16"] == {"mode": AMP_TYPE.NAIVE, "dtype": "bfloat16"}
    assert config["DATA"]["crop_scale"] == (0.2, 1)
    assert config["LOG"] == {"every": 3, "tensorboard": True, "trackers": []}
    assert config["parallel"]["tensor"] == {"size": 2, "mode": "1d"}


def test_a_config_that_was_written_as_json_is_the_same(write):
    settings = [
        "fp16=dict(mode=AMP_TYPE.APEX, opt_level='O2')",
        "DATA.randaugment=(2, 10)",
        "OPTIMIZER.betas=(0.9, 0.95)",
    ]
    config = load_config(write(MINIMAL), settings)
    assert restore_config(json.loads(json.dumps(config, default=str)), [], "config.json") == config


def test_a_missing_config_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'vit-b16'.; ls .*configs lists them$"):
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
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert data_root({"DATA": {"root": f"~/{tmp_path.name}", "download": False}}) == str(tmp_path)
    with pytest.raises(UserError, match=r"is not a folder .* \(python -m imagenet_dali.prepare makes one"):
        data_root({"DATA": {"root": str(tmp_path / "absent"), "download": False}})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match=rf"a/b is not a folder \(it is {tmp_path}/a/b\): .*download=True fetches Digits"
    ):
        data_root({"DATA": {"root": "a/b", "download": False}}, "Digits")
    # the task makes it
    assert data_root({"DATA": {"root": str(tmp_path / "absent"), "download": True}}) == str(tmp_path / "absent")


def test_a_key_that_a_task_does_not_read_is_refused_unless_it_is_left_alone():
    data = load_config("vit-b16", ["DATA.workers=3"])["DATA"]
    refuse_unused(data, ["crop_scale", "crop_padding"])
    with pytest.raises(UserError, match="DATA.workers=3 has no effect in this task: leave it out"):
        refuse_unused(data, ["crop_scale", "workers"])


SNIPPETS = [
    (page.name, block)
    for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
    for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    if re.match(r"(# \w+\.py\n)?from configs\.|from colossalai\.amp|\w+ = ", block)
]


@pytest.mark.parametrize(("page", "snippet"), SNIPPETS)
def test_every_config_snippet_loads(write, page, snippet):
    names = re.findall(r"^(\w+) = ", snippet, re.MULTILINE)
    with_base = snippet if "from configs." in snippet else f"from configs.vit_s16_vanilla import *\n{snippet}"
    config = load_config(write(with_base))
    assert names
    assert all(config[name] is not None for name in names)


REGENERATE = r""".venv/bin/python -c '
from pathlib import Path
from common.config.schema import keys_as_markdown
page = Path("docs/config.md")
page.write_text(page.read_text().partition("| key |")[0] + keys_as_markdown() + "\n")'"""


def test_the_documentation_lists_the_keys_as_they_are():
    page = ROOT / "docs" / "config.md"
    assert keys_as_markdown() in page.read_text(), f"regenerate its table:\n{REGENERATE}"


def test_every_bound_is_kept() -> None:
    """Of several bounds on an integer pydantic keeps the last: one on all integers would replace a key's own."""
    bounds = [(key, item) for key, field in all_keys() for item in field.metadata if isinstance(item, (Ge, Le))]
    assert len(bounds) > 30
    for key, item in bounds:
        beyond = item.ge - 1 if isinstance(item, Ge) else item.le + 1
        with pytest.raises(UserError, match=f"^{key}={beyond}: expected"):
            load_config("quickstart", [f"{key}={beyond}"])
