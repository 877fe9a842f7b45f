"""What a run left, or has left so far: its config, the checkpoint to use, and the model in it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from common.checkpoint.content import (
    CONFIG,
    MARKER,
    MODEL,
    Tensors,
    read_config,
    read_metadata,
    read_tensors,
    weight_files,
)
from common.checkpoint.save import best_checkpoint, newest_checkpoint
from common.errors import UserError
from common.model.build import build_model
from common.model.fit import check_shapes, convert_weights


@dataclass(frozen=True, eq=False)  # a key of dictionaries, by its identity
class SavedRun:
    """A checkpoint and the run it is of.

    ``folder`` is the run's, or of a checkpoint that was copied elsewhere the one that holds it.
    ``chosen`` says why this checkpoint. ``weights`` is the file that is used: their moving
    average's, where there is one. ``config`` is resolved; ``metadata`` is the content of
    config.json.
    ``foreign`` are the parameters of a model that no run of this project trained. ``temperature``
    divides the logits in predictions and exports; ``divided`` is that of an export, whose weights
    have it already.
    """

    folder: Path
    checkpoint: Path
    chosen: str
    config: dict[str, Any]
    metadata: dict[str, Any]
    weights: str = MODEL
    foreign: Tensors | None = None
    temperature: float = 1.0
    divided: float = 1.0

    @property
    def batch(self) -> int:
        """The samples that a process evaluates at once: as many as in training, unless
        ``MICRO_BATCH_SIZE`` is set.
        """
        # The plan's has been shown to fit into memory.
        return self.config["MICRO_BATCH_SIZE"] or self.metadata["plan"]["micro_batch"]

    @property
    def class_names(self) -> list[str]:
        """A name for every output of the model, in words where they are known; the number of those
        that the data set had no name for.
        """
        # ImageNet's class names are ids such as n01440764. Its descriptions are words.
        data = self.metadata["data"]
        names = data.get("descriptions") or data["class_names"]
        # A head may have more classes than the data set, as timm's 1,000 for ImageNet-100.
        return names + [
            str(label) for label in range(len(names), self.config["MODEL"]["num_classes"])
        ]

    def load_model(self) -> nn.Module:
        """Return the unsharded model with the checkpoint's weights, which may be of any parallel
        mode.
        """
        arguments = dict(self.config["MODEL"])
        weights = self.load_weights()
        trained = _trained_size(self.metadata, self.config)
        is_resized = arguments["image_size"] != trained
        if not arguments.get("timm"):
            # its forward pass resamples the positions, as in training with IMAGE_SIZES
            arguments["image_size"] = trained
        model = build_model(**arguments)
        if is_resized and arguments.get("timm"):
            convert_weights(weights, model)
        # First, since the error of `load_state_dict` has a line for each tensor.
        check_shapes(self.checkpoint / self.weights, weights, model)
        model.load_state_dict(weights)
        return model.eval()

    def load_weights(self) -> Tensors:
        """Return the parameters of `load_model` by name."""
        return self.foreign or read_tensors(self.checkpoint / self.weights)


def open_run(name: str, settings: Sequence[str] = (), *, raw: bool = False) -> SavedRun:
    """Open a run's folder or one checkpoint's, with ``settings`` (``KEY=VALUE``) applied to its
    config.

    Of a run it takes the best checkpoint where one is marked, else the newest complete checkpoint.
    ``raw`` asks for the weights themselves, where the checkpoint has their moving average too.
    Raises `UserError` for anything else.
    """
    checkpoint, chosen = _choose_checkpoint(name)
    run = checkpoint.parent.parent  # <run>/checkpoints/<checkpoint>
    metadata = read_metadata(checkpoint)
    config = read_config(checkpoint, metadata, settings)
    files = weight_files(checkpoint)
    weights = files.trained if raw else files.evaluated
    # A checkpoint that was copied elsewhere has no run around it.
    folder = run if (run / CONFIG).is_file() else checkpoint.parent
    average = "; moving average of the weights" if weights != files.trained else ""
    size = config["MODEL"]["image_size"]
    trained = _trained_size(metadata, config)
    resized = ""
    if size != trained:
        resized = f"; images of {size} pixels, not {trained} as in training"
    return SavedRun(folder, checkpoint, chosen + average + resized, config, metadata, weights)


def _trained_size(metadata: dict[str, Any], config: dict[str, Any]) -> int:
    """Return MODEL.image_size of ``metadata``. ``config`` may have another in its place."""
    size = config["MODEL"]["image_size"]
    return metadata.get("config", {}).get("MODEL", {}).get("image_size", size)


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
    best = best_checkpoint(folder)
    newest = newest_checkpoint(folder)
    if best and newest and newest.name != best.name:
        return best, f"the best; the last is {newest.name}"
    if best:
        return best, "the best"
    if newest is None:
        raise UserError(
            f"{name}: no complete checkpoint in {folder}: wait until the run has saved one"
        )
    return newest, "the newest"
