"""Run a config file with some of its keys overridden, and with it the recipes that it imports.

``--set NUM_EPOCHS=9`` replaces the value as soon as the file assigns it, so what the file derives
from it follows. An imported recipe is run with the same overrides, and with the importing file's
plain values as further ones: of ``from configs.vit_b16 import *`` and ``NUM_EPOCHS = 100``, the
recipe's ``WARMUP_EPOCHS = NUM_EPOCHS / 2`` is 50. A computed value cannot reach the recipe: if that
derives another key from its own, the file is refused.
"""

import ast
import builtins
import traceback
import types
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import configs
from common.config.fields import parse
from common.config.schema import Config
from common.engine.upstream import AMP_TYPE
from common.errors import UserError
from common.files import Values, read_bytes

CONFIGS = Path(configs.__path__[0])
RECIPES = {path.stem: path for path in sorted(CONFIGS.glob("[!_]*.py"))}
# Defined in each config without an import, as in Colossal-AI's printed examples.
PREDEFINED = {"AMP_TYPE": AMP_TYPE}
Overrides = Values  # values by dotted name: {"NUM_EPOCHS": 9, "MODEL.depth": 6}


def execute(path: Path, overrides: Overrides) -> tuple[dict[str, Any], set[str]]:
    """Return what a config file assigns, with ``overrides`` in force, and the names that it reads.

    Raises `UserError` for a file that does not run, with the line that fails.
    """
    used: dict[str, Any] = {}  # what imported recipes derive other keys from

    # CPython's import statement passes all five.
    def import_from(module: str, variables: Any, scope: Any, names: Any, level: int) -> Any:
        """Import ``names`` from a recipe, or as `builtins.__import__` from any other module."""
        recipe = _find_recipe(path, module) if names else None
        if recipe is None:
            return builtins.__import__(module, variables, scope, names, level)
        # --set takes precedence over the importing file, as it does in that file.
        values, its_reads = execute(recipe, {**plain, **overrides})
        used.update({name: values[name] for name in its_reads & values.keys()})
        # `import *` takes the public attributes of any object, not of a module only.
        return types.SimpleNamespace(__name__=module, **values)

    # An import statement calls the `__import__` among the builtins of its own namespace.
    functions = {**vars(builtins), "__import__": import_from}
    variables = ConfigNamespace(__file__=str(path), __builtins__=functions, **PREDEFINED)
    variables.overrides = overrides
    try:
        tree = ast.parse(read_bytes(path), str(path))
        plain, read = _read_ahead(tree)
        # At module level CPython stores names by `__setitem__` of a dict subclass; inside functions
        # (`global`) it does not.
        exec(compile(tree, str(path), "exec"), variables)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # A config that calls exit() has failed too.
        raise _explain(error, path, overrides) from error
    # Modules and types are what a file imports for its own use.
    values = {
        name: value
        for name, value in variables.items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType | type)
    }
    # The recipe derived other keys from its own value of such a name.
    for name, value in used.items():
        if values.get(name, value) != value:
            raise UserError(f"{path}: a recipe derives keys from {name}: assign a plain value")
    return values, read | used.keys()


class ConfigNamespace(dict[str, Any]):
    """The variables of a config file. Each is overridden as soon as it is assigned."""

    overrides: Overrides

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, override(name, value, self.overrides))


def override(name: str, value: Any, overrides: Overrides) -> Any:
    """Return the ``value`` of ``name`` with the overrides of it, and of what is in it, applied."""
    for key, new in overrides.items():
        first, _, inner = key.partition(".")
        if first == name and not inner:
            value = new
        elif first == name:
            part = inner.partition(".")[0]
            inside = value if isinstance(value, Mapping) else {}
            # a copy: a recipe's dict stays as it is
            value = {**inside, part: override(part, inside.get(part), {inner: new})}
    return value


def _read_ahead(tree: ast.Module) -> tuple[dict[str, Any], set[str]]:
    """Return what a file assigns as plain values, and the names that it derives others from."""
    plain: dict[str, Any] = {}
    read: set[str] = set()
    for statement in tree.body:
        names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
        loaded = {name.id for name in names if isinstance(name.ctx, ast.Load)}
        if isinstance(statement, ast.Assign):
            targets = {target.id for target in statement.targets if isinstance(target, ast.Name)}
            with suppress(Exception):  # a value that is computed from variables
                value = evaluate(ast.Expression(statement.value))
                # What was read before the assignment is the recipe's value.
                plain |= dict.fromkeys(targets - read, value)
            # MODEL = dict(MODEL, depth=6) derives nothing else from MODEL.
            loaded -= targets
        read |= loaded
    return plain, read


def evaluate(expression: str | ast.Expression) -> Any:
    """Return the value of an expression that uses no variable: a plain value."""
    # `dict(name="lamb")` and `float("inf")` are the only calls in a plain value.
    code = compile(expression, "", "eval")
    return eval(code, {"__builtins__": {"dict": dict, "float": float}, **PREDEFINED})


def _find_recipe(path: Path, module: str) -> Path | None:
    """Return the file of a module that is beside ``path`` or a recipe; None for Python's others.

    ``configs.vit_b16`` stands for vit-b16.py too.
    """
    beside = path.parent / f"{module}.py"
    recipes = {f"configs.{name.replace('-', '_')}": file for name, file in RECIPES.items()}
    return beside if beside.is_file() else recipes.get(module)


def _explain(error: BaseException, path: Path, overrides: Overrides) -> UserError:
    """Return what is wrong with the config file ``path``, which ended with ``error``."""
    # an override that is wrong by itself is to blame, not the line that derives from it
    parse(Config, overrides, is_part=True)
    frames = traceback.extract_tb(error.__traceback__)
    # This is the last line of the file that ran. The frames below it are a library's.
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    line = lines[-1] if lines else getattr(error, "lineno", 1)  # a SyntaxError's
    return UserError(f"{path}, line {line}: {type(error).__name__}: {error}")
