"""Load a config: run its file, check every key, fill in defaults, derive the rest.

`load_config` shows the order.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_origin

from common.config.execute import (
    RECIPES,
    Overrides,
    evaluate,
    execute,
    override,
)
from common.config.fields import parse
from common.config.model_keys import data_of, pretrained_config
from common.config.originals import RENAMED, read_original, read_sections
from common.config.schema import Config, find_key, known_keys
from common.engine.compiler import check_compile
from common.engine.tensor_parallel.layout import resolve_parallel
from common.engine.zero import check_zero
from common.errors import UserError
from common.files import Values
from common.launchers import is_first_process
from common.text import did_you_mean, print_wrapped

# Any value for the keys that only a train.py needs.
REQUIRED = {"MICRO_BATCH_SIZE": 1, "NUM_EPOCHS": 1, "LEARNING_RATE": 1}


def load_config(name: str, settings: Sequence[str] = (), base: str | None = None) -> dict[str, Any]:
    """Return the config ``name`` (a path or a recipe) with ``settings`` (``KEY=VALUE``) applied.

    ``base`` names the recipe from which a config without MODEL takes what it leaves out; a line on
    stdout says so.

    Raises `UserError` for a file that is not there or does not run, and for unknown keys and wrong
    values.
    """
    overrides = parse_settings(settings)
    path = find_config(name, base)
    assigned, used = execute(path, overrides)
    values = {key: value for key, value in assigned.items() if not _is_helper(key, used)}
    recipe = {}
    if base and "MODEL" not in values:
        # With the file's own values, from which the recipe derives others.
        recipe, _ = execute(find_config(base), {**values, **overrides})
    keys_of_file = set(values)
    notes = read_original(values, recipe, base)
    # Again, for keys that the file never assigns; for the others this changes nothing. A key that
    # `read_original` has renamed has its setting already.
    for key in top_keys(overrides) - (keys_of_file - values.keys()):
        values[key] = override(key, values.get(key), overrides)
    _print_notes(str(path), read_sections(values) + notes)
    # With TOTAL_BATCH_SIZE, micro-batch and accumulation follow from each other: the file's own one
    # would contradict an override of the other.
    given = [key for key in ("MICRO_BATCH_SIZE", "gradient_accumulation") if overrides.get(key)]
    if len(given) == 1 and values.get("TOTAL_BATCH_SIZE") is not None:
        # A BATCH_SIZE in the file is TOTAL_BATCH_SIZE // gradient_accumulation.
        batch = {"MICRO_BATCH_SIZE", "gradient_accumulation", "BATCH_SIZE"}
        values |= dict.fromkeys(batch - overrides.keys())
    config = _validate_and_derive(values, f"{path} or --set")
    check_compile(config)
    return config


def load_own_config(config: Any) -> dict[str, Any]:
    """Return the config of a user's own script: a dict, a path, or the name of a recipe.

    ``parallel`` is derived and Colossal-AI's keys (lower case) are checked, as `load_config` does.
    With MODEL, as in the recipes, so are all keys, and defaults are filled in; else UPPER CASE is
    the script's own, and unknown ones stay.

    Raises `UserError` for unknown keys in lower case, and wrong values.
    """
    if isinstance(config, Mapping):
        where = "config"
        values, used = dict(config), set()
    else:
        where = str(config)
        values, used = execute(find_config(where), {})
    _print_notes(where, read_sections(values))
    is_recipe = "MODEL" in values
    ours = {"TENSOR_PARALLEL_SIZE", "TENSOR_PARALLEL_MODE"}
    checked = Config.model_fields if is_recipe else ours
    # What the examples' own scripts read is neither Colossal-AI's nor a helper.
    theirs = {key for key in values.keys() - {*RENAMED, "dali"} if key.islower()}
    known = {
        key: value
        for key, value in values.items()
        if key in checked or (key in theirs and not _is_helper(key, used))
    }
    config = _validate_and_derive(known if is_recipe else REQUIRED | known, where)
    return values | {key: config[key] for key in config if is_recipe or key in {*known, "parallel"}}


def restore_config(values: Values, settings: Sequence[str], where: str) -> dict[str, Any]:
    """Return a config that was read back from JSON, checked, with ``settings`` applied.

    Raises `UserError` for unknown keys, with the file ``where`` it comes from, and wrong values.
    """
    overrides = parse_settings(settings)
    changed = {key: override(key, values.get(key), overrides) for key in top_keys(overrides)}
    # `parse` is enough: what is derived from other keys is in the record already.
    return parse(Config, {**values, **changed}, where).model_dump()


def find_config(name: str, base: str | None = None) -> Path:
    """Return the path ``name``, else the recipe, with or without ``configs/`` and ``.py``.

    In a task whose ``base`` recipe is vit_s16_vanilla, ``vit_1d`` is vit_s16_1d, as Colossal-AI's
    benchmark names it.
    """
    if Path(name).is_file():
        return Path(name)
    # Commands of Colossal-AI's examples write `config/` for the folder.
    stem = re.sub(r"^(\./)?(configs?/)?", "", name).removesuffix(".py")
    if base and base.endswith("_vanilla"):
        stem = re.sub(r"^vit_(?=(vanilla|1d|2d|2p5d|3d)$)", base.removesuffix("vanilla"), stem)
    if stem in RECIPES:
        return RECIPES[stem]
    nearest = did_you_mean(stem, RECIPES)
    raise UserError(f"--config {name}: no such file or recipe{nearest}; docs/recipes.md lists them")


def parse_settings(settings: Sequence[str]) -> Overrides:
    """Return the overrides of ``KEY=VALUE`` settings; raise `UserError` for an unknown key."""
    overrides = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise UserError(f"--set {setting}: write it as KEY=VALUE")
        # MODEL may be timm's, whose arguments are checked with the whole of it. `read_sections` may
        # rename the others.
        if not name.startswith(("MODEL.", "fp16.", "parallel.")):
            find_key(name)
        overrides.pop(name, None)  # the last one counts, and its position
        known = known_keys().get(name)
        overrides[name] = _parse_value(text, known.annotation if known else Any)
    return overrides


def _parse_value(text: str, annotation: Any) -> Any:
    """Return what a config file would assign, for a key of type ``annotation``.

    All else is text, and so is for a key of text what is none in Python, such as DATA.root=2024.
    """
    value = text
    with suppress(Exception):
        value = evaluate(text)
    types = get_args(annotation) or (annotation,)
    if str not in types or value is None:
        return value
    if get_origin(annotation) is list:
        is_right = isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
        return value if is_right else re.findall(r"[^][,\s'\"]+", text)
    return value if type(value) in types else text


def top_keys(overrides: Overrides) -> set[str]:
    """Return the keys of a config that ``overrides`` change, as MODEL for "MODEL.depth"."""
    return {name.partition(".")[0] for name in overrides}


def _is_helper(name: str, used: set[str]) -> bool:
    """Tell a variable of the file's own, which the file itself reads, from a misspelt key."""
    if name in Config.model_fields or name in RENAMED:
        return False
    # NUM_EPOCH, which the file reads in NUM_EPOCH / 2, is misspelt all the same.
    return name in used and not get_close_matches(name, Config.model_fields, 1, 0.8)


