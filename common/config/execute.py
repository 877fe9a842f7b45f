"""Run a config file, and the recipes that it imports, so that what they derive follows what is set."""

import ast
import traceback
import types
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import configs
from common.colossal import AMP_TYPE
from common.config.fields import check_given, values_of
from common.config.schema import Config, find_key
from common.errors import UserError, did_you_mean
from common.files import read_bytes

FOLDER = Path(configs.__path__[0])
PREDEFINED = {"AMP_TYPE": AMP_TYPE}  # without an import, as Colossal-AI's benchmark prints its config files
# What replaces a key's value, in order: [(("depth",), 6)] for --set MODEL.depth=6, [((), 6)] for the value itself.
Overrides = Mapping[str, Sequence[tuple[tuple[str, ...], Any]]]


def parse_settings(settings: Sequence[str]) -> Overrides:
    """Return the overrides of ``KEY=VALUE`` settings; raise `UserError` for an unknown key."""
    overrides: dict[str, list[tuple[tuple[str, ...], Any]]] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise UserError(f"--set {setting}: write it as KEY=VALUE")
        takes_text = values_of(find_key(name)).startswith("text")
        key, *inside = name.split(".")
        overrides.setdefault(key, []).append((tuple(inside), _parse_value(text, takes_text)))
    return overrides


def override(changes: Sequence[tuple[tuple[str, ...], Any]], value: Any) -> Any:
    """Return ``value`` with what overrides it."""
    for path, new in changes:
        value = _replace(value, path, new)
    return value


def _replace(value: Any, path: tuple[str, ...], new: Any) -> Any:
    if not path:
        return new
    inside = value if isinstance(value, Mapping) else {}
    return {**inside, path[0]: _replace(inside.get(path[0]), path[1:], new)}


def _parse_value(text: str, takes_text: bool) -> Any:
    """Evaluate what a config file could assign; anything else is text, as is DATA.root=2012."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's, of text that is no Python
            value = eval(text.strip(), {"__builtins__": {"dict": dict}, **PREDEFINED})
    except Exception:
        return text
    return value if not takes_text or value is None or isinstance(value, str) else text


def execute(path: Path, overrides: Overrides) -> tuple[dict[str, Any], set[str]]:
    """Return what a config file assigns, with ``overrides`` in force where it does, and the names that others use.

    The plain values that it assigns hold in the recipes that it imports too (``from configs.x import *``), so that what
    those derive follows: after ``TOTAL_BATCH_SIZE = 512`` their ``BATCH_SIZE = TOTAL_BATCH_SIZE // 2`` is 256.

    Raises `UserError` for a file that does not run, with the line that fails.
    """
    try:
        return _execute(path, overrides)
    except (UserError, KeyboardInterrupt):
        raise
    except SyntaxError as error:
        raise UserError(f"{error.filename}, line {error.lineno}: SyntaxError: {error.msg}") from error
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(f"{place.filename}, line {place.lineno}: {type(error).__name__}: {error}") from error


def _execute(path: Path, overrides: Overrides) -> tuple[dict[str, Any], set[str]]:
    tree = ast.parse(read_bytes(path), str(path))
    plain = _read_ahead(tree.body, overrides)
    computed = set().union(*(_names(node, ast.Store) for node in tree.body)) - plain.keys() - overrides.keys()
    in_recipes = {**overrides, **{name: [((), value)] for name, value in plain.items()}}
    names: dict[str, Any] = {"__name__": "config", "__file__": str(path), **PREDEFINED}
    used: set[str] = set()
    recipes: dict[str, dict[str, Any]] = {}
    for node in tree.body:
        if not isinstance(node, ast.ImportFrom) or not (module := str(node.module)).startswith("configs."):
            _run(node, path, names, overrides)
            used |= _names(node, ast.Load) - _names(node, ast.Store)
            continue
        where = f"{path}, line {node.lineno}"
        if module not in recipes:
            recipes[module], read = _execute(_find_recipe(module, where), in_recipes)
            if late := sorted(computed & read):
                raise UserError(f"{where}: {module} derives other keys from {late[0]}: assign a plain value to it here")
            used |= read
        wanted = {alias.name: alias.asname or alias.name for alias in node.names}
        if missing := wanted.keys() - recipes[module].keys() - {"*"}:
            raise UserError(f"{where}: {module} has no {', '.join(missing)}")
        names |= recipes[module] if "*" in wanted else {own: recipes[module][name] for name, own in wanted.items()}
    skipped = (types.ModuleType, type)
    return {k: v for k, v in names.items() if not k.startswith("_") and not isinstance(v, skipped)}, used


def _read_ahead(body: list[ast.stmt], overrides: Overrides) -> dict[str, Any]:
    """Return the values that a file assigns without use of its imports."""
    plain: dict[str, Any] = {}
    late: set[str] = set()  # names in statements that use imports
    for node in body:
        stored = _names(node, ast.Store)
        with suppress(Exception):
            if isinstance(node, ast.Assign) and not late & stored:
                value = eval(compile(ast.Expression(node.value), "", "eval"), {**PREDEFINED, **plain})
                targets = [target.id for target in node.targets if isinstance(target, ast.Name)]
                plain |= {name: override(overrides.get(name, ()), value) for name in targets}
                continue
        late |= stored | _names(node, ast.Load)
        plain = {name: value for name, value in plain.items() if name not in stored}
    return plain


def _names(statement: ast.stmt, context: type[ast.expr_context]) -> set[str]:
    """Return the names that a statement reads (`ast.Load`) or assigns (`ast.Store`)."""
    nodes = ast.walk(statement)
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, context)}


def _run(node: ast.stmt, path: Path, names: dict[str, Any], overrides: Overrides) -> None:
    """Run a statement; the keys that it assigns get what overrides them."""
    try:
        exec(compile(ast.Module([node], []), str(path), "exec"), names)
    except Exception:  # blame it on a given value that is wrong by itself, if one is, not on what derives from it
        check_given(Config, {key: override(changes, None) for key, changes in overrides.items() if not changes[0][0]})
        raise
    for name in _names(node, ast.Store) & overrides.keys():
        names[name] = override(overrides[name], names[name])


def _find_recipe(module: str, where: str) -> Path:
    """Return the file of ``from configs.x import ...``, ``vit_b16`` for ``vit-b16.py`` too."""
    files = {f"configs.{file.stem.replace('-', '_')}": file for file in FOLDER.glob("[!_]*.py")}
    if module not in files:
        raise UserError(f"{where}: no recipe {module}{did_you_mean(module, files)}")
    return files[module]
