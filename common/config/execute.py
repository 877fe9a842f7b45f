"""Run a config file, and the configs that it imports, so that what they derive follows what is set."""

import ast
import traceback
import types
from copy import deepcopy
from pathlib import Path
from typing import Any

import configs
from common.config.fields import check_given
from common.config.schema import PREDEFINED, Config
from common.config.settings import Overrides, override
from common.errors import UserError, did_you_mean
from common.files import read_bytes

FOLDER = Path(configs.__path__[0])
NAME = "config"  # of the module that a config file is run as


def execute(path: Path, overrides: Overrides, used: set[str] | None = None) -> dict[str, Any]:
    """Return the values that a config file assigns, with ``overrides`` in force where it assigns their keys.

    What the file assigns holds in the configs that it imports too (``from configs.x import *``), so that what those
    derive follows: after ``TOTAL_BATCH_SIZE = 512`` their ``BATCH_SIZE = TOTAL_BATCH_SIZE // 2`` is 256. ``used``
    collects the names that the files read.

    Raises `UserError` for a file that does not run, with the line that fails.
    """
    try:
        return _execute_twice(path, overrides, set() if used is None else used)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:
        message = error.msg if isinstance(error, SyntaxError) else error
        raise UserError(f"{_place(error, path)}: {type(error).__name__}: {message}") from error


def _place(error: BaseException, path: Path) -> str:
    """Return the config file and line at which ``error`` arose; ``path`` if none is known."""
    if isinstance(error, SyntaxError) and error.lineno:
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.walk_tb(error.__traceback__)
    lines = [(frame.f_code.co_filename, line) for frame, line in frames if frame.f_globals.get("__name__") == NAME]
    return f"{lines[-1][0]}, line {lines[-1][1]}" if lines else str(path)


def _execute_twice(path: Path, overrides: Overrides, used: set[str]) -> dict[str, Any]:
    """Execute a file for what it assigns, then, if it imports recipes, once more with that in force in them.

    So the last file of a chain of n imports is executed up to 2**n times.
    """
    tree = ast.parse(read_bytes(path), str(path))
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    used |= {node.id for node in names if isinstance(node.ctx, ast.Load)}
    stored = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    values = _execute_once(tree, path, overrides, overrides, used)
    own = {name: values[name] for name in stored if name in values}
    if len(own) == len(values):  # it imports nothing
        return values
    fixed = {name: (copied(value),) for name, value in own.items()}
    return _execute_once(tree, path, overrides, {**overrides, **fixed}, used) | own


def _execute_once(
    tree: ast.Module, path: Path, overrides: Overrides, in_bases: Overrides, used: set[str]
) -> dict[str, Any]:
    namespace = {"__name__": NAME, "__file__": str(path), **PREDEFINED}
    assignments: Any = _Assignments(namespace, overrides)
    try:
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("configs."):
                namespace |= _execute_recipe(node, path, in_bases, used)
            else:
                exec(compile(ast.Module([node], []), str(path), "exec"), namespace, assignments)
    except Exception:  # blame it on a given value that is wrong by itself, if one is, not on what derives from it
        check_given(Config, {key: value[0] for key, value in overrides.items() if isinstance(value, tuple)})
        raise
    skipped = (types.ModuleType, type)
    return {k: v for k, v in namespace.items() if not k.startswith("_") and not isinstance(v, skipped)}


def _execute_recipe(node: ast.ImportFrom, path: Path, overrides: Overrides, used: set[str]) -> dict[str, Any]:
    """Run the config that ``from configs.x import ...`` names, ``vit_b16`` for ``vit-b16.py`` too; return the names."""
    files = {f"configs.{file.stem.replace('-', '_')}": file for file in FOLDER.glob("[!_]*.py")}
    if node.module not in files:
        raise UserError(f"{path}, line {node.lineno}: no recipe {node.module}{did_you_mean(str(node.module), files)}")
    values = _execute_twice(files[node.module], overrides, used)
    names = {alias.name: alias.asname or alias.name for alias in node.names}
    if missing := names.keys() - values.keys() - {"*"}:
        raise UserError(f"{path}, line {node.lineno}: {node.module} has no {', '.join(missing)}")
    return values if "*" in names else {name: values[theirs] for theirs, name in names.items()}


def copied(value: Any) -> Any:
    """Return a deep copy of ``value``, or ``value`` itself if it has none, such as an open file."""
    try:
        return deepcopy(value)
    except Exception:
        return value


class _Assignments:
    """The names a config file assigns; an assignment to an overridden key stores the override instead."""

    def __init__(self, namespace: dict[str, Any], overrides: Overrides):
        self.namespace, self.overrides = namespace, overrides

    def __getitem__(self, name: str) -> Any:
        return self.namespace[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.namespace[name] = override(self.overrides[name], value) if name in self.overrides else value

    def __delitem__(self, name: str) -> None:
        del self.namespace[name]
