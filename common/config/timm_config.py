"""MODEL with ``timm``: a model of timm's by name."""

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, model_validator

from common.config.fields import Section, key
from common.errors import did_you_mean

# Keys of DATA, and what timm's configuration of weights calls them.
TIMM_DATA = {"mean": "mean", "std": "std", "interpolation": "interpolation", "eval_crop": "crop_pct"}


class TimmModel(Section):
    """MODEL with ``timm``; further keys are arguments of that model, which `build_model` checks."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    timm: str
    image_size: int = key(..., "side of the square input", ge=1, le=65536)
    num_classes: int | None = key(None, "classes of the head", ge=1, le=10**8)
    pretrained: bool = key(False, "with `timm`: its weights as `INIT`")
    sync_bn: bool = key(False, "with `timm`: batch norms take the statistics of all GPUs' images")
    activation_checkpoint: bool = False

    @model_validator(mode="before")
    @classmethod
    def _size(cls, values: Any) -> Any:
        return {"image_size": pretrained_config(values["timm"]).input_size[-1], **values}


def pretrained_config(name: str) -> Any:
    """Return timm's configuration of the model or weights ``name``; raise ValueError with the nearest name."""
    import timm  # takes a second
    from timm.models import get_pretrained_cfg

    architecture = name.partition(".")[0]
    if not timm.is_model(architecture):
        known = did_you_mean(architecture, timm.list_models())
        raise ValueError(f"timm={name!r}: timm has no such model{known}; timm.list_models() lists all")
    try:
        return get_pretrained_cfg(name, allow_unregistered=False)
    except RuntimeError:
        known = did_you_mean(name, timm.list_pretrained(f"{architecture}.*"))
        raise ValueError(f"timm={name!r}: timm has no such weights{known}") from None


def data_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of DATA as the model's own configuration has them; none for a plain ViT."""
    if not model["timm"]:
        return {}
    about = pretrained_config(model["timm"])
    found = {name: getattr(about, theirs) for name, theirs in TIMM_DATA.items()}
    return {name: value for name, value in found.items() if name != "interpolation" or value in ("bilinear", "bicubic")}
