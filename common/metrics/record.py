"""Records of metrics.jsonl."""

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from common.files import Count

Record = Mapping[str, Any]
WHEN = ("kind", "step", "epoch", "time")
EVALUATED = {"loss", "top1", "top5", "samples"}
Share = Annotated[float, Field(ge=0, le=1)]


def _to_nan(value: Any) -> Any:
    return math.nan if value is None else value


class RecordSchema(BaseModel):
    """A line of metrics.jsonl. Metrics are numbers, or null if not finite; a null loss is read as NaN."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    __pydantic_extra__: dict[str, float | None]
    kind: str
    step: Count
    epoch: float = Field(0.0, ge=0, le=1e12)
    time: float = Field(0.0, ge=0, le=1e11)
    skipped: Count = 0
    samples: Count = 0
    loss: Annotated[float, Field(allow_inf_nan=True), BeforeValidator(_to_nan)] = math.nan
    top1: Share = 0.0
    top5: Share = 0.0

    @model_validator(mode="after")
    def _is_measured(self) -> "RecordSchema":
        if self.kind == "eval" and (missing := EVALUATED - self.model_fields_set):
            raise ValueError(f"an evaluation without {', '.join(sorted(missing))}")
        return self


def select_metrics(record: Record) -> dict[str, float]:
    """Return the record's metrics as ``{"<kind>/<name>": value}``."""
    return {
        f"{record['kind']}/{name}": value
        for name, value in record.items()
        if name not in WHEN and isinstance(value, (int, float))
    }
