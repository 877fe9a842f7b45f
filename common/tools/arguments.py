"""The arguments that evaluate, predict and export share."""

import argparse
import math
from itertools import product
from pathlib import Path

from common.checkpoint.saved_run import SavedRun
from common.errors import UserError, command_parser
from common.files import read_names
from common.metrics.loggers import warn
from common.model.classes import CLASSES_HELP
from common.task import add_task

OTHERS = (
    ", a file of weights, an export for timm or as safetensors, a model of timm's by name, or "
    "hf-hub:<user>/<name>"
)


def build_parser(
    description: str | None, *, takes_others: bool = False, takes_temperature: bool = False
) -> argparse.ArgumentParser:
    """Return the parser of a command whose first argument is what `open_run` opens.

    ``takes_others``: or what `open_model` opens, which may need ``--set``.
    """
    parser = command_parser(description)
    add = parser.add_argument
    add(
        "run",
        metavar="RUN_OR_CHECKPOINT",
        help=f"a run's folder, or one in its checkpoints/{OTHERS if takes_others else ''}",
    )
    add("--raw", action="store_true", help="use the weights instead of their moving average (EMA)")
    add("--classes", metavar="FILE", help=CLASSES_HELP)
    add("--task", type=add_task, metavar="FILE", help="of a task of your own: its script")
    if takes_temperature:
        add(
            "--temperature",
            type=_above_0,
            metavar="T",
            help="divide logits by the temperature that evaluate.py printed",
        )
    if takes_others:
        add(
            "--set",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="override a key of the config",
        )
    return parser


def own_root(run: SavedRun) -> str | None:
    """Return the folder of the data set that trained ``run``, if it is known."""
    return run.metadata.get("config", {}).get("DATA", {}).get("root")


def warn_of_training_images(run: SavedRun, *folders: str) -> None:
    """Print a warning if a folder lies in that of the run's training images."""
    roots = filter(None, (own_root(run), run.metadata["data"].get("made_from")))
    for folder, root in product(folders, roots):
        split = Path(root, "train")
        trained = (split if split.is_dir() else Path(root)).resolve()
        if Path(folder).resolve().is_relative_to(trained):
            warn(f"{folder}: the run was trained on images of {trained}")
            return


def _above_0(text: str) -> float:
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: expected a number > 0")
    return float(text)


def name_classes(run: SavedRun, file: str | None) -> None:
    """Take the names of the classes from ``file``, one a line in the order of the outputs."""
    if file is None:
        return
    names = read_names(Path(file))
    outputs = run.config["MODEL"]["num_classes"]
    if len(names) != outputs:
        raise UserError(f"--classes {file}: {len(names)} names, the model has {outputs} classes")
    # The run's descriptions belong to its own names.
    run.metadata["data"] |= {"class_names": names, "descriptions": []}
