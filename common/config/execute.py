"""Run a config file with some of its keys overridden, and with it the recipes that it imports."""

import ast
import builtins
import traceback
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import configs
from common.config.fields import check_given
from common.config.schema import Config
from common.engine.upstream import AMP_TYPE
from common.errors import UserError
from common.files import read_bytes
from common.text import did_you_mean

CONFIGS = Path(configs.__path__[0])
RECIPES = {path.stem: path for path in sorted(CONFIGS.glob("[!_]*.py"))}
# Defined in each config without an import, as in Colossal-AI's printed examples.
PREDEFINED = {"AMP_TYPE": AMP_TYPE}
# The changes to a key's value, in order: [(("depth",), 6)] for --set MODEL.depth=6, [((), 6)] for
# the whole value.
Overrides = Mapping[str, Sequence[tuple[tuple[str, ...], Any]]]


def evaluate(expression: str | ast.Expression) -> Any:
    """Return the value of an expression that uses no variable: a plain value."""
    code = compile(expression, "", "eval")
    return eval(code, {"__builtins__": {"dict": dict, "float": float}, **PREDEFINED})


def override(changes: Sequence[tuple[tuple[str, ...], Any]], value: Any) -> Any:
    """Return ``value`` with ``changes`` applied."""
    for path, new in changes:
        value = _replace(value, path, new)
    return value


def _replace(value: Any, path: tuple[str, ...], new: Any) -> Any:
    """Return ``value`` with what ``path`` leads to in it replaced; dicts on the way are copied."""
    if not path:
        return new
    inside = value if isinstance(value, Mapping) else {}
    return {**inside, path[0]: _replace(inside.get(path[0]), path[1:], new)}


def replacing(values: Mapping[str, Any]) -> Overrides:
    """Return the overrides that set whole values."""
    return {name: [((), value)] for name, value in values.items()}


class Variables(dict[str, Any]):
    """The variables of a config file. Each is overridden as soon as it is assigned."""

    overrides: Overrides

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, override(self.overrides.get(name, ()), value))


def execute(path: Path, overrides: Overrides) -> tuple[dict[str, Any], set[str]]:
    """Return what a config file assigns, with ``overrides`` in force, and the names that it reads.

    Its plain values override those of the recipes that it imports, so that what is derived there
    follows: with ``NUM_EPOCHS = 100``, a recipe's ``WARMUP_EPOCHS = NUM_EPOCHS / 2`` is 50.

    Raises `UserError` for a file that does not run, with the line that fails.
    """
    given = dict(overrides)
    try:
        return _execute(path, overrides, given)
    except (UserError, KeyboardInterrupt):
        raise
    except SyntaxError as error:
        where = f"{error.filename}, line {error.lineno}"
        raise UserError(f"{where}: SyntaxError: {error.msg}") from error
    except BaseException as error:
        # a given value that is wrong by itself is to blame, not the line that derives from it
        check_given(Config, {name: new[0][1] for name, new in given.items() if not new[0][0]})
        frames = traceback.extract_tb(error.__traceback__)
        line = next((one.lineno for one in reversed(frames) if one.filename == str(path)), 1)
        reason = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
        raise UserError(f"{path}, line {line}: {reason}{error}") from error


def _execute(path: Path, overrides: Overrides, given: dict[str, Any]) -> tuple[dict[str, Any], set]:
    """Do what `execute` does; add the file's plain values to ``given``, which overrides recipes."""
    tree = ast.parse(read_bytes(path), str(path))
    outline = _read_ahead(tree.body)
    for name, value in outline.plain.items():
        given[name] = [((), override(overrides.get(name, ()), value))]

    def import_from(
        module: str, variables: Any = None, scope: Any = None, names: Any = (), level: int = 0
    ) -> Any:
        """Import ``names`` from a module, as `builtins.__import__` does, or from a recipe."""
        recipe = _find_recipe(path, module) if names else None
        if recipe is None:
            return builtins.__import__(module, variables, scope, names, level)
        values, read = execute(recipe, given)
        for name in sorted(outline.computed & read - overrides.keys()):
            hint = f"derives other keys from {name}: assign a plain value to it here"
            raise ImportError(f"{module} {hint}")
        outline.used |= read
        return types.SimpleNamespace(__name__=module, **values)

    functions = {**vars(builtins), "__import__": import_from}
    variables = Variables(__file__=str(path), __builtins__=functions, **PREDEFINED)
    variables.overrides = overrides
    exec(compile(tree, str(path), "exec"), variables)
    hidden = (types.ModuleType, type)  # what a file imports for its own use
    values = {
        name: value
        for name, value in variables.items()
        if not name.startswith("_") and not isinstance(value, hidden)
    }
    return values, outline.used


@dataclass
class Outline:
    """What a file assigns as plain values, what it computes, and the names that it reads."""

    plain: dict[str, Any]
    computed: set[str]
    used: set[str]


def _read_ahead(body: list[ast.stmt]) -> Outline:
    """Return the outline of a file, without running it."""
    outline = Outline({}, set(), set())
    for statement in body:
        assigned = _names(statement, ast.Store)
        read = _names(statement, ast.Load)
        if isinstance(statement, ast.Assign):
            read -= assigned  # SIDE = 2 * SIDE is no use of SIDE
            is_simple = all(isinstance(target, ast.Name) for target in statement.targets)
            # what was read before the assignment is the recipe's value
            if is_simple and not assigned & outline.used:
                with suppress(Exception):  # a value that is computed from variables
                    value = evaluate(ast.Expression(statement.value))
                    outline.plain |= dict.fromkeys(assigned, value)
                    continue
        outline.computed |= assigned
        outline.used |= read
    for name in outline.computed:
        outline.plain.pop(name, None)
    return outline


def _names(statement: ast.stmt, context: type[ast.expr_context]) -> set[str]:
    """Return the variables that a statement reads (`ast.Load`) or assigns (`ast.Store`)."""
    nodes = ast.walk(statement)
    return {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, context)
    }


def _find_recipe(path: Path, module: str) -> Path | None:
    """Return the file of a module that is beside ``path`` or a recipe; None for Python's others.

    ``configs.vit_b16`` stands for vit-b16.py too.
    """
    beside = path.parent / f"{module}.py"
    if beside.is_file():
        return beside
    if not module.startswith("configs."):
        return None
    recipes = {f"configs.{name.replace('-', '_')}": file for name, file in RECIPES.items()}
    if module not in recipes:
        raise ImportError(f"no recipe {module}{did_you_mean(module, recipes)}")
    return recipes[module]
