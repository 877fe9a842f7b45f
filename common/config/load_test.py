import json
import re

import pytest

from common.config.fields import flatten
from common.config.load import load_config, restore_config
from common.config.originals_test import IMAGENET, load, parallel_lines
from common.config.plan import DataSummary, build_plan
from common.config.schema import keys_as_markdown, known_keys
from common.engine.upstream import AMP_TYPE
from common.errors import UserError
from common.files import ROOT

MINIMAL = "TOTAL_BATCH_SIZE = 64\nNUM_EPOCHS = 10\nLEARNING_RATE = 1e-3\n"
BENCHMARK = IMAGENET.format(parallel=parallel_lines("vanilla"))


# What is assigned after an import, and what it changes.
OWN = {
    "TOTAL_BATCH_SIZE //= 8": dict(TOTAL_BATCH_SIZE=512, BATCH_SIZE=256),
    "gradient_accumulation = 4": dict(gradient_accumulation=4, BATCH_SIZE=1024),
    "_scale = 2\nTOTAL_BATCH_SIZE = 256 * _scale": dict(TOTAL_BATCH_SIZE=512, BATCH_SIZE=256),
    "from configs.vit_s16_1d import LEARNING_RATE as _lr\n"
    "LEARNING_RATE = 2 * _lr\nNUM_EPOCHS += 1": dict(LEARNING_RATE=6e-3, NUM_EPOCHS=301),
    "WARMUP_EPOCHS = NUM_EPOCHS / 10\nNUM_EPOCHS = 400": dict(WARMUP_EPOCHS=30, NUM_EPOCHS=400),
    "OPTIMIZER = dict(name='lamb', variant='apex')": dict(
        OPTIMIZER={"name": "lamb", "variant": "apex"}
    ),
    "MICRO_BATCH_SIZE = 64\nTOTAL_BATCH_SIZE = gradient_accumulation = None": dict(BATCH_SIZE=None),
    "KEEP = MODEL['depth']\nMODEL['depth'] *= 2": {"KEEP": 12, "MODEL.depth": 24},
}
TENSOR = ["TENSOR_PARALLEL_SIZE=2", "TENSOR_PARALLEL_MODE=1d"]
MICRO = MINIMAL + "MICRO_BATCH_SIZE = 64\n"
TOTAL = MICRO.replace("64", "None", 1) + "gradient_accumulation = 4\n"  # which make the total
B16 = "from configs.vit_b16 import *\n"
PARALLEL = {"pipeline": 1, "tensor": {"mode": "1d", "size": 2}}
TIMM = "vit_tiny_patch16_224.augreg_in21k"
OF_TIMM = {
    "INIT": TIMM,
    "DATA.mean": (0.5,) * 3,
    "DATA.std": (0.5,) * 3,
    "DATA.interpolation": "bicubic",
}
OF_TIMM |= {"DATA.eval_crop": 0.5, "MODEL.image_size": 224}
# The last values that are accepted, and the first that are not.
EDGES = [
    "CHECKPOINT_EVERY=0.5min",
    "DATA.randaugment=rand-m9-p0.5-mmax5",
    "BCE_THRESHOLD=soft",
    "LABEL_SMOOTHING=0.1",
    "WARMUP_EPOCHS=1",
    "WARMUP_LR=1e-3",
    "MIN_LR=1e-3",
    "CUTMIX=1",
    "MIXUP_OFF_EPOCHS=9",
    "SEED=2**63 - 1",
    "OPTIMIZER.name=lamb",
    "OPTIMIZER.betas=(0, 0.9)",
    "OPTIMIZER.trust_range=(0, float('inf'))",
]


