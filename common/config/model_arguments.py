"""The arguments of the model: their defaults, their checks, and what timm calls them."""

import dataclasses
import math
from typing import Any

from common.errors import UserError, did_you_mean, nearest_multiples

_TIMM_SIZES = {(192, 12, 3): "tiny", (384, 12, 6): "small", (768, 12, 12): "base", (1024, 24, 16): "large"}
CHOICES = {"pool": ("cls", "avg"), "position": ("learned", "sincos2d")}


def _argument(default: object, meaning: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": meaning})


@dataclasses.dataclass(frozen=True)
class ModelArguments:
    """What the config's MODEL may say; the defaults are ViT-S/16 for ImageNet-1k."""

    image_size: int = _argument(224, "side of the square input, pixels")
    patch_size: int = _argument(16, "side of a patch, pixels; divides `image_size`")
    width: int = _argument(384, "channels of a token")
    depth: int = _argument(12, "number of blocks")
    heads: int = _argument(6, "attention heads; divides `width`")
    mlp_ratio: float = _argument(4.0, "hidden channels of the MLP / `width`")
    num_classes: int = _argument(1000, "classes of the head")
    dropout: float = _argument(0.0, "after the position embedding and after every projection of a block but qkv")
    drop_path: float = _argument(0.0, "stochastic depth (arXiv 1603.09382): rate of the last block, rising from 0")
    pool: str = _argument("cls", "what the head reads: the class token, or the mean of the patches (no class token)")
    position: str = _argument("learned", "position embedding; `sincos2d` is fixed")
    activation_checkpoint: bool = _argument(False, "recompute each block in the backward pass, to save memory")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            self._check_value(field.name, getattr(self, field.name), type(field.default))
        if self.image_size % self.patch_size:
            nearest = nearest_multiples(self.image_size, self.patch_size)
            raise UserError(
                f"MODEL.image_size={self.image_size} is not a multiple of MODEL.patch_size={self.patch_size}; "
                f"the nearest that are: {nearest}"
            )
        unit = math.lcm(self.heads, 4) if self.position == "sincos2d" else self.heads
        if self.width % unit:
            reason = f"MODEL.heads={self.heads}" if unit == self.heads else f"{unit} (MODEL.heads, and 4 for sincos2d)"
            nearest = nearest_multiples(self.width, unit)
            raise UserError(f"MODEL.width={self.width} is not a multiple of {reason}; the nearest that are: {nearest}")

    @staticmethod
    def _check_value(name: str, value: object, kind: type) -> None:
        kinds = (int, float) if kind is float else (kind,)
        if not isinstance(value, kinds) or (kind is not bool and isinstance(value, bool)):
            raise UserError(f"MODEL.{name}={value!r} must be of type {kind.__name__}")
        if name in CHOICES and value not in CHOICES[name]:
            hint = did_you_mean(value, CHOICES[name])
            raise UserError(f"MODEL.{name}={value!r} is none of {', '.join(CHOICES[name])}{hint}")
        if name in ("dropout", "drop_path"):
            if not 0 <= value < 1:
                raise UserError(f"MODEL.{name}={value} must be at least 0 and below 1")
        elif kind in (int, float) and not value > 0:
            raise UserError(f"MODEL.{name}={value} must be above 0")


def parse_model_arguments(arguments: dict[str, object]) -> ModelArguments:
    """Check the names and the values of `arguments`; the ones left out take their defaults."""
    known = [field.name for field in dataclasses.fields(ModelArguments)]
    for name in arguments:
        if name not in known:
            raise UserError(f"MODEL.{name} is not an argument of the model{did_you_mean(name, known)}")
    return ModelArguments(**arguments)


def timm_arguments(**arguments: object) -> dict[str, object]:
    """Return the arguments with which `timm.models.vision_transformer.VisionTransformer` is the same model.

    They also override every shape in `timm.create_model(name, **arguments)` for any plain ViT's name.
    """
    a = parse_model_arguments(arguments)
    return {
        "img_size": a.image_size,
        "patch_size": a.patch_size,
        "embed_dim": a.width,
        "depth": a.depth,
        "num_heads": a.heads,
        "mlp_ratio": a.mlp_ratio,
        "num_classes": a.num_classes,
        "pos_drop_rate": a.dropout,
        "proj_drop_rate": a.dropout,
        "drop_path_rate": a.drop_path,
        "global_pool": "token" if a.pool == "cls" else "avg",
        "class_token": a.pool == "cls",
    }


def timm_name(**arguments: object) -> str | None:
    """Return the `timm.create_model` name of a standard shape, as "vit_base_patch16_224", or None for any other."""
    a = parse_model_arguments(arguments)
    size = _TIMM_SIZES.get((a.width, a.depth, a.heads))
    name = f"vit_{size}_patch{a.patch_size}_{a.image_size}"
    standard = a.pool == "cls" and a.mlp_ratio == 4 and a.patch_size in (16, 32) and a.image_size in (224, 384)
    return name if size and standard and not name.startswith("vit_tiny_patch32") else None
