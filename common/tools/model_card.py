"""The README.md of an exported model: what it is, how good, where it comes from, how it is loaded."""

import json
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from common.checkpoint.model_state import EMA
from common.checkpoint.saved_run import SavedRun
from common.metrics.provenance import format_command, name_hardware
from common.model.vit import parameter_count

CARD = Template("""\
---
$front_matter
---

# $name

A Vision Transformer of $parameters parameters for square images of $size pixels: it tells $classes classes apart, which
`config.json` names.

## Accuracy

$accuracy

## Data

$data

## How to load it

In this folder:

```python
$usage
```

## Where it comes from

$provenance

The run's config:

```json
$config
```
""")

TRANSFORM = """\
transform = create_transform(**resolve_data_config(pretrained_cfg=config["pretrained_cfg"]))
with Image.open("image.jpg") as image:
    images = transform(image.convert("RGB"))[None]"""

# the library that a target is for, by the Hub's name
LIBRARIES = {"timm": "timm", "safetensors": "timm", "onnx": "onnx"}

USAGE = {
    "timm": """\
import timm
from PIL import Image
from timm.data import create_transform, resolve_model_data_config

model = timm.create_model("local-dir:.", pretrained=True).eval()  # or "hf-hub:<user>/<name>", once it is uploaded
transform = create_transform(**resolve_model_data_config(model))
with Image.open("image.jpg") as image:
    images = transform(image.convert("RGB"))[None]
logits = model(images)""",
    "safetensors": f"""\
import json

from PIL import Image
from safetensors import safe_open
from timm.data import create_transform, resolve_data_config
from timm.models.vision_transformer import VisionTransformer

with safe_open("model.safetensors", "pt") as file:
    config = json.loads(file.metadata()["config"])
    weights = {{name: file.get_tensor(name) for name in file.keys()}}
model = VisionTransformer(**config["model_args"]).eval()
model.load_state_dict(weights)
{TRANSFORM}
logits = model(images)""",
    "onnx": f"""\
import json
from pathlib import Path

import onnxruntime
from PIL import Image
from timm.data import create_transform, resolve_data_config

config = json.loads(Path("config.json").read_text())
{TRANSFORM}
session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
(logits,) = session.run(["logits"], {{"images": images.numpy()}})""",
}


def write_model_card(run: SavedRun, target: str, folder: Path) -> None:
    """Write ``folder/README.md`` for the run's model, exported for ``target``, a key of `USAGE`."""
    config = run.config | {"DATA": run.config["DATA"] | {"root": _data_name(run)}}
    card = CARD.substitute(
        front_matter=_front_matter(run, target),
        name=run.about["name"],
        parameters=f"{parameter_count(**run.config['MODEL']):,}",
        size=run.config["MODEL"]["image_size"],
        classes=len(run.class_names),
        accuracy=_accuracy(run),
        data=_data(run),
        usage=USAGE[target],
        provenance="\n".join(f"- {name}: {value}" for name, value in _provenance(run).items()),
        config=json.dumps(config, indent=2, default=str),
    )
    (folder / "README.md").write_text(card)


def _front_matter(run: SavedRun, target: str) -> str:
    measured = run.evaluation
    named = {"metric_type": "accuracy", "task_type": "image-classification"}
    data = {"dataset_name": _data_name(run), "dataset_type": _data_name(run)}
    results = [
        EvalResult(**named, **data, metric_name=title, metric_value=round(measured[key], 4))  # pyright: ignore[reportArgumentType]
        for key, title in (("top1", "top-1"), ("top5", "top-5"))
        if measured
    ]
    return ModelCardData(
        library_name=LIBRARIES[target],
        pipeline_tag="image-classification",
        tags=["image-classification", "timm", "vision-transformer"],
        model_name=run.about["name"],
        eval_results=results or None,
    ).to_yaml()


def _accuracy(run: SavedRun) -> str:
    measured = run.evaluation
    if measured is None:
        return f"Not evaluated after step {run.step:,}, at which these weights were saved."
    return (
        f"Top-1 {100 * measured['top1']:.2f} %, top-5 {100 * measured['top5']:.2f} %, mean cross-entropy "
        f"{measured['loss']:.4f}, of {measured['samples']:,} held-out images."
    )


def _data_name(run: SavedRun) -> str:
    """Return the name of the data set's folder, without those above it, which mean nothing elsewhere."""
    return Path(run.config["DATA"]["root"]).name


def _data(run: SavedRun) -> str:
    counts = run.about.get("data", {})
    if "train_samples" not in counts:
        return f"`{_data_name(run)}`."
    return (
        f"`{_data_name(run)}`: {counts['train_samples']:,} images for training and {counts['eval_samples']:,} for "
        f"evaluation, in {counts['num_classes']:,} classes."
    )


def _provenance(run: SavedRun) -> dict[str, Any]:
    about: Mapping[str, Any] = run.about
    plan = about["plan"]
    versions = (f"{name} {version}" for name, version in about["versions"].items() if version)
    return {
        "checkpoint": f"`{run.checkpoint.name}`: {run.step:,} of {plan['total_steps']:,} optimizer steps of "
        f"{plan['total_batch']:,} images{'; moving average of the weights' if run.weights == EMA else ''}",
        "command": f"`{format_command(about['argv'])}`",
        "commit": f"`{about['commit']}`",
        "processes": f"{plan['gpus']} ({name_hardware(about['hardware'])})",
        "versions": ", ".join(versions),
    }
