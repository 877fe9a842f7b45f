"""Trackers that a run may write to besides its own files, in its folder and never to the network.

Weights & Biases: ``wandb sync outputs/NAME/wandb/offline-run-*`` uploads it later. MLflow: ``mlflow ui
--backend-store-uri sqlite:///outputs/NAME/mlflow.db`` shows it (its folder store ended in maintenance, so SQLite).
"""

import json
import logging
import os
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from common.errors import UserError, did_you_mean
from common.metrics.record import Record, select_figures

PROJECT = "vit-large-batch"
MAX_PARAM = 6000  # characters of a value in MLflow
MODULES = {"wandb": ("wandb",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}
TO_INSTALL = {"wandb": "wandb", "mlflow": "mlflow-skinny sqlalchemy alembic"}
# Both look for their makers' servers, offline too, unless told otherwise.
STAY_OFFLINE = {"WANDB_ERROR_REPORTING": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}


def check_trackers(names: Sequence[str]) -> None:
    """Raise `UserError` for the first of ``LOG.trackers`` that is unknown or not installed."""
    for name in names:
        if name not in MODULES:
            raise UserError(
                f"LOG.trackers={list(names)}: {name!r} is none of {list(MODULES)}{did_you_mean(str(name), MODULES)}"
            )
        missing = [module for module in MODULES[name] if find_spec(module) is None]
        if missing:
            raise UserError(
                f"LOG.trackers={list(names)}: {', '.join(missing)} is not installed; pip install {TO_INSTALL[name]}"
            )


def _read_config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["config"]


class WandbTracker:
    """Write an offline run of Weights & Biases under ``folder/wandb``; resumed, it goes on under the same id.

    Each start makes one more ``offline-run-<time>-<id>``, which ``wandb sync`` joins in order of time.
    """

    def __init__(self, folder: Path):
        os.environ.update(STAY_OFFLINE)
        import wandb

        earlier = sorted(folder.glob("wandb/offline-run-*"))
        self.run = wandb.init(
            project=PROJECT,
            name=folder.name,
            id=earlier[0].name.rpartition("-")[2] if earlier else None,
            dir=str(folder),
            config=_read_config(folder),
            mode="offline",
            settings=wandb.Settings(silent=True, console="off"),
        )

    def __call__(self, record: Record) -> None:
        self.run.log(select_figures(record), step=record["step"])

    def close(self) -> None:
        self.run.finish()


class MlflowTracker:
    """Write a run of MLflow into ``folder/mlflow.db``; resumed, the same run goes on."""

    def __init__(self, folder: Path):
        os.environ.update(STAY_OFFLINE)
        from mlflow import MlflowClient
        from mlflow.entities import Param

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self.client = MlflowClient(tracking_uri=f"sqlite:///{folder.resolve()}/mlflow.db")
        experiment = self.client.get_experiment_by_name(PROJECT)
        number = experiment.experiment_id if experiment else self._create_experiment(folder)
        earlier = self.client.search_runs([number])
        self.run = (earlier[0] if earlier else self.client.create_run(number, run_name=folder.name)).info.run_id
        self.client.update_run(self.run, status="RUNNING")
        if not earlier:
            params = [Param(key, json.dumps(value)[:MAX_PARAM]) for key, value in _read_config(folder).items()]
            self.client.log_batch(self.run, params=params)

    def _create_experiment(self, folder: Path) -> str:
        return self.client.create_experiment(PROJECT, artifact_location=(folder / "mlflow").resolve().as_uri())

    def __call__(self, record: Record) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(name, value, now, record["step"]) for name, value in select_figures(record).items()]
        self.client.log_batch(self.run, metrics=metrics)

    def close(self) -> None:
        self.client.set_terminated(self.run)


TRACKERS = {"wandb": WandbTracker, "mlflow": MlflowTracker}
