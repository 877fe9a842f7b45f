"""Declare the config's keys (pydantic), and explain in one line a value that does not fit."""

import reprlib
import types
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import (
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    WrapValidator,
    model_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo

from common.errors import UserError
from common.files import Schema
from common.text import did_you_mean

# What others call a key.
ALIASES = {
    **dict.fromkeys(("hidden_size", "embed_dim"), "MODEL.width"),
    **dict.fromkeys(("num_heads", "num_attention_heads"), "MODEL.heads"),
    **dict.fromkeys(("num_layers", "num_hidden_layers"), "MODEL.depth"),
    "pretrained": "MODEL.timm",
    "lr": "LEARNING_RATE",
    "batch_size": "TOTAL_BATCH_SIZE",
}
# The default of an option that depends on `Options.CHOICE`.
OF_CHOICE: Any = None
NONE = type(None)
SHORT = reprlib.Repr()
SHORT.maxstring = 100
# Finite; an integer stays one.
Number = Annotated[
    float,
    Field(allow_inf_nan=False),
    WrapValidator(lambda value, check: (check(value), value)[1]),
    PlainSerializer(lambda value: value),
]
Positive = Annotated[Number, Gt(0)]
NonNegative = Annotated[Number, Ge(0)]
Fraction = Annotated[NonNegative, Lt(1)]
Share = Annotated[NonNegative, Le(1)]
Natural = Annotated[int, Ge(1)]
# Or a list of as many numbers.
Pair = Annotated[tuple[Number, Number], Field(strict=False)]
Triple = Annotated[tuple[Number, Number, Number], Field(strict=False)]


class Section(Schema):
    """Keys that belong together: a type and a default, then what the key means as its docstring.

    Unknown ones are refused, and no value is converted but a list to a tuple.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Put the meaning of each key in one line."""
        for field in cls.model_fields.values():
            field.description = " ".join((field.description or "").split())


S = TypeVar("S", bound=Section)


def key(default: Any, *, unit: str = "", says: str = "", **bounds: Any) -> Any:
    """Declare a key: default (``...``: required), unit and bounds (ge, gt, le, lt).

    ``says`` describes the values where type and bounds do not.
    """
    return Field(default, json_schema_extra={"unit": unit, "says": says}, **bounds)


def parse(section: type[S], values: Mapping[str, Any], where: str = "") -> S:
    """Return ``values`` as a ``section``.

    Raises `UserError` with one line: the key, its value and what it may be; for an unknown or a
    missing key ``where``, the file.
    """
    try:
        return section.model_validate(dict(values))
    except ValidationError as error:
        # an unknown key first: it may be a missing one, misspelt
        problem = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
        raise UserError(_explain(problem, section, values, f"{where}: " if where else "")) from None


def check_given(section: type[Section], values: Mapping[str, Any]) -> None:
    """Raise `UserError` for a wrong one of ``values``; any key may be missing or unknown."""
    try:
        section.model_validate(dict(values))
    except ValidationError as error:
        for problem in error.errors():
            if problem["type"] not in ("missing", "extra_forbidden"):
                raise UserError(_explain(problem, section, values, "")) from None


def section_of(field: FieldInfo) -> type[Section] | None:
    """Return the section that a key's value is, or None for any other value."""
    kinds = (field.annotation, *get_args(field.annotation))
    return next(
        (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None
    )


def values_of(field: FieldInfo) -> str:
    """Describe the values that a key may have."""
    extra: Any = field.json_schema_extra or {}
    text = extra.get("says") or _describe(field.annotation, field.metadata)
    unit = extra.get("unit")
    return f"{text} ({unit})" if unit else text


def _describe(kind: Any, metadata: Any = ()) -> str:
    """Describe the values of a type, with the bounds in its ``metadata``."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _describe(parts[0], [*parts[1:], *metadata])
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(part, metadata) for part in parts)
    if origin is Literal:
        return ", ".join(map(repr, parts))
    if origin is list:
        return f"list of {_describe(*parts)}"
    if issubclass(kind, Enum):
        return ", ".join(str(member) for member in kind)
    if issubclass(kind, Section):
        return "dict(" + ", ".join(f"{name}=..." for name in list(kind.model_fields)[:3]) + ")"
    names = {int: "integer", float: "number", bool: "True or False", str: "text", NONE: "None"}
    return names[kind] + (_bounds(metadata) if kind in (int, float) else "")


def _bounds(metadata: Any) -> str:
    """Return the bounds as " >= 1 and <= 8"."""
    bounds = []
    for name, sign in {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}.items():
        bounds += [f" {sign} {getattr(one, name)}" for one in metadata if hasattr(one, name)]
    return " and".join(bounds)


def _explain(problem: Any, section: type[Section], values: Mapping[str, Any], where: str) -> str:
    """Return one line on an error of pydantic's: the key, its value, and what it may be."""
    prefix = ""  # the dotted name of the key at fault, from the outermost section inwards
    rest = [str(part) for part in problem["loc"]]  # ends with pydantic's names for parts of a value
    inside: type[Section] | None = section
    field, value = None, values
    while inside and rest and rest[0] in inside.model_fields:
        name = rest.pop(0)
        prefix += f"{name}."
        field = inside.model_fields[name]
        value = value.get(name) if isinstance(value, Mapping) else value
        inside = section_of(field)
    key = prefix.removesuffix(".")
    if problem["type"] == "extra_forbidden" and inside:
        unknown = prefix + ".".join(rest)
        known = [prefix + name for name in inside.model_fields]
        return f"{where}unknown key {unknown}{suggest_key(unknown, known)}"
    if problem["type"] == "missing" and field and not rest:
        return f"{where}{key} is missing: {field.description}"
    if problem["type"] == "value_error" and inside:  # of the section as a whole
        return prefix + str(problem["ctx"]["error"])
    assert field
    return f"{key}={SHORT.repr(value)}: expected {values_of(field)}"


def suggest_key(name: str, known: Iterable[str]) -> str:
    """Return `did_you_mean` for a key; names from other libraries are known too."""
    alias = ALIASES.get(name.rpartition(".")[2].lower())
    return did_you_mean(alias, [alias]) if alias else did_you_mean(name, known)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return ``{"a.b": value}`` for ``{"a": {"b": value}}``."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        is_nested = isinstance(value, Mapping)
        flat |= flatten(value, f"{prefix}{key}.") if is_nested else {f"{prefix}{key}": value}
    return flat


class Options(Section):
    """Options of which only those that a config names are passed on.

    ``TAKES`` maps values of the key ``CHOICE`` to the options that only they have, with their
    defaults (None: it depends on further options).
    """

    CHOICE: ClassVar[str] = ""
    TAKES: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Note the default of an option with each choice that has it."""
        super().__pydantic_init_subclass__()
        for name, field in cls.model_fields.items():
            choices: dict[Any, list[str]] = {}  # by default
            for choice, defaults in cls.TAKES.items():
                if name in defaults:
                    choices.setdefault(defaults[name], []).append(choice.removeprefix("AMP_TYPE."))
            if len(choices) == 1:
                # for documentation: an option that no config names is None
                field.default = next(iter(choices))
            shown = []
            for default, those in choices.items():
                text = "by variant" if default is None else f"`{default!r}`"
                shown.append(f"{text} ({', '.join(those)})")
            extra: Any = field.json_schema_extra or {}
            field.json_schema_extra = {**extra, "default": ", ".join(shown)}

    @model_validator(mode="after")
    def _belong(self) -> "Options":
        """Refuse an option of another choice."""
        choice = str(getattr(self, self.CHOICE, ""))
        taken = self.TAKES.get(choice, {})
        wrong = self.model_fields_set & set().union(*self.TAKES.values()) - taken.keys()
        if wrong:
            known = ", ".join(taken) or "none"
            raise ValueError(
                f"{min(wrong)} has no effect with {self.CHOICE}={choice}, which takes {known}"
            )
        return self

    @model_serializer
    def _named(self) -> dict[str, Any]:
        """Return the options that the config names, in the order of the schema."""
        named = [name for name in type(self).model_fields if name in self.model_fields_set]
        return {name: getattr(self, name) for name in named}
