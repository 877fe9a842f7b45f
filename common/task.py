"""What a task's folder hands to a run and to the tools: its data set, its loaders, its training script."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from common.config.plan import DataSummary
from common.data.crops import CenterCrop
from common.data.loader import Loader
from common.errors import UserError

# The modules that hold a ``TASK``, by its name in config.json: nothing else that a run's folder names is imported.
# Names, not imports, because the tasks build on ``common``, which knows none of them.
TASKS = {name: f"{name}.task" for name in ("imagenet_dali", "caltech101_amp", "cifar10_benchmark")}


@dataclass(frozen=True)
class Task:
    """A task, under its ``name`` in `TASKS`.

    ``script`` is its training script, within this repository. ``recipe`` fills in the keys that a config without MODEL
    leaves out. ``recipes`` are the first letters of the names of the task's recipes. ``describe`` counts the data set
    of a config's ``DATA``. ``train_samples`` are those of the data set that the recipes are for, and ``download`` names
    what DATA.download fetches. ``has_splits`` tells whether ``DATA["split"]`` chooses what is evaluated. ``loader`` is
    the task's only one, where ``DATA["loader"]`` does not choose it.
    """

    name: str
    script: str
    recipe: str
    recipes: tuple[str, ...]
    describe: Callable[[Mapping[str, Any]], DataSummary]
    build_train_loader: Callable[..., Loader]
    build_eval_loader: Callable[..., Loader]
    build_eval_crop: Callable[[Mapping[str, Any], int], CenterCrop]
    train_samples: int
    download: str = ""
    has_splits: bool = False
    loader: str = ""


def find_task(name: str) -> Task:
    """Return the task of a run's config.json; raise `UserError` for a name that is not in `TASKS`."""
    if name not in TASKS:
        raise UserError(f"config.json: task={name!r} is none of {', '.join(TASKS)}: restore the file")
    return importlib.import_module(TASKS[name]).TASK
