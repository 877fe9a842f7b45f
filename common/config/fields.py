"""Declare the config's keys (pydantic), and explain in one line a value that does not fit."""

import types
from collections.abc import Iterable, Mapping
from itertools import accumulate
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
from common.files import Schema, Values
from common.text import did_you_mean

# What other libraries call a key, where another key has a more similar name.
ALIASES = {
    "hidden_size": "MODEL.width",
    "embed_dim": "MODEL.width",
    "num_heads": "MODEL.heads",
    "num_attention_heads": "MODEL.heads",
    "num_layers": "MODEL.depth",
    "num_hidden_layers": "MODEL.depth",
    "gradient_clipping": "clip_grad_norm",
    "gradient_clip_val": "clip_grad_norm",
    "patch_size": "MODEL.patch_size",
    "drop_rate": "MODEL.dropout",
    "lr": "LEARNING_RATE",
}
# The default of an option that depends on `Options.CHOICE`.
OF_CHOICE: Any = None
# Finite; an integer stays one: pydantic would return a float, and 30 be shown as 30.0.
Number = Annotated[
    float,
    Field(allow_inf_nan=False),
    WrapValidator(lambda value, check: (check(value), value)[1]),
    PlainSerializer(lambda value: value),
]
Positive = Annotated[Number, Gt(0)]
NonNegative = Annotated[Number, Ge(0)]
BelowOne = Annotated[NonNegative, Lt(1)]
UpToOne = Annotated[NonNegative, Le(1)]
Natural = Annotated[int, Ge(1)]
T = TypeVar("T")
# A tuple of the type, or a list of as many values; or the other way around.
AnySequence = Annotated[T, Field(strict=False)]
Pair = AnySequence[tuple[Number, Number]]
Triple = AnySequence[tuple[Number, Number, Number]]


# Declares a key. To a type checker, `Field` in its place would have no default.
key: Any = Field


class Section(Schema):
    """Keys that belong together: a type and a default, then what the key means as its docstring.

    Unknown ones are refused, and no value is converted but a list to a tuple.
    """

    # The string literal below a key becomes its description.
    model_config = ConfigDict(use_attribute_docstrings=True)


S = TypeVar("S", bound=Section)


def parse(section: type[S], values: Values, where: str = "", *, is_part: bool = False) -> S:
    """Return ``values`` as a ``section``.

    Raises `UserError` with one line: the key, its value and what it may be; for an unknown or a
    missing key ``where``, the file. With ``is_part`` any key may be missing or unknown, and only
    wrong values are refused.
    """
    try:
        return section.model_validate(dict(values))
    except ValidationError as error:
        problems = error.errors()
    if is_part:
        known = ("missing", "extra_forbidden")
        problems = [problem for problem in problems if problem["type"] not in known]
    # an unknown key first: it may be a missing one, misspelt
    problems.sort(key=lambda problem: problem["type"] != "extra_forbidden")
    # The first alone: a line for each would hide the one to begin with.
    for problem in problems:
        raise UserError(_explain(problem, section, values, f"{where}: " if where else ""))
    return section.model_construct()  # with ``is_part`` alone: no value is wrong


def all_keys(section: type[Section], prefix: str = "") -> dict[str, FieldInfo]:
    """Return every key of ``section`` by its dotted name, those inside a dict after it."""
    keys = {}
    for name, field in section.model_fields.items():
        keys[prefix + name] = field
        # The arguments too: those of "Parallel | None" are a section and None.
        for annotation in (field.annotation, *get_args(field.annotation)):
            if isinstance(annotation, type) and issubclass(annotation, Section):
                keys |= all_keys(annotation, f"{prefix}{name}.")
    return keys


def values_of(field: FieldInfo) -> str:
    """Describe the values that a key may have; its title does where type and bounds do not."""
    return field.title or _describe(field.annotation, field.metadata)


def _describe(annotation: Any, metadata: Any = ()) -> str:
    """Describe the values of a type, with the bounds in its ``metadata``."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _describe(parts[0], [*parts[1:], *metadata])
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(part, metadata) for part in parts)
    if origin is Literal:
        return ", ".join(map(repr, parts))
    if origin is list:
        return f"list of {_describe(*parts)}"
    if issubclass(annotation, Section):
        return "dict"
    names = {
        int: "integer",
        float: "number",
        bool: "True or False",
        str: "text",
        types.NoneType: "None",
    }
    return names[annotation] + (_bounds(metadata) if annotation in (int, float) else "")


def _bounds(metadata: Any) -> str:
    """Return the bounds as " >= 1 and <= 8"."""
    bounds = []
    for name, sign in {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}.items():
        bounds += [f" {sign} {getattr(one, name)}" for one in metadata if hasattr(one, name)]
    return " and".join(bounds)


def _explain(problem: Any, section: type[Section], values: Values, where: str) -> str:
    """Return one line on an error of pydantic's: the key, its value, and what it may be."""
    keys = all_keys(section)
    # "OPTIMIZER", "OPTIMIZER.betas", ...; the last may end with pydantic's names for what it is.
    names = list(accumulate(map(str, problem["loc"]), "{}.{}".format))
    key = next((name for name in reversed(names) if name in keys), "")
    if problem["type"] == "extra_forbidden":
        return f"{where}unknown key {names[-1]}{suggest_key(names[-1], keys)}"
    if problem["type"] == "missing" and key == names[-1]:
        return f"{where}{key} is missing: {keys[key].description}"
    # The section ``key`` as a whole is wrong.
    if problem["type"] == "value_error":
        return f"{key}.".removeprefix(".") + str(problem["ctx"]["error"])
    value = flatten(values).get(key, problem["input"])
    return f"{key}={value!r}"[:150] + f": expected {values_of(keys[key])}"


def suggest_key(name: str, known: Iterable[str]) -> str:
    """Return `did_you_mean` for a key, which may have its name in another library."""
    return did_you_mean(ALIASES.get(name.rpartition(".")[2].lower(), name), known)


def flatten(values: Values, prefix: str = "") -> dict[str, Any]:
    """Return ``{"a.b": value}`` for ``{"a": {"b": value}}``."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


class Options(Section):
    """Options of which only those that a config names are passed on.

    ``TAKES`` maps values of the key ``CHOICE`` to the options that only they have, with their
    defaults (None: it depends on further options).
    """

    CHOICE: ClassVar[str] = ""
    TAKES: ClassVar[Mapping[str, Values]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Note the default of an option with each choice that has it."""
        for name, field in cls.model_fields.items():
            by_choice = [
                f"`{defaults[name]!r}` ({choice.removeprefix('AMP_TYPE.')})"
                for choice, defaults in cls.TAKES.items()
                if name in defaults
            ]
            if by_choice:
                field.json_schema_extra = {"default": ", ".join(by_choice)}

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
