"""A model of timm, of the Hugging Face Hub or of an export, as evaluate and predict use a run's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from common.checkpoint.model_state import MODEL, infer_model
from common.checkpoint.save import MARKER
from common.checkpoint.saved_run import SavedRun, open_run
from common.checkpoint.sources import HUB, open_source, resolve_source
from common.config.load import restore_config
from common.errors import UserError

OTHERS = ", a folder that export wrote for timm, a model of timm's by name, or hf-hub:<user>/<name>"
BATCH = 64  # images that are evaluated at once, unless ``MICRO_BATCH_SIZE`` is set
DATA = {"mean": "mean", "std": "std", "eval_crop": "crop_pct"}  # keys of DATA, and what timm calls them


@dataclass(frozen=True)
class PretrainedRun(SavedRun):
    """A model that no run of this project trained; ``descriptions`` are its classes' names in words."""

    state: Mapping[str, Tensor] = field(default_factory=dict)
    descriptions: Sequence[str] = ()

    @property
    def class_names(self) -> list[str]:
        return list(self.descriptions) or super().class_names

    def load_weights(self) -> dict[str, Tensor]:
        return dict(self.state)


def open_model(name: str, settings: Sequence[str] = (), *, raw: bool = False) -> SavedRun:
    """Open what `open_run` does, and models that `resolve_source` names or `export` wrote for timm.

    Their images are prepared as timm's configuration says, but for interpolations that training does not know.
    """
    source = resolve_source(name)
    path = Path(source)
    if not source.startswith(HUB) and ((path / MARKER).is_file() or not (path / MODEL).is_file()):
        return open_run(name, settings, raw=raw)
    weights, heads, about, _ = open_source(source)
    if heads is None or "head.bias" not in weights:
        raise UserError(f"{name}: it has no {'classes' if heads else 'config.json'}, so there is nothing to evaluate")
    names, descriptions = _name_classes(about, classes := len(weights["head.bias"]))
    model = infer_model(source, weights) | {"heads": heads, "num_classes": classes}
    data = {key: about[theirs] for key, theirs in DATA.items() if about.get(theirs)}
    values = {"TOTAL_BATCH_SIZE": BATCH, "NUM_EPOCHS": 1, "LEARNING_RATE": 1, "MODEL": model, "DATA": data}
    how = about.get("interpolation", "bilinear")
    if is_known := how in ("bilinear", "bicubic"):
        data["interpolation"] = how
    return PretrainedRun(
        folder=Path("outputs"),
        checkpoint=Path(source),
        chosen="pretrained" if is_known else f"pretrained; images are resized bilinearly here, not {how}",
        config=restore_config(values, settings, where=source),
        about={"task": "imagenet_dali", "data": {"class_names": names}, "plan": {"micro_batch": BATCH}},
        state=weights,
        descriptions=descriptions,
    )


def _name_classes(about: Mapping[str, Any], count: int) -> tuple[list[str], list[str]]:
    """Return the classes' names and what they mean; of ImageNet's those that timm knows."""
    from timm.data import ImageNetInfo, infer_imagenet_subset

    if about.get("label_names"):
        return list(about["label_names"]), []
    subset = infer_imagenet_subset({"num_classes": count})
    if subset is None:
        return [], []
    info = ImageNetInfo(subset)
    return info.label_names(), [info.index_to_description(label) for label in range(count)]
