"""Trackers; the tests marked ``trackers`` need the real packages: ``bash scripts/test.sh -m trackers``."""

import json
import os
import sqlite3
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.errors import UserError
from common.metrics import trackers
from common.metrics.trackers import check_trackers

CONFIG = {"TOTAL_BATCH_SIZE": 16, "MODEL": {"depth": 2}, "LOG": {"trackers": ["wandb", "mlflow"]}}
WRITE = """
import sys
from pathlib import Path
from common.metrics.writers import open_writers

folder, start = Path(sys.argv[1]), int(sys.argv[2])
writers = open_writers(folder, 4, tensorboard=False, trackers=["wandb", "mlflow"])
for step in range(start, start + 2):
    for writer in writers:
        metrics = {"loss": 1 / step, "skipped": 0, "samples_per_s": 1.0, "mfu": None}
        writer({"kind": "train", "step": step, "epoch": 0.1, **metrics})
for writer in writers:
    writer.close()
"""
# A .wandb file is LevelDB's log: 7 bytes, then records, each after 4 bytes of checksum, 2 of length and 1 of type.
READ_WANDB = """
import json
import sys
from wandb.proto.wandb_internal_pb2 import Record

data = open(sys.argv[1], "rb").read()
start, rows, config = 7, [], {}
while start < len(data):
    length = int.from_bytes(data[start + 4 : start + 6], "little")
    record = Record.FromString(data[start + 7 : start + 7 + length])
    start += 7 + length
    for item in record.run.config.update:
        config[item.key] = json.loads(item.value_json)
    row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
    if row:
        rows.append([row["_step"], row["train/loss"]])
print(json.dumps({"rows": rows, "depth": config["MODEL"]["depth"]}))
"""


WANDB = "LOG.trackers=['wandb']: wandb is not installed; pip install wandb"
MLFLOW = "LOG.trackers=['mlflow']: alembic is not installed; pip install mlflow-skinny sqlalchemy alembic"


def test_the_id_is_neither_read_nor_written_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = SimpleNamespace(init=lambda **_: SimpleNamespace(id="1"), Settings=lambda **_: None)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run, ours = tmp_path / "run", tmp_path / "ours"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"config": CONFIG}))
    for target in ("ours", "nothing"):
        ours.write_text("ours")
        (run / "wandb_id").unlink(missing_ok=True)
        (run / "wandb_id").symlink_to(tmp_path / target)
        with pytest.raises(UserError, match="wandb_id: a link, or not a regular file"):
            trackers.WandbTracker(run)
        assert ours.read_text() == "ours"
        assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize(
    ("name", "installed", "message"),
    [
        ("wandb", (), WANDB),
        ("mlflow", ("mlflow", "sqlalchemy"), MLFLOW),
    ],
)
def test_unusable_trackers_are_refused(name, installed, message, monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda module: module if module in installed else None)
    with pytest.raises(UserError) as error:
        check_trackers([name])
    assert str(error.value) == message


def python(code: str, *arguments: object, **environment: str) -> tuple[str, str]:
    """Return the process's stdout and stderr."""
    command, environment = [sys.executable, "-c", code, *map(str, arguments)], os.environ | environment
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert child.returncode == 0, child.stderr
    return child.stdout, child.stderr


def write_config(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps({"config": CONFIG}))
    return folder


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """The folder of a run that was started twice: steps 1 and 2, then 3 and 4."""
    folder = write_config(tmp_path_factory.mktemp("run"))
    for start in (1, 3):
        _, errors = python(WRITE, folder, start)
        assert "warning" not in errors
    return folder


def read_mlflow(path: Path) -> tuple[list, list, dict]:
    """Return (name, status) of the runs, (step, value) of the training loss, and the config."""
    with sqlite3.connect(path) as database:
        runs = database.execute("SELECT name, status FROM runs").fetchall()
        metrics = database.execute("SELECT step, value FROM metrics WHERE key = 'train/loss' ORDER BY step").fetchall()
        params = dict(database.execute("SELECT key, value FROM params"))
    return runs, metrics, {key: json.loads(value) for key, value in params.items()}


@pytest.mark.trackers
def test_mlflow_continues_the_run(resumed):
    runs, metrics, params = read_mlflow(resumed / "mlflow.db")
    assert runs == [(resumed.name, "FINISHED")]
    assert metrics == [(step, 1 / step) for step in (1, 2, 3, 4)]
    assert params == CONFIG


@pytest.mark.trackers
def test_wandb_continues_under_the_same_id(resumed):
    first, second = sorted(resumed.glob("wandb/offline-run-*/run-*.wandb"))
    assert first.name == second.name  # it holds the id
    for path, steps in ((first, (1, 2)), (second, (3, 4))):
        assert json.loads(python(READ_WANDB, path)[0]) == {"rows": [[step, 1 / step] for step in steps], "depth": 2}


@pytest.mark.trackers
def test_their_environment_variables_send_it_elsewhere(tmp_path, tmp_path_factory):
    """MLflow to another database; W&B to a server, which refuses: training continues without it."""
    asked = []

    class Refuse(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append((self.path, self.rfile.read(int(self.headers["Content-Length"])).decode()))
            self.send_error(401)

        def log_message(self, *_: object) -> None:
            pass

    folder = write_config(tmp_path_factory.mktemp("sent"))
    with ThreadingHTTPServer(("127.0.0.1", 0), Refuse) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        wandb = {"WANDB_MODE": "online", "WANDB_BASE_URL": address, "WANDB_API_KEY": "0" * 40, "WANDB_PROJECT": "mine"}
        _, errors = python(WRITE, folder, 1, **wandb, MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path}/other.db")
        server.shutdown()
    path, query = asked[0]
    assert path == "/graphql"
    assert json.loads(query)["variables"]["project"] == "mine"
    assert "warning: wandb: CommError: " in errors
    assert "401" in errors
    runs, metrics, _ = read_mlflow(tmp_path / "other.db")
    assert runs == [(folder.name, "FINISHED")]
    assert metrics == [(1, 1.0), (2, 0.5)]
    assert not (folder / "mlflow.db").exists()
    assert not list(folder.glob("wandb/offline-run-*"))
