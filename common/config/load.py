"""Load a config: run its file, check every key, fill in defaults, derive the rest. `load_config` shows the order."""

import os
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from common.colossal import check_compile, check_zero, resolve_parallel
from common.config.execute import FOLDER, Overrides, execute, override, parse_settings
from common.config.fields import parse
from common.config.originals import RENAMED, read_original
from common.config.schema import Config, Data
from common.errors import UserError, did_you_mean, is_first_process
from common.files import is_url, short_path
from common.table import print_wrapped


def load_config(name: str, settings: Sequence[str] = (), base: str | None = None) -> dict[str, Any]:
    """Return the config ``name`` (a path, or a recipe of ``configs/``) with ``settings`` (``KEY=VALUE``) applied.

    ``base`` names the recipe from which a config without MODEL takes what it leaves out; a line on stdout says so.
    Raises `UserError` for a file that is not there or does not run, and for unknown keys and wrong values.
    """
    overrides = parse_settings(settings)
    path = find_config(name, base)
    values, used = execute(path, overrides)  # where the file assigns a key of the settings, it gets theirs
    values = {key: value for key, value in values.items() if not _is_helper(key, used)}
    assigned = set(values)
    recipe = {}
    if base and "MODEL" not in values:
        recipe, _ = execute(find_config(base), {**overrides, **{key: [((), value)] for key, value in values.items()}})
    notes = read_original(values, recipe, base)
    if notes and is_first_process():
        print_wrapped(f"{path}: {'; '.join(notes)}")
    for key, changes in overrides.items():
        if key in values or key not in assigned:  # else read as another key, its setting included
            values[key] = override(changes, values.get(key))
    _leave_one(values, overrides)
    config = parse(Config, values, where=str(path)).model_dump()
    config["parallel"] = _derive_parallel(config)
    check_zero(config)
    check_compile(config["COMPILE"], config["parallel"]["tensor"]["size"])
    return config


def load_own_config(config: Any) -> dict[str, Any]:
    """Return the config of a user's own script: a dict, a path, or the name of a recipe.

    ``parallel`` is derived and Colossal-AI's keys (lower case) are checked, as `load_config` does. With MODEL, as in
    the recipes, so are all keys, and defaults are filled in; else UPPER CASE is the script's own. Unknown keys stay.
    """
    values = dict(config) if isinstance(config, Mapping) else execute(find_config(str(config)), {})[0]
    is_whole = "MODEL" in values
    checked = {key for key in values if is_whole or key.islower() or key.startswith("TENSOR_PARALLEL_")}
    known = {key: values[key] for key in checked & Config.model_fields.keys()}
    required = {"MICRO_BATCH_SIZE", *(key for key, field in Config.model_fields.items() if field.is_required())}
    whole = parse(Config, known if is_whole else dict.fromkeys(required, 1) | known, where="config").model_dump()
    whole["parallel"] = _derive_parallel(whole)
    check_zero(whole)
    return values | {key: whole[key] for key in (whole if is_whole else {*known, "parallel"})}


def restore_config(values: Mapping[str, Any], settings: Sequence[str], where: str) -> dict[str, Any]:
    """Return a config that was read back from JSON, checked, with ``settings`` (``KEY=VALUE``) applied.

    Raises `UserError` for unknown keys and wrong values, naming the file ``where`` it comes from.
    """
    changed = {key: override(changes, values.get(key)) for key, changes in parse_settings(settings).items()}
    return parse(Config, {**values, **changed}, where).model_dump()