@pytest.mark.parametrize(
    ("text", "changes", "expected"),
    [
        (
            BENCHMARK.replace("from colossalai.amp import AMP_TYPE", ""),
            [],
            dict(fp16={"mode": AMP_TYPE.TORCH}),
        ),
        (BENCHMARK, ["gradient_accumulation=4", *TENSOR], dict(BATCH_SIZE=1024, parallel=PARALLEL)),
        (
            BENCHMARK,
            ["MICRO_BATCH_SIZE=64"],
            dict(MICRO_BATCH_SIZE=64, gradient_accumulation=None, BATCH_SIZE=None),
        ),
        (MICRO, ["gradient_accumulation=4"], dict(MICRO_BATCH_SIZE=None, gradient_accumulation=4)),
        (TOTAL, ["gradient_accumulation=2"], dict(MICRO_BATCH_SIZE=64, gradient_accumulation=2)),
        *(
            (f"from configs.vit_s16_1d import *\n{lines}\n", [], expected)
            for lines, expected in OWN.items()
        ),
        (
            B16 + "GPUS = 2\nNUM_EPOCHS *= 2",
            ["NUM_EPOCHS=4"],
            dict(GPUS=2, NUM_EPOCHS=4, WARMUP_EPOCHS=2),
        ),
        (B16 + "NUM_EPOCHS = 9", [], dict(NUM_EPOCHS=9, WARMUP_EPOCHS=4.5)),
        (MINIMAL + "if False:\n    KEEP = 3", ["KEEP=4"], dict(KEEP=4)),
        (MINIMAL + "for PART in (1, 2):\n    KEEP = PART", [], dict(KEEP=2)),
        (
            MINIMAL,
            ["LOG=dict(every=3)", "LOG.every=4"],
            dict(LOG=dict(every=4, tensorboard=True, noise_scale=None, trackers=[])),
        ),
        (MINIMAL, ["fp16=dict(mode=AMP_TYPE.NAIVE)"], dict(fp16={"mode": AMP_TYPE.NAIVE})),
        (MINIMAL, ["OUTPUT=20-12x", "INIT=None", *EDGES], dict(OUTPUT="20-12x", INIT=None)),
        *(
            (MINIMAL, [f"{key}={typed}"], {key: typed})
            for key in ("DATA.root", "DATA.labels", "DATA.columns", "INIT", "OUTPUT")
            for typed in ("2024", "1e5", "1_0", "True", "a=b", "[x]", "[1]", "1/2", "{}", "0x1f")
        ),
        (MINIMAL, ["DATA.root='a b'", "OUTPUT='None'"], {"DATA.root": "a b", "OUTPUT": "None"}),
        (MINIMAL, ["CHECKPOINT_EVERY=10"], dict(CHECKPOINT_EVERY=10)),
        *(
            (MINIMAL, [f"LOG.trackers={typed}"], {"LOG.trackers": ["wandb", "2024"]})
            for typed in ("[wandb, 2024]", "['wandb','2024']", "['wandb', 2024]")
        ),
        (MINIMAL, ["LOG.trackers=[]"], {"LOG.trackers": []}),
        (MINIMAL, [f"MODEL=dict(timm='{TIMM}', pretrained=True)", "DATA.eval_crop=0.5"], OF_TIMM),
        (MINIMAL, [f"MODEL=dict(timm='{TIMM}', pretrained=True)", "INIT=own"], dict(INIT="own")),
    ],
)
def test_what_the_file_derives_follows_a_setting(tmp_path, text, changes, expected):
    config = load(tmp_path, text, None, *changes)
    config |= flatten(config)
    assert {key: config[key] for key in expected} == expected


@pytest.mark.parametrize("text", [B16, "LEARNING_RATE = 0.1\n"])
def test_a_wrong_value_is_named_and_not_the_recipe_that_derives_from_it(tmp_path, text):
    with pytest.raises(UserError, match="^NUM_EPOCHS='3': expected integer >= 1$"):
        load(tmp_path, f"{text}NUM_EPOCHS = '3'\n", "vit-b16")


def test_a_config_imports_its_neighbour(tmp_path):
    base = "import math\nPARTS = 10\nWARMUP_EPOCHS = NUM_EPOCHS / PARTS\nOUTPUT = __file__\n"
    (tmp_path / "six_base.py").write_text(MINIMAL + base)
    config = load(tmp_path, "from six_base import *\nNUM_EPOCHS = 20\n")
    assert (config["WARMUP_EPOCHS"], config["OUTPUT"]) == (2, str(tmp_path / "six_base.py"))


