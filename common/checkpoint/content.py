"""The files of a run and its checkpoints: their fields, and the checks when they are read.

checkpoints/step-00001234/
    model.safetensors       parameters under timm's names, and statistics of batch norms: those that
                            are evaluated, with EMA the moving averages
    raw.safetensors         those that are trained, with EMA
    optimizer.safetensors   `<state>/<parameter>`, e.g. `exp_avg/head.weight`
    random.safetensors      `<rank>/<generator>`: states of every rank's random number generators
    trainer.json            step, position in the data, loss scale, skipped updates, best
                            evaluation, running loss
    config.json             copy of the run's: its record (below)
    metrics.jsonl           copy of the run's, so far
    COMPLETE                written last: SHA-256 of the others, for `sha256sum -c COMPLETE` too
checkpoints/best.txt        name of the checkpoint of the best evaluation
checkpoints/best            symbolic link to it, where the file system has links

config.json is the metadata of the run: name, task, config, plan, data, starts, versions. The config
itself is its key ``config``. Its ``gpus`` counts processes, on CPUs too.

Nothing in it is code: reading a checkpoint runs none. The folder of a run may come from anybody, so
a file in it may be a pipe, claim any size, or have the right checksum and the wrong content.

Version 1 had the averages in ema.safetensors, and in model.safetensors what is trained.

The formats may grow: only the fields that are read are checked, other fields and files are ignored.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from common.config.load import restore_config
from common.config.plan import DataSummary, Plan
from common.errors import UserError
from common.files import Count, Values, read_json, read_text, regular_size, sha256_of
from common.metrics.metrics_file import read_metrics
from common.text import first_line

MODEL = "model.safetensors"
RAW = "raw.safetensors"
EMA = "ema.safetensors"  # of version 1
OPTIMIZER = "optimizer.safetensors"
RANDOM = "random.safetensors"
TRAINER = "trainer.json"
CONFIG = "config.json"
METRICS = "metrics.jsonl"
FILES = (MODEL, OPTIMIZER, RANDOM, TRAINER, CONFIG, METRICS)  # what no checkpoint lacks
MARKER = "COMPLETE"
BEST = "best"
BEST_FILE = "best.txt"
VERSION = 2  # trainer.json's; raise it when a field that is read changes its meaning
MAX_TRAINER = 1 << 28  # bytes of trainer.json, which has about 10 kB of each rank
MAX_BYTES = 1 << 40  # greatest size of a file that is read: a sparse one may claim any
Seconds = Annotated[float, Field(ge=0, le=1e11)]
Tensors = dict[str, Tensor]


class ExtensibleRecord(BaseModel):
    """An object that may have more fields than these: other versions write others."""

    # Strict: "1" or 1.0 is no count.
    model_config = ConfigDict(extra="allow", strict=True)


class Hardware(ExtensibleRecord):
    cpu: str
    cpus: Count
    gpu: str | None


class PlanSoFar(ExtensibleRecord):
    gpus: Count = 0
    total_batch: Count = 0
    last_step: Count = 0


class Start(ExtensibleRecord):
    step: Count = 0
    started: Seconds = 0
    gpus: Count = 0
    dtype: str = ""
    resumed_from: str | None = Field(None, alias="from")
    changed: dict[str, tuple[Any, Any]] = {}


class ConfigFile(ExtensibleRecord):
    """config.json, as far as a report needs it."""

    config: dict[str, Any]
    name: str = ""
    task: str = ""
    plan: PlanSoFar = PlanSoFar()
    started: Seconds = 0
    starts: list[Start] = Field([], min_length=1)
    argv: list[str] = []
    commit: str | None = None
    versions: dict[str, str | None] = {}
    hardware: Hardware | None = None


class CheckpointConfigFile(ConfigFile):
    """config.json, as far as a checkpoint needs it."""

    # A resume needs all of these fields. A report does without.
    plan: Plan  # pyright: ignore[reportIncompatibleVariableOverride, reportGeneralTypeIssues]
    task: str  # pyright: ignore[reportGeneralTypeIssues]
    data: DataSummary
    starts: list[Start] = Field(min_length=1)


class Position(ExtensibleRecord):
    step: Count
    epoch: Count
    epoch_step: Count
    evaluated_step: Count


class LoaderPosition(ExtensibleRecord):
    epoch: Count
    samples: Count


class Scaler(ExtensibleRecord):
    scale: float
    tracker: int = Field(alias="_growth_tracker")  # torch's name for it


class Updates(ExtensibleRecord):
    updates: Count
    skipped: Count
    skipped_in_a_row: Count
    scaler: Scaler | None


class RunningMetrics(ExtensibleRecord):
    """A rank's running totals for its next train record."""

    steps: Count
    micro_batches: Count
    loss: float
    noise_scale: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    tensor_noise_scale: list[list[float]] | None = None


