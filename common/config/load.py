"""Load a config file: find it, run it with the command line's ``--set`` in force, check every key, fill in defaults."""

import os
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from common.colossal import check_compile, check_zero, resolve_parallel
from common.config.execute import FOLDER, copied, execute
from common.config.fields import parse
from common.config.originals import RENAMED, fill_in, read_dali, translate
from common.config.schema import Config, Data, plain_values
from common.config.settings import override, parse_settings
from common.errors import UserError, did_you_mean, is_first_process
from common.files import short_path
from common.object_store import as_path, is_url
from common.table import print_wrapped


def load_config(name: str, settings: Sequence[str] = (), base: str | None = None) -> dict[str, Any]:
    """Return the config ``name`` (a path, or a recipe of ``configs/``) with ``settings`` (``KEY=VALUE``) applied.

    A setting takes effect where the file assigns its key, so what the file derives from that key follows. ``base``
    names the recipe from which a config without MODEL takes what it leaves out; a line on stdout says so. Raises
    `UserError` for a file that is not there or does not run, and for unknown keys and wrong values.
    """
    path, used = find_config(name, base), set()
    overrides = parse_settings(settings)
    values = execute(path, overrides, used)
    values = {key: value for key, value in values.items() if not _is_helper(key, used)}
    recipe = {}
    if base:  # a config with MODEL takes nothing from it
        fixed = {} if "MODEL" in values else {**overrides, **{key: (copied(value),) for key, value in values.items()}}
        recipe = execute(find_config(base), fixed)
    notes = read_dali(values)
    left_out = fill_in(values, recipe)
    had_batch = "BATCH_SIZE" in values
    notes += translate(values, used, recipe)
    if had_batch and "BATCH_SIZE" not in values:  # read as another key, its setting included
        overrides.pop("BATCH_SIZE", None)
    if left_out:
        notes.append(f"left out, so as in the recipe {base}: {', '.join(left_out)}")
    if notes and is_first_process():
        print_wrapped(f"{path}: {'; '.join(notes)}")
    for key, setting in overrides.items():
        values[key] = override(setting, values.get(key, {}))
    _derive_the_other(values, overrides)
    config = _check(values, where=str(path))
    _resolve_parallel(config)
    check_zero(config)
    check_compile(config["COMPILE"], config["parallel"]["tensor"]["size"])
    return config


def _derive_the_other(values: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Keep only the overridden one of MICRO_BATCH_SIZE and ``gradient_accumulation`` if TOTAL_BATCH_SIZE gives both."""
    if values.get("TOTAL_BATCH_SIZE") is None:
        return
    micro, accumulation = (key in overrides and values[key] for key in ("MICRO_BATCH_SIZE", "gradient_accumulation"))
    if micro and not accumulation:
        values["gradient_accumulation"] = values["BATCH_SIZE"] = None
    elif accumulation and not micro:
        values["MICRO_BATCH_SIZE"] = None


def _is_helper(name: str, used: set[str]) -> bool:
    """Tell a variable of the file's own, which the file itself reads, from a misspelt key."""
    if name in Config.model_fields or (name in RENAMED and name != "DEPTH"):
        return False
    return name in used and not get_close_matches(name, Config.model_fields, 1, 0.8)


def restore_config(values: Mapping[str, Any], settings: Sequence[str], where: str) -> dict[str, Any]:
    """Return a config that was read back from JSON, checked, with ``settings`` (``KEY=VALUE``) applied.

    Raises `UserError` for unknown keys and wrong values, naming the file ``where`` it comes from.
    """
    changed = {key: override(setting, values.get(key, {})) for key, setting in parse_settings(settings).items()}
    return _check({**values, **changed}, where)


def _check(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    try:
        return plain_values(parse(Config, values, where))
    except ValueError as error:
        raise UserError(str(error)) from None


def find_config(name: str, base: str | None = None) -> Path:
    """Return the path that ``name`` stands for: itself, else a recipe, with or without ``configs/`` and ``.py``.

    In a task whose ``base`` recipe is vit_s16_vanilla, ``vit_1d`` is vit_s16_1d, as Colossal-AI's benchmark names it.
    """
    if Path(name).is_file():
        return Path(name)
    stem = re.sub(r"^(\./)?(configs?/)?", "", name).removesuffix(".py")
    if base and base.endswith("_vanilla"):
        stem = re.sub(r"^vit_(?=(vanilla|1d|2d|2p5d|3d)$)", base.removesuffix("vanilla"), stem)
    recipes = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
    if stem in recipes:
        return FOLDER / f"{stem}.py"
    raise UserError(
        f"--config {name}: no such file or recipe{did_you_mean(stem, recipes)}; ls {short_path(FOLDER)} lists them"
    )


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
            raise UserError(f"DATA.root={as_path(root)}: this task reads folders only; name one that has {download}")
        return str(as_path(root))
    is_filled = Path(root).is_dir() and any(Path(root).iterdir())
    if not is_filled and not config["DATA"]["download"]:
        state = "is empty" if Path(root).is_dir() else "is not a folder"
        where = "" if Path(root).is_absolute() else f" (relative to the current folder, {Path.cwd()})"
        maker = (
            f"--set DATA.download=True fetches {download}" if download else "python -m imagenet_dali.prepare makes one"
        )
        raise UserError(f"DATA.root={root} {state}{where}: point it at a data set ({maker})")
    return str(Path(root).resolve())


def refuse_unused(data: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise `UserError` for the first key of ``DATA`` among ``names`` that is not at its default.

    A task names the keys that its loaders do not read, so that none is ignored silently.
    """
    for name in names:
        default = Data.model_fields[name].default
        if data.get(name, default) != default:
            raise UserError(f"DATA.{name}={data[name]!r} has no effect in this task: leave it out")


def _resolve_parallel(config: dict[str, Any]) -> None:
    """Make ``parallel`` from ``TENSOR_PARALLEL_SIZE`` and ``_MODE`` if the file does not; refuse contradictions."""
    size, mode = config["TENSOR_PARALLEL_SIZE"], config["TENSOR_PARALLEL_MODE"]
    parallel = config["parallel"] if config["parallel"] is not None else dict(tensor=dict(size=size, mode=mode))
    tensor = parallel.get("tensor") or dict(size=1, mode=None)
    if size not in (1, tensor.get("size")) or mode not in (None, tensor.get("mode")):
        raise UserError(
            f"TENSOR_PARALLEL_SIZE={size}, TENSOR_PARALLEL_MODE={mode!r} contradict parallel.tensor={tensor!r}"
        )
    if tensor.get("mode") == "2.5d":
        tensor = dict(depth=1) | tensor
    config["parallel"] = resolve_parallel(dict(parallel, tensor=tensor), world_size=tensor.get("size", 1))
