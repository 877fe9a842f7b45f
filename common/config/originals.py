"""Read the config files of Colossal-AI's public examples: their keys, and what they omit."""

from collections.abc import Mapping
from typing import Any

from common.config.schema import Config
from common.errors import UserError
from common.files import Values

# Their names of our keys. Those of ``dali`` are written as "dali.root"; "" has no meaning here.
RENAMED = {
    "dali.mixup_alpha": "MIXUP",
    "dali.gpu_aug": "",
    "seed": "SEED",
    "LOG_PATH": "OUTPUT",
    "DROP_RATE": "MODEL.dropout",
    "dali.root": "DATA.root",
}
# What Colossal-AI documents for NAIVE and APEX, and has no meaning here; ``parallel.data`` follows
# from the number of processes.
WITHOUT_EFFECT = {
    "data",
    "cast_model_outputs",
    "cast_model_type",
    "hysteresis",
    "keep_batchnorm_fp32",
    "log_num_zeros_in_grad",
    "loss_scale",
    "master_weights",
    "max_loss_scale",
    "max_scale",
    "min_loss_scale",
    "min_scale",
    "num_losses",
    "patch_torch_functions",
    "verbose",
    "verbosity",
}
# How a batch is cut is not taken from the recipe.
BATCH_KEYS = {"TOTAL_BATCH_SIZE", "MICRO_BATCH_SIZE", "BATCH_SIZE"}


def read_original(values: dict[str, Any], recipe: Values, name: str | None) -> list[str]:
    """Translate the examples' keys in ``values``, fill in what they omit, and return notes on both.

    ``recipe``, called ``name``, is the task's where ``values`` have no MODEL, else empty. Only our
    keys (UPPER CASE) are taken from it: Colossal-AI's mean without a value what they mean there.

    Raises `UserError` for a key under both names. Inside MODEL and DATA the example's name counts.
    """
    if isinstance(values.get("dali"), Mapping):
        values |= {f"dali.{key}": value for key, value in values.pop("dali").items()}
    stated = {RENAMED.get(key, key) for key in values} | BATCH_KEYS
    ours = {key for key in Config.model_fields if key.isupper()}
    left_out = [key for key in recipe if key in ours - stated]
    values |= {key: recipe[key] for key in left_out}
    notes = [_rename(values, old, new) for old, new in RENAMED.items() if old in values]
    batch = values.get("BATCH_SIZE")
    accumulation = values.get("gradient_accumulation") or 1
    # Its BATCH_SIZE means what our TOTAL_BATCH_SIZE or MICRO_BATCH_SIZE does, by its task.
    is_translated = recipe and "TOTAL_BATCH_SIZE" not in values
    if is_translated and isinstance(batch, int) and isinstance(accumulation, int):
        del values["BATCH_SIZE"]
        if "MICRO_BATCH_SIZE" in recipe:  # this task's originals count it on each GPU
            values["MICRO_BATCH_SIZE"] = batch
            notes.append(f"BATCH_SIZE as MICRO_BATCH_SIZE={batch}, per GPU")
        else:
            total = batch * accumulation
            values["TOTAL_BATCH_SIZE"] = total
            notes.append(f"BATCH_SIZE as TOTAL_BATCH_SIZE={total}, over all GPUs")
    if left_out:
        notes.append(f"left out, so as in the recipe {name}: {', '.join(left_out)}")
    return notes


def read_sections(values: dict[str, Any]) -> list[str]:
    """Translate the examples' options inside ``parallel`` and ``fp16``; return notes on them."""
    notes: list[str] = []
    for section in ("parallel", "fp16"):
        options = values.get(section)
        if not isinstance(options, Mapping):
            continue
        unused = [f"{section}.{key}" for key in options if key in WITHOUT_EFFECT]
        options = {key: value for key, value in options.items() if key not in WITHOUT_EFFECT}
        if "initial_scale" in options:
            options["init_scale"] = options.pop("initial_scale")
            notes.append(f"fp16.initial_scale as fp16.init_scale={options['init_scale']!r}")
        if unused:
            notes.append(f"without effect here: {', '.join(unused)}")
        values[section] = options
    return notes


def _rename(values: dict[str, Any], old: str, new: str) -> str:
    """Move the value of ``old`` to ``new``, which may be inside MODEL or DATA; return a note."""
    value = values.pop(old)
    if not new:
        return f"{old}={value!r} as nothing: DALI decodes on a GPU if there is one"
    section, _, key = new.partition(".")
    if not key:
        if section in values:
            both = f"{old}={value!r} and {new}={values[new]!r}"
            raise UserError(f"{both} are the same key: keep {new}")
        values[section] = value
    else:
        inside = values.get(section) or {}
        # The schema refuses a section that is no dict.
        if isinstance(inside, Mapping):
            values[section] = {**inside, key: value}
    return f"{old} as {new}={value!r}"