def find_config(name: str, base: str | None = None) -> Path:
    """Return the path that ``name`` stands for: itself, else a recipe, with or without ``configs/`` and ``.py``.

    In a task whose ``base`` recipe is vit_s16_vanilla, ``vit_1d`` is vit_s16_1d, as Colossal-AI's benchmark names it.
    """
    if Path(name).is_file():
        return Path(name)
    stem = re.sub(r"^(\./)?(configs?/)?", "", name).removesuffix(".py")
    if base and base.endswith("_vanilla"):
        stem = re.sub(r"^vit_(?=(vanilla|1d|2d|2p5d|3d)$)", base.removesuffix("vanilla"), stem)
    recipes = sorted(path.stem for path in FOLDER.glob("[!_]*.py"))
    if stem in recipes:
        return FOLDER / f"{stem}.py"
    raise UserError(
        f"--config {name}: no such file or recipe{did_you_mean(stem, recipes)}; ls {short_path(FOLDER)} lists them"
    )


def _is_helper(name: str, used: set[str]) -> bool:
    """Tell a variable of the file's own, which the file itself reads, from a misspelt key."""
    if name in Config.model_fields or name in RENAMED:
        return False
    return name in used and not get_close_matches(name, Config.model_fields, 1, 0.8)


def _leave_one(values: dict[str, Any], overrides: Overrides) -> None:
    """Keep only the overridden one of MICRO_BATCH_SIZE and ``gradient_accumulation`` if TOTAL_BATCH_SIZE gives both."""
    if values.get("TOTAL_BATCH_SIZE") is None:
        return
    micro, accumulation = (key in overrides and values[key] for key in ("MICRO_BATCH_SIZE", "gradient_accumulation"))
    if micro and not accumulation:
        values["gradient_accumulation"] = values["BATCH_SIZE"] = None
    elif accumulation and not micro:
        values["MICRO_BATCH_SIZE"] = None


def _derive_parallel(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``parallel``, made from ``TENSOR_PARALLEL_SIZE`` and ``_MODE`` where it is None; refuse contradictions."""
    size, mode = config["TENSOR_PARALLEL_SIZE"], config["TENSOR_PARALLEL_MODE"]
    parallel = config["parallel"] if config["parallel"] is not None else dict(tensor=dict(size=size, mode=mode))
    tensor = parallel.get("tensor") or dict(size=1, mode=None)
    if size not in (1, tensor.get("size")) or mode not in (None, tensor.get("mode")):
        raise UserError(
            f"TENSOR_PARALLEL_SIZE={size}, TENSOR_PARALLEL_MODE={mode!r} contradict parallel.tensor={tensor!r}"
        )
    if tensor.get("mode") == "2.5d":
        tensor = dict(depth=1) | tensor
    return resolve_parallel(dict(parallel, tensor=tensor), world_size=tensor.get("size", 1))


def named_root(config: Mapping[str, Any]) -> str:
    """Return ``DATA.root``, else the environment variable DATA, else ""; ~ is the home folder."""
    return os.path.expanduser(config["DATA"]["root"] or os.environ.get("DATA") or "")


def data_root(config: Mapping[str, Any], download: str = "") -> str:
    """Return the data set's folder, as `named_root` does; refuse one that is not there.

    ``download`` names what DATA.download fetches in this task.
    """
    root = named_root(config)
    if not root:
        raise UserError("DATA.root is not set: say where the data set is with DATA=/path or --set DATA.root=/path")
    if is_url(root):
        if download:
            raise UserError(f"DATA.root={root}: this task reads folders only; name one that has {download}")
        return root
    path = Path(root).resolve()
    if not config["DATA"]["download"] and not (path.is_dir() and any(path.iterdir())):
        state = "is empty" if path.is_dir() else "is not a folder"
        maker = (
            f"--set DATA.download=True fetches {download}" if download else "python -m imagenet_dali.prepare makes one"
        )
        raise UserError(f"DATA.root={root} {state} (it is {path}): point it at a data set ({maker})")
    return str(path)


def refuse_unused(data: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise `UserError` for the first key of ``DATA`` among ``names`` that is not at its default.

    A task names the keys that its loaders do not read, so that none is ignored silently.
    """
    for name in names:
        default = Data.model_fields[name].default
        if data.get(name, default) != default:
            raise UserError(f"DATA.{name}={data[name]!r} has no effect in this task: leave it out")
