"""``--set KEY=VALUE``: what it sets, and how it is merged into a config's dicts."""

import ast
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic.fields import FieldInfo

from common.colossal import AMP_TYPE
from common.config.schema import find_key
from common.errors import UserError

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
        path = name.split(".")
        node = overrides
        for part in path[:-1]:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise UserError(f"--set {setting}: {part} has been set as a whole already: put the key into that dict")
        node[path[-1]] = (_parse_value(text, field),)
    return overrides


def override(setting: Any, value: Any) -> Any:
    """Return ``value`` with what overrides it."""
    if isinstance(setting, tuple):
        return setting[0]
    merged = dict(value) if isinstance(value, Mapping) else {}
    for key, inner in setting.items():
        merged[key] = override(inner, merged.get(key, {}))
    return merged


def _parse_value(text: str, field: FieldInfo) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's, of text that is no Python
            value = _evaluate(ast.parse(text.strip(), mode="eval").body)
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


def _evaluate(node: ast.expr) -> Any:
    """Evaluate literals, ``AMP_TYPE.TORCH``, and dicts, lists and tuples of them; raise ValueError for all else."""
    match node:
        case ast.Attribute(value=ast.Name(id="AMP_TYPE"), attr=name) if name in AMP_TYPE.__members__:
            return AMP_TYPE[name]
        case ast.Call(func=ast.Name(id="dict"), args=[], keywords=keywords) if all(word.arg for word in keywords):
            return {word.arg: _evaluate(word.value) for word in keywords}
        case ast.Dict(keys=keys, values=values) if all(keys):
            return {_evaluate(key): _evaluate(value) for key, value in zip(keys, values, strict=True)}  # pyright: ignore[reportArgumentType]
        case ast.List(elts=items):
            return [_evaluate(item) for item in items]
        case ast.Tuple(elts=items):
            return tuple(_evaluate(item) for item in items)
    return ast.literal_eval(node)
