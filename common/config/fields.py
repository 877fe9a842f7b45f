"""How the config's keys are declared (pydantic), and the one line for a value that does not fit."""

import types
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, WrapValidator, create_model
from pydantic.fields import FieldInfo

from common.errors import UserError, did_you_mean

INT64 = 2**63 - 1
ALIASES = {  # what others call a key
    **dict.fromkeys(("hidden_size", "embed_dim"), "MODEL.width"),
    **dict.fromkeys(("num_heads", "num_attention_heads"), "MODEL.heads"),
    **dict.fromkeys(("num_layers", "num_hidden_layers"), "MODEL.depth"),
    "lr": "LEARNING_RATE",
    "batch_size": "TOTAL_BATCH_SIZE",
    "epochs": "NUM_EPOCHS",
}
NONE = type(None)
# A validator, because pydantic lets the last of several bounds replace the others.
Int = Annotated[int, AfterValidator(lambda value: _check_int64(value))]
# Finite; an integer stays one.
Number = Annotated[float, Field(allow_inf_nan=False), WrapValidator(lambda value, check: (check(value), value)[1])]
Pair = Annotated[tuple[Number, Number], Field(strict=False)]  # or a list
Triple = Annotated[tuple[Number, Number, Number], Field(strict=False)]


def _check_int64(value: int) -> int:
    if abs(value) > INT64:
        raise ValueError
    return value


