import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.colossal import AMP_TYPE
from common.config.fields import values_of
from common.config.load import FOLDER, data_root, load_config, restore_config
from common.config.originals_test import IMAGENET, parallel_lines
from common.config.plan import DataSummary, build_plan
from common.config.schema import all_keys, keys_as_markdown
from common.errors import UserError

ROOT = Path(__file__).parents[2]
MINIMAL = "TOTAL_BATCH_SIZE = 64\nNUM_EPOCHS = 10\nLEARNING_RATE = 1e-3\n"
BENCHMARK = IMAGENET.format(parallel=parallel_lines("vanilla"))


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> str:
        (tmp_path / "config.py").write_text(text)
        return str(tmp_path / "config.py")

    return write


TENSOR = ["TENSOR_PARALLEL_SIZE=2", "TENSOR_PARALLEL_MODE=1d"]
MICRO = MINIMAL + "MICRO_BATCH_SIZE = 64\n"
TOTAL = MICRO.replace("64", "None", 1) + "gradient_accumulation = 4\n"  # which make the total
B16 = "from configs.vit_b16 import *\n"
PARALLEL = {"pipeline": 1, "tensor": {"mode": "1d", "size": 2}}


@pytest.mark.parametrize(
    ("text", "changes", "expected"),
    [
        (BENCHMARK.replace("colossalai.amp", "colossalai.legacy.amp"), [], dict(fp16={"mode": AMP_TYPE.TORCH})),
        (BENCHMARK.replace("from colossalai.amp import AMP_TYPE", ""), [], dict(fp16={"mode": AMP_TYPE.TORCH})),
        (BENCHMARK, ["gradient_accumulation=4", *TENSOR], dict(BATCH_SIZE=1024, parallel=PARALLEL)),
        (BENCHMARK, ["MICRO_BATCH_SIZE=64"], dict(MICRO_BATCH_SIZE=64, gradient_accumulation=None, BATCH_SIZE=None)),
        (MICRO, ["gradient_accumulation=4"], dict(MICRO_BATCH_SIZE=None, gradient_accumulation=4)),
        (TOTAL, ["gradient_accumulation=2"], dict(MICRO_BATCH_SIZE=64, gradient_accumulation=2)),
        (TOTAL, ["MICRO_BATCH_SIZE=32"], dict(MICRO_BATCH_SIZE=32, gradient_accumulation=4)),
        (B16 + "GPUS = 2", ["NUM_EPOCHS=4"], dict(GPUS=2, NUM_EPOCHS=4, WARMUP_EPOCHS=2)),
        (MINIMAL, ["LOG=dict(every=3)", "LOG.every=4"], dict(LOG=dict(every=4, tensorboard=True, trackers=[]))),
        (MINIMAL, ["fp16=dict(mode=AMP_TYPE.NAIVE)"], dict(fp16={"mode": AMP_TYPE.NAIVE})),
        (MINIMAL, ["OUTPUT=2012"], dict(OUTPUT="2012")),
    ],
)
def test_what_the_file_derives_follows_a_setting(write, text, changes, expected):
    config = load_config(write(text), changes)
    assert {key: config[key] for key in expected} == expected


@pytest.mark.parametrize("text", [B16, "LEARNING_RATE = 0.1\n"])
@pytest.mark.parametrize(("more", "changes"), [("NUM_EPOCHS = '3'\n", []), ("", ["NUM_EPOCHS='3'"])])
def test_a_wrong_value_is_named_and_not_the_recipe_that_derives_from_it(write, text, more, changes):
    with pytest.raises(UserError, match="^NUM_EPOCHS='3': expected integer >= 1 .epochs.$"):
        load_config(write(text + more), changes, base="vit-b16")


def test_every_recipe_loads_and_says_how_to_run_it():
    for path in FOLDER.glob("*.py"):
        if path.stem != "__init__":
            load_config(path.stem)
            assert "--config" in path.read_text() or "bash scripts/" in path.read_text(), path


# What is assigned after an import, and what it changes.
OWN = {
    "TOTAL_BATCH_SIZE = 512": dict(TOTAL_BATCH_SIZE=512, BATCH_SIZE=256),
    "gradient_accumulation = 4": dict(gradient_accumulation=4, BATCH_SIZE=1024),
    "_scale = 2\nTOTAL_BATCH_SIZE = 256 * _scale": dict(TOTAL_BATCH_SIZE=512, BATCH_SIZE=256),
    "_lr = LEARNING_RATE\nLEARNING_RATE = 2 * _lr\nNUM_EPOCHS += 1": dict(LEARNING_RATE=6e-3, NUM_EPOCHS=301),
    "WARMUP_EPOCHS = NUM_EPOCHS / 10\nNUM_EPOCHS = 400": dict(WARMUP_EPOCHS=30, NUM_EPOCHS=400),
    "OPTIMIZER = dict(name='lamb', variant='apex')": dict(OPTIMIZER={"name": "lamb", "variant": "apex"}),
    "GPUS = MODEL['depth']\nMODEL['depth'] *= 2\nDATA['loader'] = 'torchvision'": dict(GPUS=12, MODEL=..., DATA=...),
}