class Ranks(ExtensibleRecord):
    gpus: int = Field(ge=1, le=10**6)
    parallel: dict[str, Any] | None


class TrainerState(ExtensibleRecord):
    """trainer.json; its keys keep the names of earlier versions.

    ``optimizer`` holds counters and the loss scaler: the tensors are in optimizer.safetensors.
    ``metrics`` has an entry per rank. ``best_top1`` is the best evaluation's top-1, or the score
    that a hook of the user's gave in its place; ``best_loss`` decides between equal ones. ``ranks``
    says how many processes there were, and how they split the model.
    """

    version: int = Field(1, le=VERSION)
    trainer: Position
    loader: LoaderPosition
    optimizer: Updates
    metrics: list[RunningMetrics]
    best_top1: float  # the metric of BEST; 0 for the loss; -Infinity before any evaluation
    best_loss: float
    stale: Count = 0  # evaluations since the best
    ranks: Ranks


def list_changes(metadata: Values) -> list[str]:
    """Return a line for each start that changed the config, from config.json ``metadata``."""
    return [
        f"from step {start.get('step', 0):,} on {show_changes(start['changed'])}"
        for start in metadata.get("starts", ())
        if start.get("changed")
    ]


def show_changes(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """Return the keys with their values now and before, as a message lists them."""
    return ", ".join(f"{key}={now!r} (was {then!r})" for key, (then, now) in changed.items())


def read_metadata(folder: Path, schema: type[ConfigFile] = CheckpointConfigFile) -> dict[str, Any]:
    """Read config.json of a run or a checkpoint; raise `UserError` where there is none."""
    return read_json(folder / CONFIG, schema).model_dump(exclude_unset=True, by_alias=True)


def read_config(
    folder: Path, metadata: dict[str, Any], settings: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the config in ``metadata`` of `read_metadata`, with ``settings`` applied."""
    # This copy is changed. The caller's record stays as it was read.
    values = dict(metadata["config"])
    if isinstance(values.get("DATA"), dict):
        # runs of earlier versions, which do not write the key, held images out by count
        values["DATA"] = {"split": "counted", **values["DATA"]}
    return restore_config(values, settings, where=str(folder / CONFIG))


def read_trainer_state(path: Path) -> dict[str, Any]:
    """Read ``trainer.json`` of the checkpoint folder ``path``."""
    return read_json(path / TRAINER, TrainerState, MAX_TRAINER).model_dump(by_alias=True)


def read_tensors(file: Path) -> Tensors:
    """Read a safetensors file; raise `UserError` for anything else."""
    regular_size(file, MAX_BYTES)
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: {first_line(error)}") from error


class WeightFiles(NamedTuple):
    """Names of a checkpoint's files; they are the same without EMA."""

    evaluated: str
    trained: str


def weight_files(path: Path) -> WeightFiles:
    """Return which files of the checkpoint folder ``path`` hold the weights."""
    if (path / EMA).exists():
        return WeightFiles(evaluated=EMA, trained=MODEL)
    return WeightFiles(evaluated=MODEL, trained=RAW if (path / RAW).exists() else MODEL)


def find_fault(path: Path) -> str | None:
    """Check every byte of the checkpoint ``path``; return what is wrong, None if nothing is.

    Whether its tensors fit the model is checked where they are loaded.
    """
    try:
        # A checksum shows damage. That of a crafted file is right, so each file is parsed as well.
        _check_sums(path)
        read_config(path, read_metadata(path))
        read_trainer_state(path)
        read_metrics(path)
    except UserError as error:
        # The caller's message names the checkpoint itself.
        return str(error).removeprefix(f"{path}/")
    return None


def _check_sums(path: Path) -> None:
    """Raise `UserError` unless ``COMPLETE`` lists the checkpoint's files with their checksums."""
    # The format is sha256sum's: two spaces, and a name without a folder.
    listed = re.findall(r"^([0-9a-f]{64})  ([\w.]+)$", read_text(path / MARKER), re.MULTILINE)
    sums = {name: digest for digest, name in listed}
    # A marker that lists nothing would vouch for any content.
    if not set(FILES) <= sums.keys():
        raise UserError(f"{path / MARKER}: does not list {', '.join(FILES)}, each with its SHA-256")
    for name, digest in sums.items():
        if sha256_of(path / name, MAX_BYTES) != digest:
            raise UserError(f"{path / name} has changed since it was written")
