"""Run a config file, and the recipes that it imports, so that what they derive follows what is set."""

import ast
import traceback
import types
import warnings
from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from pydantic.fields import FieldInfo

import configs
from common.colossal import AMP_TYPE
from common.config.fields import check_given
from common.config.schema import Config, find_key
from common.errors import UserError, did_you_mean
from common.files import read_bytes

FOLDER = Path(configs.__path__[0])
NAME = "config"  # of the module that a config file is run as
PREDEFINED = {"AMP_TYPE": AMP_TYPE}  # without an import, as Colossal-AI's benchmark prints its config files
# {"A": {"b": (value,)}} for A.b=value: a leaf is a tuple of one value, to tell it from a dict
Overrides = Mapping[str, Any]


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Return the overrides of ``KEY=VALUE`` settings; raise `UserError` for an unknown key."""
    overrides: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise UserError(f"--set {setting}: write it as KEY=VALUE")
        try:
            field = find_key(name)
        except UserError as error:
            raise UserError(f"--set {error}") from None
        *sections, last = name.split(".")
        node = overrides
        for part in sections:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise UserError(f"--set {setting}: {part} has been set as a whole already: put the key into that dict")
        node[last] = (_parse_value(text, field),)
    return overrides


def override(setting: Any, value: Any) -> Any:
    """Return ``value`` with what overrides it."""
    if isinstance(setting, tuple):
        return setting[0]
    merged = dict(value) if isinstance(value, Mapping) else {}
    return merged | {key: override(inner, merged.get(key)) for key, inner in setting.items()}


def _parse_value(text: str, field: FieldInfo) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's, of text that is no Python
            value = ast.literal_eval(_Literals().visit(ast.parse(text.strip(), mode="eval")))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text
    # DATA.root=2012 is a folder's name, not a number
    kinds = list(_kinds(field.annotation))
    return text if str in kinds and type(value) not in kinds else value


def _kinds(annotation: Any) -> Iterator[Any]:
    """Yield a type, those of a union, and those that are annotated in it."""
    yield annotation
    for inner in get_args(annotation):
        yield from _kinds(inner)


class _Literals(ast.NodeTransformer):
    """Turn ``AMP_TYPE.TORCH`` and ``dict(a=1)`` into literals."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        is_mode = ast.unparse(node.value) == "AMP_TYPE" and node.attr in AMP_TYPE.__members__
        return ast.Constant(AMP_TYPE[node.attr]) if is_mode else node  # pyright: ignore[reportArgumentType]

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if ast.unparse(node.func) != "dict" or node.args:
            return node
        return ast.Dict([ast.Constant(word.arg) for word in node.keywords], [word.value for word in node.keywords])


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


def _execute(path: Path, overrides: Overrides) -> tuple[dict[str, Any], set[str]]:
    tree = ast.parse(read_bytes(path), str(path))
    plain = _read_ahead(tree.body, overrides)
    computed = set().union(*(_names(node, ast.Store) for node in tree.body)) - plain.keys() - overrides.keys()
    names: dict[str, Any] = {"__name__": NAME, "__file__": str(path), **PREDEFINED}
    used: set[str] = set()
    recipes: dict[str, dict[str, Any]] = {}
    for node in tree.body:
        if not isinstance(node, ast.ImportFrom) or not (module := str(node.module)).startswith("configs."):
            _run(node, path, names, overrides)
            used |= _names(node, ast.Load) - _names(node, ast.Store)
            continue
        where = f"{path}, line {node.lineno}"
        if module not in recipes:
            recipes[module], read = _execute(_find_recipe(module, where), {**overrides, **plain})
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
    """Return what a file assigns without use of its imports, as overrides."""
    plain: dict[str, Any] = {}
    late: set[str] = set()  # names in statements that use imports
    for node in body:
        with suppress(Exception):
            if isinstance(node, ast.Assign) and not late & _names(node, ast.Store):
                names = {**PREDEFINED, **{name: value for name, (value,) in plain.items()}}
                value = eval(compile(ast.Expression(node.value), "", "eval"), names)
                targets = [target.id for target in node.targets if isinstance(target, ast.Name)]
                plain |= {name: (override(overrides.get(name, (value,)), value),) for name in targets}
                continue
        late |= _names(node, ast.Store) | _names(node, ast.Load)
        plain = {name: value for name, value in plain.items() if name not in _names(node, ast.Store)}
    return plain


def _names(statement: ast.stmt, context: type[ast.expr_context]) -> set[str]:
    """Return the names that a statement reads (`ast.Load`) or assigns (`ast.Store`)."""
    nodes = ast.walk(statement)
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, context)}


def _run(node: ast.stmt, path: Path, names: dict[str, Any], overrides: Overrides) -> None:
    assignments: Any = _Assignments(names, overrides)
    try:
        exec(compile(ast.Module([node], []), str(path), "exec"), names, assignments)
    except Exception:  # blame it on a given value that is wrong by itself, if one is, not on what derives from it
        check_given(Config, {key: value[0] for key, value in overrides.items() if isinstance(value, tuple)})
        raise


def _find_recipe(module: str, where: str) -> Path:
    """Return the file of ``from configs.x import ...``, ``vit_b16`` for ``vit-b16.py`` too."""
    files = {f"configs.{file.stem.replace('-', '_')}": file for file in FOLDER.glob("[!_]*.py")}
    if module not in files:
        raise UserError(f"{where}: no recipe {module}{did_you_mean(module, files)}")
    return files[module]


class _Assignments(UserDict[str, Any]):
    """The names of a config file; an assignment to an overridden key stores the override instead."""

    def __init__(self, names: dict[str, Any], overrides: Overrides):
        self.data, self.overrides = names, overrides

    def __setitem__(self, name: str, value: Any) -> None:
        self.data[name] = override(self.overrides[name], value) if name in self.overrides else value