@pytest.mark.parametrize("lines", OWN)
def test_what_a_recipe_derives_follows_the_config_that_imports_it(write, lines):
    config, base = load_config(write(f"from configs.vit_s16_1d import *\n{lines}\n")), load_config("vit_s16_1d")
    expected = {key for key, value in OWN[lines].items() if base[key] != value}
    assert {key for key in base if config[key] != base[key]} == expected
    assert all(config[key] == value for key, value in OWN[lines].items() if value is not ...)


def test_a_config_imports_its_neighbour(write, tmp_path):
    (tmp_path / "six_base.py").write_text(MINIMAL + "WARMUP_EPOCHS = NUM_EPOCHS / 10\n")
    config = load_config(write("from six_base import *\nNUM_EPOCHS = 20\n"))
    assert (config["WARMUP_EPOCHS"], config["LEARNING_RATE"]) == (2, 1e-3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["MODEL.widht=64"], "config.py or --set: unknown key MODEL.widht; did you mean 'MODEL.width'"),
        (["LERNING_RATE=1"], "unknown key; did you mean 'LEARNING_RATE'"),
        (["NUM_EPOCHS"], "write it as KEY=VALUE"),
        (["LEARNING_RATE=fast"], "^LEARNING_RATE='fast': expected number > 0$"),
        (["TIMEOUT=1e999"], r"TIMEOUT=inf: expected number >= 1 and <= 10000000 \(seconds\)$"),
        (["LR_SCHEDULE=cosin"], "LR_SCHEDULE='cosin': expected 'linear', 'cosine', 'timm'$"),
        (["CHECKPOINT_EVERY=10 s"], "CHECKPOINT_EVERY='10 s': expected optimizer steps, as 500, or minutes"),
        (["fp16.mode=AMP_TYPE.FAST"], "expected AMP_TYPE.APEX, AMP_TYPE.TORCH, AMP_TYPE.NAIVE or None"),
        (["DATA.crop_scale=(0.5, 0.1)"], r"\(0.5, 0.1\): expected \(low, high\), 0 < low <= high <= 1$"),
        (["parallel.tensor=4"], r"parallel.tensor=4: expected dict\(size=..., mode=..., depth=...\)"),
        (["DATA.crop=simple", "DATA.crop_scale=(0.5, 1.0)"], r"crop_scale=\(0.5, 1.0\) has no effect with crop="),
        (["OPTIMIZER.name=sgd", "OPTIMIZER.eps=1"], "OPTIMIZER.eps has no effect with name=sgd, which takes mom"),
        (["fp16=dict(mode=AMP_TYPE.TORCH, opt_level='O2')"], "fp16.opt_level has no effect with mode=AMP_TYPE.TORCH"),
        (["fp16.dtype=float16"], "fp16.dtype has no effect with mode=None: set mode to one of AMP_TYPE$"),
        (["WARMUP_EPOCHS=10"], "WARMUP_EPOCHS=10 must be less than NUM_EPOCHS=10$"),
        (["LABEL_SMOOTHING=0.1", "BCE_THRESHOLD=0"], "BCE_THRESHOLD=0.* undoes LABEL_SMOOTHING=0.1: set"),
        (["FREEZE=body", "OPTIMIZER.layer_decay=0.5"], "FREEZE='body' trains the head alone: leave out"),
        (["MODEL.heads=5"], "MODEL.width=384 is not a multiple of heads=5; the nearest that are: 380 or 385"),
        ([*TENSOR, "COMPILE=True"], "COMPILE=True does not support tensor"),
        (["TENSOR_PARALLEL_SIZE=2", "parallel.tensor.size=4"], "TENSOR_PARALLEL_SIZE=2, .* contradict parallel.tensor"),
    ],
)
def test_a_wrong_setting_is_refused(write, changes, words):
    with pytest.raises(UserError, match=words):
        load_config(write(MINIMAL), changes)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (MINIMAL + "WARMUP_EPOCH = 1\nWARMUP_EPOCHS = WARMUP_EPOCH", "unknown key WARMUP_EPOCH; did you mean"),
        (MINIMAL + "lr = 1", "unknown key lr; did you mean 'LEARNING_RATE'"),
        (MINIMAL + "SIDE = 4", "unknown key SIDE$"),
        ("from configs.vit_s16_vanila import *", "line 1: no recipe .*; did you mean 'configs.vit_s16_vanilla'"),
        ("from configs.vit_b16 import MODLE", "line 1: configs.vit_b16 has no MODLE"),
        (B16 + "NUM_EPOCHS *= 2", "line 1: configs.vit_b16 derives other keys from NUM_EPOCHS: assign a plain value"),
        (B16 + "WARMUP_EPOCHS = NUM_EPOCHS\nNUM_EPOCHS = 4", "derives other keys from NUM_EPOCHS"),
        ("NUM_EPOCHS = 1", "config.py: LEARNING_RATE is missing: peak"),
        (MINIMAL + "LEARNING_RATE = float('nan')", "LEARNING_RATE=nan: expected number"),
        (MINIMAL + "SEED = 1 +", "config.py, line 4: SyntaxError: invalid syntax$"),
        (MINIMAL + "SEED = (1,\n  SEDE)", "config.py, line 5: NameError: name 'SEDE' is not defined$"),
        (MINIMAL + "import sys\nsys.exit(0)", "config.py, line 5: SystemExit: 0$"),
    ],
)
def test_a_wrong_file_is_refused(write, text, words):
    with pytest.raises(UserError, match=words):
        load_config(write(text))


