"""The README.md of an exported model: what it is, how good, where it comes from, how it is loaded."""

import json
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from common.checkpoint.saved_run import SavedRun
from common.errors import printable
from common.metrics.provenance import format_command, name_hardware
from common.model.vit import parameter_count

TEMPLATE = Path(__file__).with_name("model_card.md")
LIBRARIES = {"timm": "timm", "safetensors": "timm", "onnx": "onnx"}  # the Hub's name of a target's library


def write_model_card(run: SavedRun, target: str, folder: Path) -> None:
    """Write ``folder/README.md`` for the run's model, exported for ``target``, a key of `LIBRARIES`."""
    about = {"data": {}, **run.about}
    # the name of the data set's folder, without those above it, which mean nothing elsewhere
    config = run.config | {"DATA": run.config["DATA"] | {"root": Path(run.config["DATA"]["root"]).name}}
    card = ModelCard.from_template(
        _metadata(run, target, config["DATA"]["root"]),
        str(TEMPLATE),
        run=run,
        about=about,
        evaluation=run.evaluation,
        target=target,
        config=config,
        config_json=json.dumps(config, indent=2, default=str),
        parameters=parameter_count(**run.config["MODEL"]),
        command=format_command(about["argv"]),
        hardware=name_hardware(about["hardware"]),
    )
    text = "".join(f"{printable(line)}\n" for line in str(card).split("\n"))
    (folder / "README.md").write_text(text, encoding="utf-8")


def _metadata(run: SavedRun, target: str, data: str) -> ModelCardData:
    measured = run.evaluation
    named: dict[str, Any] = dict(
        metric_type="accuracy", task_type="image-classification", dataset_name=data, dataset_type=data
    )
    results = [
        EvalResult(**named, metric_name=title, metric_value=round(measured[key], 4))
        for key, title in (("top1", "top-1"), ("top5", "top-5"))
        if measured
    ]
    return ModelCardData(
        library_name=LIBRARIES[target],
        pipeline_tag="image-classification",
        tags=["image-classification", "timm", "vision-transformer"],
        model_name=run.about["name"],
        eval_results=results or None,
    )
