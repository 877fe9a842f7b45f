"""What a run left, or has left so far: its config, the checkpoint to use, and the model in it."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

from common.checkpoint.classes import CLASSES_HELP
from common.checkpoint.content import (
    CONFIG,
    EMA,
    MARKER,
    MODEL,
    check_weights,
    read_about,
    read_config,
)
from common.checkpoint.save import best_checkpoint, newest_checkpoint
from common.errors import UserError, command_parser
from common.files import read_names
from common.model.build import build_model


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint and the run it is of.

    ``folder`` is the run's, or of a checkpoint that was copied elsewhere the one that holds it.
    ``chosen`` says why this checkpoint. ``weights`` is the file that is used: their moving
    average's, where there is one. ``config`` is resolved; ``about`` is the whole of config.json.
    ``foreign`` are the parameters of a model that no run of this project trained.
    """

    folder: Path
    checkpoint: Path
    chosen: str
    config: dict[str, Any]
    about: dict[str, Any]
    weights: str = MODEL
    foreign: dict[str, Tensor] | None = None

    @property
    def batch(self) -> int:
        """The samples that a process evaluates at once: as many as in training, unless
        ``MICRO_BATCH_SIZE`` is set.
        """
        return self.config["MICRO_BATCH_SIZE"] or self.about["plan"]["micro_batch"]

    @property
    def class_names(self) -> list[str]:
        """A name for every output of the model, in words where they are known; the number of those
        that the data set had no name for.
        """
        data = self.about["data"]
        names = data.get("descriptions") or data["class_names"]
        return names + [
            str(label) for label in range(len(names), self.config["MODEL"]["num_classes"])
        ]

    def name_classes(self, file: str | None) -> None:
        """Take the names of the classes from ``file``, one a line in the order of the outputs."""
        if file is None:
            return
        names = read_names(Path(file))
        outputs = self.config["MODEL"]["num_classes"]
        if len(names) != outputs:
            raise UserError(
                f"--classes {file}: {len(names)} names, the model has {outputs} classes"
            )
        self.about["data"] |= {"class_names": names, "descriptions": []}

    def load_model(self) -> nn.Module:
        """Return the unsharded model with the checkpoint's weights, which may be of any parallel
        mode.
        """
        model = build_model(**self.config["MODEL"])
        model.load_state_dict(self.load_weights())
        return model.eval()

    def load_weights(self) -> dict[str, Tensor]:
        """Return the parameters of `load_model` by name."""
        return self.foreign or load_file(self.checkpoint / self.weights)


def build_parser(description: str | None, others: str = "") -> argparse.ArgumentParser:
    """Return the parser of a command whose first argument is what `open_run` opens, or one of the
    ``others``, which may need ``--set``.
    """
    parser = command_parser(description)
    parser.add_argument(
        "run",
        metavar="RUN_OR_CHECKPOINT",
        help=f"a run's folder, or one in its checkpoints/{others}",
    )
    parser.add_argument(
        "--raw", action="store_true", help="use the weights instead of their moving average (EMA)"
    )
    parser.add_argument("--classes", metavar="FILE", help=CLASSES_HELP)
    if others:
        parser.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="override a key of the config",
        )
    return parser


def open_run(name: str, settings: Sequence[str] = (), *, raw: bool = False) -> SavedRun:
    """Open a run's folder or one checkpoint's, with ``settings`` (``KEY=VALUE``) applied to its
    config.

    Of a run it takes the best checkpoint where one is marked, else the newest complete checkpoint.
    ``raw`` asks for the weights themselves, where the checkpoint has their moving average too.
    Raises `UserError` for anything else.
    """
    checkpoint, chosen = _choose_checkpoint(name)
    run, about = checkpoint.parent.parent, read_about(checkpoint)
    config = read_config(checkpoint, about, settings)
    weights = MODEL if raw or not (checkpoint / EMA).exists() else EMA
    check_weights(checkpoint / weights, config["MODEL"])
    folder = run if (run / CONFIG).is_file() else checkpoint.parent
    average = "; moving average of the weights" if weights == EMA else ""
    return SavedRun(folder, checkpoint, chosen + average, config, about, weights)


def _choose_checkpoint(name: str) -> tuple[Path, str]:
    """Return the checkpoint ``name``, or the run's that it names, and why this one."""
    path = Path(name).resolve()  # checkpoints/best is a link
    if (path / MARKER).is_file():
        return path, "named"
    if not (path / CONFIG).is_file():
        raise UserError(
            f"{name}: neither a run (it has no config.json) nor a checkpoint (no {MARKER}): name "
            "outputs/<run>"
        )
    folder = path / "checkpoints"
    if best := best_checkpoint(folder):
        return best, "the best"
    newest = newest_checkpoint(folder)
    if newest is None:
        raise UserError(
            f"{name}: no complete checkpoint in {folder}: wait until the run has saved one"
        )
    return newest, "the newest"