def _print_notes(where: str, notes: Sequence[str]) -> None:
    if notes and is_first_process():
        print_wrapped(f"{where}: {'; '.join(notes)}")


def _validate_and_derive(values: Values, where: str) -> dict[str, Any]:
    """Return ``values``, checked, with defaults and with what is derived from other keys."""
    checked = parse(Config, values, where)
    checked.check_conflicts()
    config = checked.model_dump()
    # timm's weights expect timm's mean, std and crop. What the config states takes precedence.
    stated = values.get("DATA") or {}
    timm = config["MODEL"]["timm"]
    of_model = data_of(pretrained_config(timm).to_dict()) if timm else {}
    config["DATA"] |= {key: value for key, value in of_model.items() if key not in stated}
    if config["MODEL"].get("pretrained"):
        config["INIT"] = config["INIT"] or config["MODEL"]["timm"]
    # Users' scripts read BATCH_SIZE. It stays None without a stated accumulation, which the plan
    # derives later from the number of processes. `build_plan` checks a stated one.
    total, accumulation = config["TOTAL_BATCH_SIZE"], config["gradient_accumulation"]
    if total and accumulation and config["BATCH_SIZE"] is None:
        config["BATCH_SIZE"] = total // accumulation
    config["parallel"] = _derive_parallel(config)
    check_zero(config)
    return config


def _derive_parallel(config: Values) -> dict[str, Any]:
    """Return ``parallel`` with its defaults, those of ``tensor`` from TENSOR_PARALLEL_SIZE, _MODE.

    Raises `UserError` where the two contradict each other.
    """
    size, mode = config["TENSOR_PARALLEL_SIZE"], config["TENSOR_PARALLEL_MODE"]
    parallel = config["parallel"] or {}
    # `parallel` counts where it is stated; the two keys may only agree with it.
    tensor = dict(size=size, mode=mode) | (parallel.get("tensor") or {})
    if size not in (1, tensor["size"]) or mode not in (None, tensor["mode"]):
        raise UserError(
            f"TENSOR_PARALLEL_SIZE={size}, TENSOR_PARALLEL_MODE={mode!r} contradict "
            f"parallel.tensor={tensor!r}"
        )
    if tensor["mode"] == "2.5d":
        tensor = dict(depth=1) | tensor
    # The number of processes is not known yet: `build_plan` checks that the size divides it.
    return resolve_parallel(dict(parallel, tensor=tensor), world_size=tensor["size"])
