"""Load a config file: find it, run it with the command line's ``--set`` in force, check every key, fill in defaults."""

import ast
import importlib.util
import os
import re
import sys
import types
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import configs
from common.colossal import resolve_parallel
from common.config.schema import KEYS, NONE, NUMBER, PREDEFINED, REQUIRED, Key
from common.errors import UserError, did_you_mean

FOLDER = Path(configs.__path__[0])


def load_config(name: str, settings: Sequence[str] = ()) -> dict[str, Any]:
    """Return the config ``name`` (a path, or a recipe of ``configs/``) with ``settings`` (``KEY=VALUE``) applied.

    A setting takes effect where the file assigns its key, so what the file derives from that key follows. Raises
    `UserError` for a file that is not there or does not run, and for unknown keys and wrong values.
    """
    path = find_config(name)
    overrides = _parse_settings(settings)
    values = _execute(path, overrides)
    for key, override in overrides.items():
        if key not in values:
            values[key] = _override(override, {})
    config = _checked(values, KEYS, prefix="", where=str(path))
    _check_parallel(config)
    if config["WARMUP_EPOCHS"] >= config["NUM_EPOCHS"]:
        raise UserError(
            f"WARMUP_EPOCHS={config['WARMUP_EPOCHS']} leaves no epoch after warm-up: it must be less than "
            f"NUM_EPOCHS={config['NUM_EPOCHS']}"
        )
    return config


def restore_config(values: Mapping[str, Any], settings: Sequence[str], where: str) -> dict[str, Any]:
    """Return a config that was read back from JSON, checked, with ``settings`` (``KEY=VALUE``) applied.

    Raises `UserError` for unknown keys and wrong values, naming the file ``where`` it comes from.
    """
    # JSON has lists for tuples, and "AMP_TYPE.TORCH"
    values = {name: _with_tuples(value) if isinstance(value, dict) else value for name, value in values.items()}
    if fp16 := values.get("fp16"):
        values["fp16"] = fp16 | {"mode": _parse_value(str(fp16.get("mode")), None)}
    for key, override in _parse_settings(settings).items():
        values[key] = _override(override, values.get(key))
    return _checked(values, KEYS, prefix="", where=where)


def _with_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_tuples(inner) for name, inner in value.items()}
    return tuple(value) if isinstance(value, list) else value


def find_config(name: str) -> Path:
    """Return the path that ``name`` stands for: itself, else a recipe, with or without ``configs/`` and ``.py``."""
    if Path(name).is_file():
        return Path(name)
    stem = re.sub(r"^configs?/", "", name).removesuffix(".py")
    recipes = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
    if stem in recipes:
        return FOLDER / f"{stem}.py"
    raise UserError(
        f"--config {name}: no such file or recipe{did_you_mean(stem, recipes)}; recipes: {', '.join(recipes)}"
    )


def data_root(config: Mapping[str, Any]) -> str:
    """Return the data set's folder: ``DATA.root``, else the environment variable DATA; refuse one that is not there."""
    root = config["DATA"]["root"] or os.environ.get("DATA")
    if not root:
        raise UserError("DATA.root is not set: say where the data set is with DATA=/path or --set DATA.root=/path")
    is_filled = Path(root).is_dir() and any(Path(root).iterdir())
    if not is_filled and not config["DATA"]["download"]:
        state = "is empty" if Path(root).is_dir() else "is not a folder"
        raise UserError(
            f"DATA.root={root} {state}: point it at a data set (python -m imagenet_dali.prepare makes one, "
            f"--set DATA.download=True fetches CIFAR-10 or Caltech-101)"
        )
    return str(Path(root).resolve())


