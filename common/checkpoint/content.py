"""What the files of a run and its checkpoints must hold, checked before any of it is used.

The folder of a run may come from anybody: a file in it may be a pipe, claim any size, or have the right checksum and
the wrong content.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field, model_validator
from safetensors import SafetensorError, safe_open
from typing_extensions import TypedDict

from common.checkpoint.model_state import EMA, MODEL, OPTIMIZER, check_shapes
from common.config.load import restore_config
from common.config.plan import DataSummary, Plan
from common.errors import UNPRINTABLE, UserError, printable
from common.files import Count, Schema, read_json, regular_size
from common.hardware import memory_bytes
from common.metrics.curves import read_metrics
from common.model.vit import is_frozen, parameter_count, parameter_shapes
from common.optim.build import state_names

RANDOM, TRAINER, CONFIG, METRICS = "random.safetensors", "trainer.json", "config.json", "metrics.jsonl"
GENERATOR = re.compile(r"\d+/(torch|cuda|mode\.\w+|python|python\.gauss|numpy|numpy\.gauss)")
Second = Annotated[float, Field(ge=0, le=1e11)]
ScalerKey = Literal["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"]
Shapes = dict[str, list[int]]


class Open(BaseModel):
    """An object that may have more fields than these: other versions write others."""

    model_config = ConfigDict(extra="allow", strict=True)


class Hardware(Open):
    cpu: str
    cpus: Count
    gpu: str | None


class PlanSoFar(TypedDict, total=False):
    gpus: Count
    last_step: Count


class Start(Open):
    step: Count = 0
    started: Second = 0
    gpus: Count = 0
    dtype: str = ""
    origin: str | None = Field(None, alias="from")


class RunInfo(Open):
    """config.json, as far as a report needs it."""

    config: dict[str, Any]
    name: str = ""
    plan: PlanSoFar = Field(PlanSoFar())
    started: Second = 0
    starts: Annotated[list[Start], FailFast()] = Field([])
    argv: Annotated[list[str], FailFast()] = Field([])
    commit: str | None = None
    versions: dict[str, str | None] = Field({})
    hardware: Hardware | None = None


def _check_class(name: str) -> str:
    if UNPRINTABLE.search(name):
        raise ValueError(f"{printable(name)[:200]} has a control character or a line separator")
    return name


@dataclass(frozen=True)
class DataInfo(DataSummary):
    earlier: Annotated[tuple[str, ...], FailFast()] = ()
    class_names: Annotated[list[Annotated[str, AfterValidator(_check_class)]], FailFast()] = ()  # pyright: ignore[reportAssignmentType]


class Starts(Open):
    starts: Annotated[list[Start], FailFast(), Field(min_length=1)]


class FullInfo(Starts, RunInfo):
    """config.json, all of it."""

    name: str  # pyright: ignore[reportGeneralTypeIssues]
    task: str = ""  # which older runs do not have
    plan: Plan  # pyright: ignore[reportIncompatibleVariableOverride]
    data: DataInfo
    started: Second  # pyright: ignore[reportGeneralTypeIssues]
    argv: Annotated[list[str], FailFast()]
    commit: str | None  # pyright: ignore[reportGeneralTypeIssues]
    versions: dict[str, str | None]
    hardware: Hardware  # pyright: ignore[reportGeneralTypeIssues]


class Position(Schema):
    step: Count
    epoch: Count
    epoch_step: Count
    evaluated_step: Count


class LoaderPosition(Schema):
    epoch: Count
    samples: Count


class Updates(Schema):
    updates: Count
    skipped: Count
    skipped_in_a_row: Count
    scaler: Annotated[dict[ScalerKey, int | float], Field(min_length=5)] | None


class Window(Schema):
    """What the next train record of a rank has seen so far."""

    steps: Count
    micro_batches: Count
    loss: float

    @model_validator(mode="after")
    def _counts(self) -> "Window":
        if self.steps > self.micro_batches:
            raise ValueError("more steps than micro-batches")
        return self


class Ranks(Schema):
    gpus: int = Field(ge=1, le=10**6)
    parallel: dict[str, Any] | None


class TrainerState(Schema):
    """trainer.json."""

    trainer: Position
    loader: LoaderPosition
    optimizer: Updates
    metrics: Annotated[list[Window], FailFast()]
    best_top1: float = Field(ge=-1, le=1)
    best_loss: float = 0.0  # which older runs do not have
    ranks: Ranks

    @model_validator(mode="after")
    def _has_all_ranks(self) -> "TrainerState":
        if len(self.metrics) != self.ranks.gpus:
            raise ValueError(f"metrics of {len(self.metrics)} ranks, not {self.ranks.gpus}")
        return self


def read_about(folder: Path, schema: type[RunInfo] = FullInfo) -> dict[str, Any]:
    """Return config.json of a run or a checkpoint; raise `UserError` where it is none."""
    if not (folder / CONFIG).exists():
        raise UserError(f"{folder} holds no run: {CONFIG} is missing")
    return read_json(folder / CONFIG, schema).model_dump(exclude_unset=True, by_alias=True)


def read_config(folder: Path, about: dict[str, Any], settings: Sequence[str] = ()) -> dict[str, Any]:
    """Return the config in what `read_about` returned, with ``settings`` applied and a model that can be built."""
    config = restore_config(about["config"], settings, where=str(folder / CONFIG))
    if config["MODEL"]["num_classes"] is None:
        raise UserError(f"{folder / CONFIG}: MODEL.num_classes is missing")
    return config


def check_weights(file: Path, model: dict[str, Any]) -> Shapes:
    """Return the shapes in a file of weights; raise `UserError` unless they are those of the config's ``MODEL``."""
    shapes = tensor_shapes(file)
    found, expected = sum(map(math.prod, shapes.values())), parameter_count(**model)
    if found != expected:  # or a MODEL of any size would be built to compare
        raise UserError(f"{file}: {found:,} parameters, not the {expected:,} of its config.json's MODEL")
    check_shapes(file, shapes, parameter_shapes(**model))
    return shapes


