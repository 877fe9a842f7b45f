"""A checkpoint of a model of one block, as a run writes it; and what a run leaves."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from common.checkpoint.content import (
    CONFIG,
    MARKER,
    METRICS,
    MODEL,
    OPTIMIZER,
    RANDOM,
    TRAINER,
    Tensors,
    read_trainer_state,
)
from common.checkpoint.save import newest_checkpoint, write_checkpoint
from common.config.load import load_config
from common.config.plan import DataSummary, build_plan
from common.engine.linear_pairs import count_matrices
from common.metrics.metrics_file import read_metrics
from common.model.build import build_on_meta, state_shapes
from common.optim.build import state_names
from common.provenance import describe_run

SETTINGS = [
    "MODEL=dict(image_size=8, patch_size=4, width=8, depth=1, heads=2, mlp_ratio=2.0, "
    "num_classes=3)"
]
SETTINGS += ["NUM_EPOCHS=5", "WARMUP_EPOCHS=0", "TOTAL_BATCH_SIZE=16", "DATA.root=a", "fp16=None"]
MEASURED = (
    "time",
    "samples_per_s",
    "data_wait",
    "forward_s",
    "backward_s",
    "peak_memory_gb",
    "mfu",
)


def build_metadata(*settings: str) -> dict[str, Any]:
    """Return what config.json of a run with these settings holds."""
    config = load_config("quickstart", [*SETTINGS, *settings])
    data = DataSummary(61, 10, 3, fingerprint="same", class_names=("a", "b", "c"))
    metadata = {
        "name": "tiny",
        "task": "",
        "config": config,
        "plan": build_plan(config, 1, data).to_dict(),
    }
    metadata |= {
        "data": asdict(data),
        **describe_run([]),
        "starts": [{"step": 0, "dtype": "float32"}],
    }
    return json.loads(json.dumps(metadata, default=str))


def build_content(step: int = 1, value: float = 0.0, *settings: str) -> dict[str, Tensors | bytes]:
    """Return the files of a finished run's last checkpoint, all of whose numbers are ``value``."""
    metadata = build_metadata(*settings)
    shapes = state_shapes(build_on_meta(metadata["config"]["MODEL"]))
    weights = {name: torch.full(shape, value) for name, shape in shapes.items()}
    state = {
        "trainer": {"step": step, "epoch": 0, "epoch_step": step, "evaluated_step": step},
        "loader": {"epoch": 0, "samples": 16 * step},
        "optimizer": {"updates": step, "skipped": 0, "skipped_in_a_row": 0, "scaler": None},
        "metrics": [{"steps": 0, "micro_batches": 0, "loss": 0.0}],
        "best_top1": 0.5,
        "best_loss": 0.0,
        "ranks": {"gpus": 1, "parallel": metadata["config"]["parallel"]},
    }
    return {
        MODEL: weights,
        OPTIMIZER: {
            f"{key}/{name}": torch.tensor(float(step)) if key == "step" else weight.clone()
            for name, weight in weights.items()
            for key in state_names(
                metadata["config"]["OPTIMIZER"], count_matrices(name, shapes) > 0
            )
        },
        RANDOM: {"0/torch": torch.get_rng_state()},
        TRAINER: json.dumps(state).encode(),
        CONFIG: json.dumps(metadata).encode(),
        METRICS: b'{"kind": "train", "step": 1, "epoch": 0.1, "time": 0, "loss": 1.0}\n',
    }


def add_fields(path: Path) -> None:
    """Add what no version writes to the checkpoint ``path``: a file, and a field in each object."""

    def add(node: Any) -> Any:
        if isinstance(node, list):
            return [add(item) for item in node]
        if not isinstance(node, dict):
            return node
        fields = {
            # the keys of a config are checked like those of a config file
            key: value if key in ("config", "parallel") else add(value)
            for key, value in node.items()
        }
        return fields | {"added": None}

    content = {file.name: file.read_bytes() for file in path.iterdir() if file.name != MARKER}
    for name in (TRAINER, CONFIG):
        content[name] = json.dumps(add(json.loads(content[name]))).encode()
    write_checkpoint(path, content | {"added.txt": b"added"})


def read_result(output: Path) -> dict[str, Any]:
    """Return the files of a run's last checkpoint, and its records without timings and memory."""
    last = newest_checkpoint(output / "checkpoints")
    assert last, f"{output}: no checkpoint"
    files = {file.name: file.read_bytes() for file in last.glob("*.safetensors")}
    records = read_metrics(output)
    for record in records:
        for name in MEASURED:
            record.pop(name, None)
    return files | {TRAINER: read_trainer_state(last), METRICS: records}
