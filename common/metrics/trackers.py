"""Weights & Biases and MLflow: offline in the run's folder, unless their environment variables are set.

WANDB_MODE=online sends to Weights & Biases; without it, ``wandb sync outputs/NAME/wandb/offline-run-*`` uploads later.
MLFLOW_TRACKING_URI is MLflow's server; without it, ``mlflow ui --backend-store-uri sqlite:///outputs/NAME/mlflow.db``
shows the run. WANDB_PROJECT and MLFLOW_EXPERIMENT_NAME override `PROJECT`. A resumed run keeps its id.
"""

import json
import logging
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from common.errors import UserError
from common.files import own_file, read_text
from common.metrics.record import Record, select_metrics

PROJECT = "vit-large-batch"
MAX_PARAM = 6000  # characters of a value in MLflow
# modules that each tracker imports, and packages to install
MODULES = {"wandb": ("wandb",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}
TO_INSTALL = {"wandb": "wandb", "mlflow": "mlflow-skinny sqlalchemy alembic"}


def check_trackers(names: Sequence[str]) -> None:
    """Raise `UserError` for the first of ``LOG.trackers`` that is not installed."""
    for name in names:
        if missing := ", ".join(module for module in MODULES[name] if find_spec(module) is None):
            raise UserError(f"LOG.trackers={list(names)}: {missing} is not installed; pip install {TO_INSTALL[name]}")


def _read_config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["config"]


def _read_id(path: Path) -> str | None:
    return read_text(path, most=1000) if own_file(path).exists() else None


class WandbTracker:
    """Log to Weights & Biases; offline, each start creates another ``offline-run-*``; ``wandb sync`` merges them."""

    def __init__(self, folder: Path):
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        id_file = folder / "wandb_id"
        mode = os.environ.get("WANDB_MODE", "offline")
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            id=_read_id(id_file),
            resume="allow" if mode == "online" else None,
            dir=str(folder),
            config=_read_config(folder),
            mode=mode,
            settings=wandb.Settings(silent=True, console="off"),
        )
        id_file.write_text(self.run.id)

    def __call__(self, record: Record) -> None:
        self.run.log(select_metrics(record), step=record["step"])

    def close(self) -> None:
        self.run.finish()


class MlflowTracker:
    """Log to MLflow."""

    def __init__(self, folder: Path):
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        import mlflow

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self.mlflow, id_file = mlflow, folder / "mlflow_id"
        mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{folder.resolve()}/mlflow.db"))
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
        earlier = _read_id(id_file)
        run = mlflow.start_run(run_id=earlier, run_name=folder.name)
        id_file.write_text(run.info.run_id)
        if earlier is None:
            config = _read_config(folder)
            mlflow.log_params({key: json.dumps(value)[:MAX_PARAM] for key, value in config.items()})

    def __call__(self, record: Record) -> None:
        self.mlflow.log_metrics(select_metrics(record), step=record["step"])

    def close(self) -> None:
        self.mlflow.end_run()


TRACKERS = {"wandb": WandbTracker, "mlflow": MlflowTracker}