OUT_OF_RANGE = [
    "OPTIMIZER.betas=(0.9, 1)",
    "OPTIMIZER.betas=(-1, 0)",
    "WEIGHT_DECAY=1e999",
    "DATA.mean=(0, 1)",
    "OPTIMIZER.trust_range=(2, 1)",
    "OPTIMIZER.trust_range=(-1, 1)",
    "DATA.std=(1, 0, 1)",
    "DATA.randaugment=(2, 11)",
    "DATA.randaugment=(0, 5)",
    "DATA.randaugment=(2, -1)",
    "DATA.randaugment=rand-m",
    "DATA.crop_ratio=(2, 1)",
    "DATA.crop_ratio=(1, 101)",
    "DATA.crop_scale=(0, 1)",
    "DATA.crop_scale=(1, 2)",
    "DATA.crop_scale=(0.5, 0.1)",
    "CHECKPOINT_EVERY=0",
    "CHECKPOINT_EVERY=0 min",
    "CHECKPOINT_EVERY=10 s",
    "fp16.mode=AMP_TYPE.FAST",
    "DATA.crop_ratio=(0, 1)",
    "SEED=2**63",
]
REFUSED = {  # settings: what the message matches
    "MODEL.widht=64": "config.py or --set: unknown key MODEL.widht; did you mean 'MODEL.width'",
    "MODEL.image_size=225": (
        "^MODEL.image_size=225 is not a multiple of patch_size=16; .* 224 or 240$"
    ),
    "MODEL.width=400": (
        r"^MODEL.width=400 is not a multiple of 6 \(.*the nearest that are: 396 or 402$"
    ),
    "MODEL.width=390; MODEL.position=sincos2d": (
        r"^MODEL.width=390 is .* of 12 \(.*that are: 384 or 396$"
    ),
    "MODEL.mlp=swiglu; MODEL.mlp_ratio=1.0027": (
        "^MODEL.mlp='swiglu' needs an even width x mlp_ratio, not 385; .* 384 or 386$"
    ),
    "MODEL.stem=conv; MODEL.width=24": (
        "^MODEL.stem='conv' needs a power of two that divides width as patch"
    ),
    "zero.stage=3; TENSOR_PARALLEL_SIZE=4; TENSOR_PARALLEL_MODE=2d": (
        "not support parallel.tensor.mode='2d': set it to '1d' or None, or zero=None$"
    ),
    "zero.stage=3; torch_ddp.static_graph=True": (
        r"={'static_graph': True}: set it to dict\(\), or zero"
    ),
    "zero.stage=3; COMPILE=model": (
        "={'stage': 3} does not support COMPILE='model': set it to True, or"
    ),
    "zero.stage=3; fp16={'mode':'AMP_TYPE.APEX','opt_level':'O3'}": (
        "^zero.* fp16.opt_level='O3': set it to 'O2', or zero=None$"
    ),
    "NUM_EPOCHS": "write it as KEY=VALUE",
    "LEARNING_RATE=fast": "^LEARNING_RATE='fast': expected number > 0$",
    "LR_SCHEDULE=cosine_as_long_as_the_warm-up": (
        "'cosine_as_long_as_the_warm-up': expected 'linear', 'cosine'"
    ),
    "DECAY=0.3": r"^DECAY=0.3 has no effect with LR_SCHEDULE='\w+': leave it out, ",
    "LR_SCHEDULE=wsd; NUM_EPOCHS=10; WARMUP_EPOCHS=2; DECAY=9": (
        "^DECAY=9 is 9 epochs, more than WARMUP_EPOCHS=2 and COOLDOWN_EPOCHS=0 leave of NUM_EPOCHS"
    ),
    "LR_SCHEDULE=wsd_sqrt; NUM_EPOCHS=10; WARMUP_EPOCHS=2; DECAY=0.9": "^DECAY=0.9 is 9 epochs, ",
    "LR_SCHEDULE=wsd; DECAY=0": "^DECAY=0: expected number > 0$",
    "MODEL=small": "^MODEL='small': expected dict$",
    "DATA.crop=simple; DATA.crop_scale=(0.5, 1)": "^DATA.crop_scale=.* no effect with DATA.crop=",
    "DATA.crop=simple; DATA.crop_ratio=(1, 2)": "^DATA.crop_ratio=.* no effect with DATA.crop=",
    "OPTIMIZER.name=sgd; OPTIMIZER.eps=1": (
        "OPTIMIZER.eps has no effect with name=sgd, which takes mom"
    ),
    "fp16=dict(mode=AMP_TYPE.TORCH, opt_level='O2')": (
        "no effect with mode=AMP_TYPE.TORCH, which takes none$"
    ),
    "fp16.dtype=float16": "fp16.dtype has no effect with mode=None: set mode to one of AMP_TYPE$",
    "WARMUP_EPOCHS=8; COOLDOWN_EPOCHS=2": (
        "^WARMUP_EPOCHS=8 and .* nothing of NUM_EPOCHS=10 .*: add --set WARMUP_EPOCHS=1 --set COOL"
    ),
    "MIN_LR=0.01": (
        "^MIN_LR=0.01 is too large for LEARNING_RATE=0.001: leave it out, or add --set MIN_LR=0.0$"
    ),
    "WARMUP_LR=1; WARMUP_EPOCHS=1": "WARMUP_LR=1 is too large for .*, or add --set WARMUP_LR=None$",
    "WARMUP_LR=0": "^WARMUP_LR=0 has no effect with WARMUP_EPOCHS=0: leave",
    "MIXUP_OFF_EPOCHS=1": "^MIXUP_OFF_EPOCHS=1 has no effect with MIXUP=0.0 and CUTMIX=0.0: leave",
    "MIXUP_OFF_EPOCHS=10; CUTMIX=1": "^MIXUP_OFF_EPOCHS=10 is too large for NUM_EPOCHS=10: leave",
    "IMAGE_SIZES=[(1,16),(10,32)]": "^IMAGE_SIZES has 11 epochs, more than NUM_EPOCHS=10:",
    "IMAGE_SIZES={1:16}": "^IMAGE_SIZES={1: 16}: expected list of",
    "IMAGE_SIZES=[(1,)]": r"^IMAGE_SIZES=\[\(1,\)\]: expected list of \(epochs, pixels\) or",
    "BATCH_SIZES=[(1,16),(10,32)]": "^BATCH_SIZES has 11 epochs, more than NUM_EPOCHS=10:",
    "BATCH_SIZES=[(1,)]": r"^BATCH_SIZES=\[\(1,\)\]: expected list of \(epochs, images\),",
    "BATCH_LR=none": r"^BATCH_LR='none' has no effect with BATCH_SIZES=\[\]: leave",
    "NOISE_FACTOR=2; BATCH_SIZES=[(1,8)]": r"^NOISE_FACTOR=2.* has no effect with BATCH_SIZES=\[",
    "SMALLEST_BATCH=2": r"^SMALLEST_BATCH=2 has no effect with BATCH_SIZES=\[\]: leave",
    "BCE_SUM=True": "^BCE_SUM=True has no effect with BCE_THRESHOLD=None: leave",
    "ERASING_MODE=pixel": "^ERASING_MODE='pixel' has no effect with ERASING=0.0: leave",
    "EMA_WARMUP=False": "^EMA_WARMUP=False has no effect with EMA=0.0: leave",
    "LABEL_SMOOTHING=0.1; BCE_THRESHOLD=0": "BCE_THRESHOLD=0.* undoes LABEL_SMOOTHING: set",
    "DATA=dict(sampling='balanced', order='blocks')": "^DATA.sampling='balanced' has no effect",
    "CLASS_WEIGHTS=balanced; DATA.sampling=balanced": "make up for unequal classes twice: leav",
    "CLASS_WEIGHTS=[1,-1]": r"^CLASS_WEIGHTS=\[1, -1\]: expected None, 'balanced', 'effective' or",
    "FREEZE=body; OPTIMIZER.layer_decay=0.5": "layer_decay=0.5 has no effect with FREEZE=",
    "TENSOR_PARALLEL_SIZE=2; TENSOR_PARALLEL_MODE=1d; COMPILE=True": (
        "COMPILE=True does not support tensor"
    ),
    "TENSOR_PARALLEL_SIZE=2; parallel.tensor.size=4": (
        "TENSOR_PARALLEL_SIZE=2, .* contradict parallel.tensor"
    ),
    "TENSOR_PARALLEL_MODE=1d; parallel.tensor.mode=2d": "MODE='1d' contradict parallel.tensor",
    "MODEL.timm=resnet18; MODEL.pretrained=yes": "^MODEL.pretrained='yes': expected True or False$",
    "batch_size=8": "batch_size: unknown key; did you mean 'BATCH_SIZE'",
    # what other libraries call a key
    "num_layers=6": "^num_layers: unknown key; did you mean 'MODEL.depth'",
    "MODEL.embed_dim=64": "unknown key MODEL.embed_dim; did you mean 'MODEL.width'",
    "gradient_clipping=1": "^gradient_clipping: unknown key; did you mean 'clip_grad_norm'",
} | {setting: f"^{setting.partition('=')[0]}=.*: expected " for setting in OUT_OF_RANGE}