def refuse_unused(data: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise `UserError` for the first key of ``DATA`` among ``names`` that is not at its default.

    A task names the keys that its loaders do not read, so that none is ignored silently.
    """
    for name in names:
        default = KEYS["DATA"].keys[name].default
        if data.get(name, default) != default:
            raise UserError(f"DATA.{name}={data[name]!r} has no effect in this task: leave it out")


# --- running the file -------------------------------------------------------------------------------------------------


class _Assignments:
    """The names a config file assigns; an assignment to an overridden key stores the override instead."""

    def __init__(self, namespace: dict[str, Any], overrides: Mapping[str, Any]):
        self.namespace, self.overrides = namespace, overrides

    def __getitem__(self, name: str) -> Any:
        return self.namespace[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.namespace[name] = _override(self.overrides[name], value) if name in self.overrides else value

    def __delitem__(self, name: str) -> None:
        del self.namespace[name]


def _execute(path: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    namespace = {"__name__": "config", "__file__": str(path), **PREDEFINED}
    with _base_configs(overrides):
        try:
            exec(compile(path.read_text(), str(path), "exec"), namespace, _Assignments(namespace, overrides))
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"{path}: {type(error).__name__}: {error}") from error
    skipped = (types.ModuleType, type)
    return {k: v for k, v in namespace.items() if not k.startswith("_") and not isinstance(v, skipped)}


@contextmanager
def _base_configs(overrides: Mapping[str, Any]):
    """Let ``from configs.x import *`` run x with the same overrides; ``vit_b16`` finds ``vit-b16.py`` too."""

    class Loader(SourceFileLoader):
        def exec_module(self, module: types.ModuleType) -> None:
            module.__dict__.update(PREDEFINED)
            exec(self.get_code(module.__name__), module.__dict__, _Assignments(module.__dict__, overrides))

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object, target: object = None):
            for file in FOLDER.glob("*.py"):
                if name == "configs." + file.stem.replace("-", "_"):
                    return importlib.util.spec_from_file_location(name, file, loader=Loader(name, str(file)))
            return None

    def forget() -> None:
        for name in [name for name in sys.modules if name.startswith("configs.")]:
            del sys.modules[name]

    forget()
    sys.meta_path.insert(0, Finder)
    try:
        yield
    finally:
        sys.meta_path.remove(Finder)
        forget()


# --- --set KEY=VALUE --------------------------------------------------------------------------------------------------


def _parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Return ``{"A": {"b": value}}`` for ``A.b=value``; a leaf is a tuple of one value, to tell it from a dict."""
    overrides: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise UserError(f"--set {setting}: write it as KEY=VALUE")
        key, path = _find_key(name), name.split(".")
        node = overrides
        for part in path[:-1]:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise UserError(f"--set {setting}: {part} has been set as a whole already: put the key into that dict")
        node[path[-1]] = (_parse_value(text, key),)
    return overrides


def _find_key(name: str) -> Key | None:
    """Return the key that a dotted name stands for, None below a dict that takes any sub-key; refuse unknown ones."""
    keys: Mapping[str, Key] = KEYS
    key = None
    parts = name.split(".")
    for depth, part in enumerate(parts):
        if part not in keys and not (key and dict in key.types and (not key.keys or key is KEYS["OPTIMIZER"])):
            known = [".".join([*parts[:depth], k]) for k in keys]
            raise UserError(f"--set {name}: unknown key{did_you_mean('.'.join(parts[: depth + 1]), known)}")
        if part not in keys:
            return None
        key = keys[part]
        keys = key.keys
    return key


def _parse_value(text: str, key: Key | None) -> Any:
    if member := re.fullmatch(r"AMP_TYPE\.(\w+)", text):
        kinds = PREDEFINED["AMP_TYPE"].__members__
        if member[1] not in kinds:
            raise UserError(f"{text}: unknown mixed precision; known: {', '.join(kinds)}")
        return kinds[member[1]]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    # DATA.root=2012 is a folder's name, not a number
    return text if key and str in key.types and not isinstance(value, key.types) else value


def _override(override: Any, value: Any) -> Any:
    if isinstance(override, tuple):
        return override[0]
    merged = dict(value) if isinstance(value, Mapping) else {}
    for key, inner in override.items():
        merged[key] = _override(inner, merged.get(key, {}))
    return merged


# --- checking ---------------------------------------------------------------------------------------------------------


def _checked(values: Mapping[str, Any], keys: Mapping[str, Key], prefix: str, where: str) -> dict[str, Any]:
    """Return ``values`` with defaults filled in, in the order of ``keys``; refuse unknown keys and wrong values."""
    config = {}
    unknown = [name for name in values if name not in keys]
    if unknown and prefix != "OPTIMIZER.":
        hint = "" if prefix else " (a variable of the file's own starts with an underscore)"
        raise UserError(f"{where}: unknown key {prefix}{unknown[0]}{did_you_mean(unknown[0], keys)}{hint}")
    for name, key in keys.items():
        if name not in values and key.default is REQUIRED:
            raise UserError(f"{where}: {prefix}{name} is missing: {key.help}")
        value = values.get(name, deepcopy(key.default))
        _check_value(prefix + name, value, key)
        config[name] = _checked(value, key.keys, f"{prefix}{name}.", where) if key.keys else value
    return config | {name: values[name] for name in unknown}


def _check_value(name: str, value: Any, key: Key) -> None:
    if not isinstance(value, key.types) or (isinstance(value, bool) and bool not in key.types):
        wanted = " or ".join("None" if kind is NONE else kind.__name__ for kind in key.types)
        raise UserError(f"{name}={value!r} is a {type(value).__name__}, not {wanted}")
    if key.choices and value not in key.choices:
        nearest = did_you_mean(str(value), [str(choice) for choice in key.choices])
        raise UserError(f"{name}={value!r} is none of {', '.join(map(repr, key.choices))}{nearest}")
    if key.minimum is not None and isinstance(value, NUMBER) and value < key.minimum:
        raise UserError(f"{name}={value!r} is less than {key.minimum}")
    if key.maximum is not None and value is not None and value > key.maximum:
        raise UserError(f"{name}={value!r} is more than {key.maximum}")


def _check_parallel(config: dict[str, Any]) -> None:
    """Make ``parallel`` from ``TENSOR_PARALLEL_SIZE`` and ``_MODE`` if the file does not; refuse contradictions."""
    size, mode = config["TENSOR_PARALLEL_SIZE"], config["TENSOR_PARALLEL_MODE"]
    parallel = config["parallel"] if config["parallel"] is not None else dict(tensor=dict(size=size, mode=mode))
    if unknown := set(parallel) - {"pipeline", "tensor"}:
        raise UserError(f"parallel has an unknown key {unknown.pop()!r}: known are 'pipeline' and 'tensor'")
    tensor = parallel.get("tensor") or dict(size=1, mode=None)
    if not isinstance(tensor, Mapping) or not isinstance(tensor.get("size"), int) or tensor["size"] < 1:
        raise UserError(f"parallel.tensor={tensor!r}: write it as dict(mode='1d', size=2)")
    if size not in (1, tensor["size"]) or mode not in (None, tensor.get("mode")):
        raise UserError(
            f"TENSOR_PARALLEL_SIZE={size}, TENSOR_PARALLEL_MODE={mode!r} contradict parallel.tensor={dict(tensor)!r}"
        )
    if tensor.get("mode") == "2.5d":
        tensor = dict(depth=1) | dict(tensor)
    config["parallel"] = resolve_parallel(dict(parallel, tensor=tensor), world_size=tensor["size"])
