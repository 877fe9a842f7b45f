"""Read the config files of Colossal-AI's public examples: their key names, and what their train scripts fill in.

Those files hold few keys, because the train scripts beside them hard-code the rest. Here a recipe of each task, its
base, says what those scripts did; `docs/from-colossalai-examples.md` lists the files.
"""

from collections.abc import Mapping
from typing import Any

from common.config.schema import Config
from common.errors import UserError

RENAMED = {"seed": "SEED", "LOG_PATH": "OUTPUT", "DROP_RATE": "MODEL.dropout"}
# What a config says for itself: how a batch is cut, and over how many GPUs.
STATED = {"TOTAL_BATCH_SIZE", "MICRO_BATCH_SIZE", "BATCH_SIZE", "TENSOR_PARALLEL_SIZE", "TENSOR_PARALLEL_MODE"}


def read_original(values: dict[str, Any], recipe: Mapping[str, Any], name: str | None) -> list[str]:
    """Replace the examples' key names in ``values``, add what is left out, and return how each key was read.

    ``recipe`` is that of the task, called ``name``, for a config without MODEL; else it is empty. Colossal-AI's keys
    (lower case) mean without a value what they mean there. Raises `UserError` for a key under both names.
    """
    notes = _read_dali(values)
    named = {RENAMED.get(name, name) for name in values} | STATED
    left_out = [name for name in recipe if name.isupper() and name in Config.model_fields and name not in named]
    values.update({name: recipe[name] for name in left_out})
    notes += [_rename(values, old, new) for old, new in RENAMED.items() if old in values]
    batch, accumulation = values.get("BATCH_SIZE"), values.get("gradient_accumulation") or 1
    if recipe and "TOTAL_BATCH_SIZE" not in values and isinstance(batch, int) and isinstance(accumulation, int):
        del values["BATCH_SIZE"]
        if "MICRO_BATCH_SIZE" in recipe:  # this task's originals count it on each GPU
            values["MICRO_BATCH_SIZE"] = batch
            notes.append(f"BATCH_SIZE as MICRO_BATCH_SIZE={batch}, per GPU")
        else:
            values["TOTAL_BATCH_SIZE"] = batch * accumulation
            notes.append(f"BATCH_SIZE as TOTAL_BATCH_SIZE={batch * accumulation}, over all GPUs")
    if left_out:
        notes.append(f"left out, so as in the recipe {name}: {', '.join(left_out)}")
    return notes


def _rename(values: dict[str, Any], old: str, new: str) -> str:
    value = values.pop(old)
    section, _, key = new.partition(".")
    if key:
        inside = values.get(section) or {}
        values[section] = {**inside, key: value} if isinstance(inside, Mapping) else inside
    elif section in values:
        raise UserError(f"{old}={value!r} and {new}={values[new]!r} are the same key: keep {new}")
    else:
        values[section] = value
    return f"{old} as {new}={value!r}"


def _read_dali(values: dict[str, Any]) -> list[str]:
    if not isinstance(values.get("dali"), Mapping):
        return []
    dali, notes = dict(values.pop("dali")), []
    if "mixup_alpha" in dali:
        values["MIXUP"] = dali.pop("mixup_alpha")
        notes.append(f"dali.mixup_alpha as MIXUP={values['MIXUP']!r}")
    if "gpu_aug" in dali:
        notes.append(f"dali.gpu_aug={dali.pop('gpu_aug')!r} as nothing: DALI decodes where the run trains")
    if dali:
        raise UserError(f"unknown key dali.{next(iter(dali))}: known are dali.mixup_alpha and dali.gpu_aug")
    return notes
