"""What a task's folder hands to a run and to the tools: data set, loaders, training script."""

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config.plan import DataSummary
from common.config.schema import Data
from common.data.crops import CenterCrop
from common.data.loader import Loader
from common.errors import UserError

# The modules that hold a ``TASK``, by its name in config.json: nothing else that a run's folder
# names is imported. Names, not imports, because the tasks build on ``common``, which knows none of
# them.
TASKS = {name: f"{name}.task" for name in ("imagenet_dali", "caltech101_amp", "cifar10_benchmark")}


@dataclass(frozen=True)
class Task:
    """A task, under its ``name`` in `TASKS`.

    ``script`` is its training script, within this repository. ``recipe`` fills in the keys that a
    config without MODEL leaves out. ``recipes`` are the first letters of the names of the task's
    recipes. ``describe`` counts the data set of a config's ``DATA``. ``train_samples`` are those of
    the data set that the recipes are for, and ``download`` names what DATA.download fetches.
    ``has_splits`` tells whether ``DATA["eval_split"]`` chooses what is evaluated. ``loader`` is the
    task's only one, where ``DATA["loader"]`` does not choose it.
    """

    name: str
    script: str
    recipe: str
    recipes: tuple[str, ...]
    describe: Callable[[Mapping[str, Any]], DataSummary]
    build_eval_loader: Callable[..., Loader]
    build_eval_crop: Callable[[Mapping[str, Any], int], CenterCrop]
    train_samples: int
    download: str = ""
    has_splits: bool = False
    loader: str = ""


def find_task(name: str) -> Task:
    """Return the task of a run's config.json; raise `UserError` for one that is not in `TASKS`."""
    if name not in TASKS:
        raise UserError(
            f"config.json: task={name!r} is none of {', '.join(TASKS)}: restore the file"
        )
    return importlib.import_module(TASKS[name]).TASK


def named_root(data: Mapping[str, Any]) -> str:
    """Return ``DATA.root``, else the environment variable DATA, else ""; ~ is the home folder."""
    # A shell does not expand the ~ in --set DATA.root=~/images.
    return os.path.expanduser(data["root"] or os.environ.get("DATA") or "")


def ignored_root(root: str) -> str:
    """Return the environment variable DATA where it names another folder than ``root``, or ""."""
    named = os.environ.get("DATA", "")
    is_ignored = named and Path(os.path.expanduser(named)).resolve() != Path(root)
    return named if is_ignored else ""


def data_root(data: Mapping[str, Any], download: str = "") -> str:
    """Return the data set's folder, as `named_root` does; refuse one that is not there.

    ``download`` names what DATA.download fetches in this task.
    """
    root = named_root(data)
    maker = "python scripts/prepare.py makes one"
    if download:
        maker = f"--set DATA.download=True fetches {download}"
    if not root:
        raise UserError(
            "DATA.root is not set: give the data set's folder, DATA=/path or --set DATA.root=/path "
            f"({maker})"
        )
    path = Path(root).resolve()
    # Empty: the file system may not be mounted.
    if not data["download"] and not (path.is_dir() and any(path.iterdir())):
        state = "is empty" if path.is_dir() else "is not a folder"
        raise UserError(f"DATA.root={path} {state}: point it at a data set ({maker})")
    return str(path)


def refuse_unused(data: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise `UserError` for the first key of ``DATA`` among ``names`` that is not at its default.

    A task names the keys that its loaders do not read, so that none is ignored silently.
    """
    for name in names:
        default = Data.model_fields[name].default
        if data.get(name, default) != default:
            raise UserError(f"DATA.{name}={data[name]!r} has no effect in this task: leave it out")