def tensor_shapes(file: Path) -> Shapes:
    """Return the shapes in a safetensors file by name, from its header, which fits the file."""
    regular_size(file, memory_bytes())
    try:
        with safe_open(file, "pt") as opened:
            return {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118, it is no dict
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: {str(error).splitlines()[0]}") from error


def check_content(path: Path) -> None:
    """Raise `UserError` unless the files of the checkpoint ``path`` are what a run writes, and belong together."""
    config = read_config(path, read_about(path))
    state = read_json(path / TRAINER, TrainerState)
    read_metrics(path)
    weights = check_weights(path / MODEL, config["MODEL"])
    if (path / EMA).exists():
        check_weights(path / EMA, config["MODEL"])
    _check_moments(path / OPTIMIZER, weights, config, state.trainer.step)
    for name in tensor_shapes(path / RANDOM):
        if not GENERATOR.fullmatch(name) or int(name.partition("/")[0]) >= state.ranks.gpus:
            raise UserError(f"{path / RANDOM}: {name} is the state of no generator of this run")


def _check_moments(file: Path, weights: Shapes, config: dict[str, Any], step: int) -> None:
    """Raise `UserError` unless every parameter that is trained has the optimizer's state, of its shape."""
    fixed = () if config["MODEL"]["position"] == "learned" else ("pos_embed",)
    trained = [name for name in weights if name not in fixed and not is_frozen(name, config["FREEZE"])]
    keys = state_names(config["OPTIMIZER"])
    wanted = {f"{key}/{name}": [] if key == "step" else weights[name] for key in keys for name in trained}
    found = tensor_shapes(file)
    if step or found:
        check_shapes(file, found, wanted)
