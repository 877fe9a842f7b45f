"""The task of Caltech-101: its data set and loaders; Pillow decodes in worker processes."""

from collections.abc import Mapping
from typing import Any

from caltech101_amp.dataset import DOWNLOAD, TRAIN_SAMPLES, open_split
from common.config.load import refuse_unused
from common.config.plan import DataSummary
from common.data import image_loaders
from common.data.loader import Loader
from common.files import fingerprint_of
from common.task import Task


def describe_data(data: Mapping[str, Any]) -> DataSummary:
    """Count samples and classes of the data set, which is downloaded first if needed."""
    refuse_unused(data, (*image_loaders.UNUSED, *image_loaders.SHARDS_ONLY, "loader"))
    train, test = open_split(data, "train"), open_split(data, "test")
    fingerprint = fingerprint_of([train.fingerprint, test.fingerprint])
    return DataSummary(len(train), len(test), train.num_classes, fingerprint, class_names=train.class_names)


def build_train_loader(data: Mapping[str, Any], total_batch: int, micro_batch: int, **place: Any) -> Loader:
    """Return the loader of the training split; ``place`` is as in `image_loaders.build_train_loader`."""
    return image_loaders.build_train_loader(open_split(data, "train"), data, total_batch, micro_batch, **place)


def build_eval_loader(data: Mapping[str, Any], batch: int, **place: Any) -> Loader:
    """Return the loader of the test split; ``place`` is as in `image_loaders.build_eval_loader`."""
    return image_loaders.build_eval_loader(open_split(data, "test"), data, batch, **place)


TASK = Task(
    name="caltech101_amp",
    script="caltech101_amp/train.py",
    recipe="config_fp32",
    recipes=("config_",),
    describe=describe_data,
    build_train_loader=build_train_loader,
    build_eval_loader=build_eval_loader,
    build_eval_crop=image_loaders.build_eval_crop,
    train_samples=TRAIN_SAMPLES,
    download=DOWNLOAD,
)
