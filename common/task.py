"""What a task hands to a run and to the tools: data set, loaders, training script."""

import importlib
import os
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config.plan import DataSummary
from common.config.schema import Data
from common.data import image_loaders
from common.data.crops import CenterCrop
from common.data.image_folder import note_missing
from common.data.image_split import ImageSplit
from common.data.loader import Loader
from common.errors import UserError
from common.files import Values, fingerprint_of
from common.process import at_end

# The modules that hold a ``TASK``, by its name in config.json: nothing else that a run's folder
# names is imported. Names, not imports, because the tasks build on ``common``, which knows none of
# them.
TASKS = {name: f"{name}.task" for name in ("imagenet_dali", "caltech101_amp", "cifar10_benchmark")}


@dataclass(frozen=True)
class Task:
    """A task, under its ``name`` in `TASKS`.

    ``describe`` counts the data set of a config's ``DATA``. ``train_samples`` are those of the data
    set that the recipes are for, and ``download`` names what DATA.download fetches. ``script`` is
    the training script, within this repository. ``recipe`` fills in the keys that a config without
    MODEL leaves out. ``recipes`` are the first letters of the names of the task's recipes.
    ``has_splits`` tells whether ``DATA["eval_split"]`` chooses what is evaluated. ``loader`` is the
    task's only one, where ``DATA["loader"]`` does not choose it.
    """

    name: str
    describe: Callable[[Values], DataSummary]
    build_train_loader: Callable[..., Loader]
    build_eval_loader: Callable[..., Loader]
    build_eval_crop: Callable[[Values, int], CenterCrop]
    train_samples: int
    script: str = ""
    recipe: str | None = None
    recipes: tuple[str, ...] = ()
    download: str = ""
    has_splits: bool = False
    loader: str = ""


def image_task(name: str, open_split: Callable[..., ImageSplit], **options: Any) -> Task:
    """Return the `Task` of a source of images: ``open_split(DATA, "train")``, or ``"test"``.

    Its splits are opened for every use. ``options`` are further fields of `Task`.
    """

    def describe(data: Values) -> DataSummary:
        refuse_unused(data, (*image_loaders.UNUSED, *image_loaders.SHARDS_ONLY, "loader"))
        return describe_splits(open_split(data, "train"), open_split(data, "test"))

    return Task(
        name,
        describe,
        build_train_loader=lambda data, *batch, **loader_options: image_loaders.build_train_loader(
            open_split(data, "train"), data, *batch, **loader_options
        ),
        build_eval_loader=lambda data, *batch, **loader_options: image_loaders.build_eval_loader(
            open_split(data, "test"), data, *batch, **loader_options
        ),
        build_eval_crop=image_loaders.build_eval_crop,
        loader="torchvision",
        **options,
    )


def describe_splits(train: ImageSplit, validation: ImageSplit, **options: Any) -> DataSummary:
    """Count samples and classes; no image is read. ``options`` are further fields."""
    fingerprint = train.fingerprint
    # The splits of a prepared data set have the same.
    if validation.fingerprint != fingerprint:
        fingerprint = fingerprint_of([fingerprint, validation.fingerprint])
    return DataSummary(
        train_samples=len(train),
        eval_samples=len(validation),
        num_classes=len(train.class_names),
        fingerprint=fingerprint,
        class_names=train.class_names,
        class_counts=train.class_counts,
        validation=note_missing(validation.description, train.class_names, validation.labels),
        **options,
    )


def find_task(name: str) -> Task:
    """Return the task of a run's config.json; raise `UserError` for one that is not in `TASKS`."""
    if name not in TASKS:
        raise UserError(
            f"config.json: task={name!r} is none of {', '.join(TASKS)}: add --task FILE, the "
            "script that trained it, or restore the file"
        )
    return importlib.import_module(TASKS[name]).TASK


def add_task(script: str) -> None:
    """Add the ``TASK`` of a user's own script, an argument of a command, to `TASKS`."""
    folder = os.path.dirname(os.path.abspath(script))
    # As for `python script`, which may import modules beside it.
    sys.path.insert(0, folder)
    at_end(sys.path.remove, folder)
    module = Path(script).stem
    try:
        TASKS[importlib.import_module(module).TASK.name] = module
    # All that the script may raise: argparse would hide a ValueError.
    except Exception as error:
        raise ArgumentTypeError(
            f"{script}: {type(error).__name__}: {error}; give a script that runs and has a TASK, "
            "as image_task() of common.task returns it"
        ) from error


def named_root(data: Values) -> str:
    """Return ``DATA.root``, else the environment variable DATA, else ""; ~ is the home folder."""
    # A shell does not expand the ~ in --set DATA.root=~/images.
    return os.path.expanduser(data["root"] or os.environ.get("DATA") or "")


def ignored_root(root: str) -> str:
    """Return the environment variable DATA where it names another folder than ``root``, or ""."""
    named = os.environ.get("DATA", "")
    is_ignored = named and Path(os.path.expanduser(named)).resolve() != Path(root)
    return named if is_ignored else ""


def data_root(data: Values, download: str = "") -> str:
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


def refuse_unused(data: Values, names: Sequence[str]) -> None:
    """Raise `UserError` for the first key of ``DATA`` among ``names`` that is not at its default.

    A task names the keys that its loaders do not read, so that none is ignored silently.
    """
    for name in names:
        default = Data.model_fields[name].default
        if data.get(name, default) != default:
            raise UserError(f"DATA.{name}={data[name]!r} has no effect in this task: leave it out")