class Section(BaseModel):
    """Keys that belong together. Unknown keys are refused, and no value is converted but a list to a tuple."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


S = TypeVar("S", bound=Section)


def key(default: Any, meaning: str, *, unit: str = "", says: str = "", of: tuple[str, ...] = (), **bounds: Any) -> Any:
    """Declare a key: its ``default`` (``...``: required), meaning, unit and bounds (``ge``, ``gt``, ``le``, ``lt``).

    ``says`` describes the values where type and bounds do not; ``of`` names the choices that an option belongs to.
    """
    extra = {"unit": unit, "says": says, "of": list(of)}
    return Field(default, description=meaning, json_schema_extra=extra, validate_default=False, **bounds)


def parse(section: type[S], values: Mapping[str, Any], where: str = "") -> S:
    """Return ``values`` as a ``section``; raise `ValueError` with one line: key, value, and what it may be.

    ``where`` names the file in which a key is unknown or missing.
    """
    try:
        return section.model_validate(dict(values))
    except ValidationError as error:
        raise ValueError(_explain(error, section, values, f"{where}: " if where else "")) from None


def check_given(section: type[Section], values: Mapping[str, Any]) -> None:
    """Raise `UserError` for a wrong one of ``values``, as `parse` does; any key may be missing or unknown."""
    given = {name: value for name, value in values.items() if name in section.model_fields}
    fields: dict[str, Any] = {
        name: (section.model_fields[name].annotation, section.model_fields[name]) for name in given
    }
    try:
        parse(create_model("Given", __base__=Section, **fields), given)
    except ValueError as error:
        raise UserError(str(error)) from None


def extra_of(field: FieldInfo, name: str) -> Any:
    """Return what `key` declared as ``unit``, ``says`` or ``of``."""
    return (field.json_schema_extra or {}).get(name)


def section_of(field: FieldInfo) -> type[Section] | None:
    """Return the section that a key's value is, or None for any other value."""
    kinds = (field.annotation, *get_args(field.annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)


def values_of(field: FieldInfo) -> str:
    """Describe the values that a key may have."""
    text = extra_of(field, "says") or _describe(field.annotation, field.metadata)
    unit = extra_of(field, "unit")
    return f"{text} ({unit})" if unit else text


def _describe(kind: Any, metadata: Any = ()) -> str:
    if get_origin(kind) is Annotated:
        kind, *more = get_args(kind)
        return _describe(kind, [*more, *metadata])
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(_describe(part, metadata) for part in get_args(kind))
    if get_origin(kind) is Literal:
        return ", ".join(repr(choice) for choice in get_args(kind))
    if get_origin(kind) is tuple:
        return "(" + ", ".join(_describe(part) for part in get_args(kind)) + ")"
    if get_origin(kind) is list:
        return f"list of {_describe(*get_args(kind))}"
    if issubclass(kind, Enum):
        return ", ".join(str(member) for member in kind)
    if issubclass(kind, Section):
        return "dict(" + ", ".join(f"{name}=..." for name in list(kind.model_fields)[:3]) + ")"
    names = {int: "integer", float: "number", bool: "True or False", str: "text", NONE: "None", dict: "dict"}
    return names[kind] + (_bounds(metadata) if kind in (int, float) else "")


def _bounds(metadata: Any) -> str:
    inner = [item for part in metadata for item in (part.metadata if isinstance(part, FieldInfo) else [part])]
    signs = {Gt: (">", "gt"), Ge: (">=", "ge"), Lt: ("<", "lt"), Le: ("<=", "le")}
    said = [(sign, getattr(item, name)) for kind, (sign, name) in signs.items() for item in inner if type(item) is kind]
    return "".join(f"{' and' * (number > 0)} {sign} {bound}" for number, (sign, bound) in enumerate(said))


def _explain(error: ValidationError, section: type[Section], values: Mapping[str, Any], where: str) -> str:
    """Return one line for all unknown keys, else for the first error."""
    problems = error.errors(include_url=False)
    if unknown := _find_unknown(section, values, problems):
        if len(unknown) == 1:
            return f"{where}unknown key {''.join(*unknown.items())}"
        return f"{where}unknown keys {', '.join(name + (hint and f' ({hint[2:]})') for name, hint in unknown.items())}"
    first = problems[0]
    names, place, inside, field, value = _find(section, values, first["loc"])
    dotted = ".".join(names)
    if first["type"] == "missing" and not place and field:
        return f"{where}{dotted} is missing: {field.description}"
    if first["type"] == "value_error" and inside:  # of the section as a whole
        return ".".join([*names, str(first["ctx"]["error"])])  # pyright: ignore[reportTypedDictNotRequiredAccess]
    assert field
    hint = did_you_mean(_shorten(value).strip("'"), _choices(field))
    wide = " of at most 64 bits" if isinstance(value, int) and abs(value) > INT64 else ""
    return f"{dotted}={_shorten(value)}: expected {values_of(field)}{wide}{hint}"


def _find_unknown(section: type[Section], values: Any, problems: Iterable[Any]) -> dict[str, str]:
    """Return the unknown keys, and what each may mean."""
    unknown = {}
    for problem in problems:
        names, place, inside, *_ = _find(section, values, problem["loc"])
        if problem["type"] == "extra_forbidden" and inside and len(place) == 1:
            name = ".".join([*names, *place])
            unknown[name] = suggest_key(name, [".".join([*names, known]) for known in inside.model_fields])
    return unknown


def _find(section: type[Section], values: Any, loc: Iterable[Any]) -> tuple[list[str], list[str], Any, Any, Any]:
    """Return the known part of the place ``loc``, the rest of it, and section, key and value of the known part."""
    names: list[str] = []
    field, inside, value, place = None, section, values, [str(part) for part in loc]
    while inside and place and place[0] in inside.model_fields:
        name = place.pop(0)
        field, value = inside.model_fields[name], value.get(name) if isinstance(value, Mapping) else value
        names.append(name)
        inside = section_of(field)
    return names, place, inside, field, value


def suggest_key(name: str, known: Iterable[str]) -> str:
    """Return what `did_you_mean` does, of a key; names from other libraries are known too."""
    alias = ALIASES.get(name.rpartition(".")[2].lower())
    return did_you_mean(alias, [alias]) if alias else did_you_mean(name, known)


def _choices(field: FieldInfo) -> list[str]:
    kinds = (field.annotation, *get_args(field.annotation))
    return [str(choice) for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]


def _shorten(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python prints no integer of more than 4,300 digits
        return f"<integer of {value.bit_length()} bits>" if isinstance(value, int) else f"<{type(value).__name__}>"
    return text if len(text) <= 100 else f"{text[:60]}...{text[-20:]}"