@pytest.mark.parametrize(("changes", "words"), REFUSED.items())
def test_a_wrong_setting_is_refused(tmp_path, changes, words):
    with pytest.raises(UserError, match=words):
        load(tmp_path, MINIMAL, None, *changes.split("; "))


@pytest.mark.parametrize(
    ("text", "words"),
    {
        MINIMAL + "WARM_EPOCHS = 1\nWARMUP_EPOCHS = WARM_EPOCHS": (
            "unknown key WARM_EPOCHS; did you mean"
        ),
        MINIMAL + "SIDE = 4\nSIDE = 2 * SIDE": "unknown key SIDE$",
        "from configs.vit_s16_vanila import *": (
            "line 1: ModuleNotFoundError: No module named 'configs.vit_s16_vanila'$"
        ),
        "from configs.vit_b16 import MODLE": "line 1: ImportError: cannot import name 'MODLE' ",
        B16 + "NUM_EPOCHS = 4\nNUM_EPOCHS *= 2": (
            "config.py: a recipe derives keys from NUM_EPOCHS: assign"
        ),
        B16 + "WARMUP_EPOCHS = NUM_EPOCHS\nNUM_EPOCHS = 4": "derives keys from NUM_EPOCHS",
        "NUM_EPOCHS = 1": "config.py or --set: LEARNING_RATE is missing: peak",
        "BATCH_SIZE = NUM_EPOCHS = LEARNING_RATE = 1": "^TOTAL_BATCH_SIZE is missing: samples",
        MINIMAL + "SEED = 1 +": "config.py, line 4: SyntaxError: invalid syntax",
        MINIMAL + "SEED = (1,\n  SEDE)": (
            "config.py, line 5: NameError: name 'SEDE' is not defined$"
        ),
        MINIMAL + "import sys\nsys.exit(0)": "config.py, line 5: SystemExit: 0$",
    }.items(),
)
def test_a_wrong_file_is_refused(tmp_path, text, words):
    with pytest.raises(UserError, match=words):
        load(tmp_path, text)