def test_a_variable_of_the_files_own_is_no_key(write):
    text = MINIMAL + "SIDE = 4\nMODEL = dict(image_size=8 * SIDE, patch_size=SIDE)\n"
    assert load_config(write(text))["MODEL"]["image_size"] == 32


def test_a_config_that_was_written_as_json_is_the_same():
    changes = ["fp16=dict(mode=AMP_TYPE.APEX, opt_level='O2')", "DATA.randaugment=[2, 10]", "OPTIMIZER.eps=1e-9"]
    config = load_config("quickstart", changes)
    written = json.loads(json.dumps(config | {"gradient_handler": None}, default=str))
    written["DATA"] |= {"cache": None, "cache_gb": 100}  # keys of earlier versions
    assert restore_config(written, [], "config.json") == config


def test_a_missing_config_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'vit-b16'.; ls .*configs lists them$"):
        load_config("vit-b61")


def test_data_root_comes_from_the_config_else_from_the_environment(tmp_path, monkeypatch):
    def find(root, download=""):
        return data_root({"DATA": {"root": root, "download": False}}, download)

    monkeypatch.delenv("DATA", raising=False)
    with pytest.raises(UserError, match="DATA.root is not set: .*DATA.download=True too, Digits is fetched"):
        find(None, "Digits")
    monkeypatch.setenv("DATA", str(tmp_path))
    with pytest.raises(UserError, match="is empty"):
        find(None)
    (tmp_path / "train").mkdir()
    assert find(None) == str(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert find(f"~/{tmp_path.name}") == str(tmp_path)
    with pytest.raises(UserError, match=r"is not a folder .* \(python -m imagenet_dali.prepare makes one"):
        find(str(tmp_path / "absent"))


SNIPPETS = [
    block
    for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
    for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    if re.match(r"(# \w+\.py\n)?from configs\.|from colossalai\.amp|\w+ = ", block)
]


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_every_config_snippet_loads(write, snippet):
    names = re.findall(r"^(\w+) = ", snippet, re.MULTILINE)
    base = "" if "from configs." in snippet else "from configs.vit_s16_vanilla import *\n"
    config = load_config(write(base + snippet))
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


# Any config, or --set, loads or is refused in one line.
KEYS = dict(all_keys())
TEXT = st.text(st.characters(exclude_categories=["C", "Zl", "Zp"]), max_size=30)
JUNK = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXT, st.lists(st.integers(0, 9), max_size=3))


def near_bounds(key):
    """Return values at and just beyond the bounds of a key, its choices, and its default."""
    field = KEYS[key]
    names = ("ge", "gt", "le", "lt")
    bounds = [getattr(item, name) for item in field.metadata for name in names if hasattr(item, name)]
    choices = re.findall(r"'(\w+)'", values_of(field))
    return [*(bound + step for bound in bounds for step in (-1, -1e-9, 0, 1e-9, 1)), *choices, 1]


PAIR = st.sampled_from(sorted(KEYS)).flatmap(
    lambda key: st.tuples(st.just(key), st.one_of(st.sampled_from(near_bounds(key)), JUNK))
)
ODD = ["OPTIMIZER={[1]: 2}", 'DATA.root="\\d"', "DATA={**{}}", "MODEL=dict(**{})", "SEED=1or 2", f"SEED={'(' * 999}"]
SETTING = st.one_of(PAIR.map(lambda pair: f"{pair[0]}={pair[1]!r}"), TEXT, st.sampled_from(ODD))


def assign(key, value):
    """Return the line of a config file that assigns a key, which may be inside a dict."""
    first, *inside = key.split(".")
    for name in reversed(inside):
        value = {name: value}
    return f"{first} = " + re.sub(r"\b(inf|nan)\b", r"float('\1')", repr(value)) + "\n"


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs=st.lists(PAIR, max_size=3), changes=st.lists(SETTING, max_size=3), base=st.sampled_from([MINIMAL, B16]))
def test_any_config_loads_or_is_refused_in_one_line(write, pairs, changes, base):
    try:
        config = load_config(write(base + "".join(assign(*pair) for pair in pairs)), changes)
        build_plan(config, 8, DataSummary(1_281_167, 50_000, 1000, ""))
    except UserError as refused:
        lines = str(refused).splitlines()
        assert len(lines) == 1, lines