def test_a_config_that_was_written_as_json_is_the_same():
    changes = [
        "fp16=dict(mode=AMP_TYPE.APEX, opt_level='O2')",
        "DATA.randaugment=[2, 10]",
        "OPTIMIZER.eps=1e-9",
    ]
    config = load_config("quickstart", changes)
    written = json.loads(json.dumps(config, default=str))
    assert restore_config(written, [], "config.json") == config
    restore_config(written, ["MIN_LR=1"], "config.json")  # earlier versions accepted it
    config["DATA"]["randaugment"] = "rand-m9"
    assert restore_config(written, ["DATA.randaugment=rand-m9"], "config.json") == config


def test_a_missing_config_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'vit-b16'.; docs/recipes.md lists them$"):
        load_config("vit-b61")


SNIPPETS = [
    block
    for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
    for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    if re.match(r"(# \w+\.py\n)?from configs\.|from colossalai\.amp|\w+ = ", block)
]


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_every_config_snippet_loads(tmp_path, snippet):
    base = "" if "from configs." in snippet else "from configs.vit_s16_vanilla import *\n"
    load(tmp_path, base + snippet)


REGENERATE = r""".venv/bin/python -c '
from pathlib import Path
from common.config.schema import keys_as_markdown
page = Path("docs/config.md")
page.write_text(page.read_text().partition("| key |")[0] + keys_as_markdown() + "\n")'"""


def test_the_documentation_lists_the_keys_as_they_are():
    assert keys_as_markdown() in (ROOT / "docs" / "config.md").read_text(), (
        f"regenerate its table:\n{REGENERATE}"
    )


@pytest.mark.parametrize(
    "value",
    [
        "None",
        "1",
        "-1",
        "1e999",
        "x",
        "(0, 2)",
        "{'a': 7}",
        "{[1]: 2}",
        f"{'':(<999}",  # 999 brackets
    ],
)
def test_any_value_of_any_key_is_taken_or_refused_in_one_line(tmp_path, value):
    for key in known_keys():
        try:
            config = load(tmp_path, MINIMAL, None, f"{key}={value}")
            build_plan(config, 8, DataSummary(1_281_167, 50_000, 1000, ""))
        except UserError as refused:
            lines = str(refused).splitlines()
            assert len(lines) == 1, lines
