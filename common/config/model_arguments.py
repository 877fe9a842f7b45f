"""The arguments of the model: their defaults, their checks, and what timm calls them."""

import math
import re
from typing import Any, Literal

from pydantic import model_validator

from common.config.fields import Number, Section, key, parse
from common.errors import nearest_multiples

_TIMM_SIZES = {(192, 12, 3): "tiny", (384, 12, 6): "small", (768, 12, 12): "base", (1024, 24, 16): "large"}
_TIMM_SIZES |= {(1280, 32, 16): "huge"}
_TIMM_NAMES = re.compile(
    r"vit_(tiny_patch16|(small|base|large)_patch(16|32))_(224|384)|deit3_(small|base|large)_patch16_(224|384)"
    "|(vit|deit3)_huge_patch14_224"
)
DEIT3_INIT_VALUES = 1e-6


class ModelArguments(Section):
    """What the config's MODEL may say; the defaults are ViT-S/16 for ImageNet-1k."""

    image_size: int = key(224, "side of the square input", unit="pixels", ge=1, le=65536)
    patch_size: int = key(16, "side of a patch; divides `image_size`", unit="pixels", ge=1, le=65536)
    width: int = key(384, "channels of a token", ge=1, le=65536)
    depth: int = key(12, "number of blocks", ge=1, le=1000)
    heads: int = key(6, "attention heads; divides `width`", ge=1)
    mlp_ratio: Number = key(4.0, "hidden channels of the MLP / `width`", gt=0, le=1000)
    num_classes: int = key(1000, "classes of the head", ge=1, le=10**8)
    dropout: Number = key(0.0, "after the position embedding and after every projection of a block but qkv", ge=0, lt=1)
    drop_path: Number = key(
        0.0, "stochastic depth (arXiv 1603.09382): rate of the last block, rising from 0", ge=0, lt=1
    )
    stem: Literal["patch", "conv"] = key(
        "patch", "`conv`: 3 x 3 convolutions, one of stride 1 and then of stride 2, instead of the patch projection"
    )
    pool: Literal["cls", "avg", "seq"] = key(
        "cls", "what the head reads: the class token, the mean of the patches, or their learned mean (arXiv 2104.05704)"
    )
    position: Literal["learned", "sincos2d"] = key("learned", "position embedding; `sincos2d` is fixed")
    no_embed_class: bool = key(False, "no position embedding for the class token and the registers")
    reg_tokens: int = key(0, "register tokens (arXiv 2309.16588), which the head does not read", ge=0, le=65536)
    init_values: Number | None = key(
        None,
        "LayerScale (arXiv 2103.17239): initial factor of every residual branch; `None`: no LayerScale",
        ge=0,
        le=1,
    )
    activation_checkpoint: bool = key(False, "recompute each block in the backward pass, to save memory")

    @model_validator(mode="after")
    def _divide(self) -> "ModelArguments":
        if self.image_size % self.patch_size:
            nearest = nearest_multiples(self.image_size, self.patch_size)
            raise ValueError(
                f"image_size={self.image_size} is not a multiple of patch_size={self.patch_size}; "
                f"the nearest that are: {nearest}"
            )
        unit = self.patch_size
        if self.stem == "conv" and (unit & (unit - 1) or self.width % unit):
            raise ValueError(f"stem='conv' needs a power of two that divides width as patch_size, not {unit}")
        unit = math.lcm(self.heads, 4) if self.position == "sincos2d" else self.heads
        if self.width % unit:
            reason = f"heads={self.heads}" if unit == self.heads else f"{unit} (heads, and 4 for sincos2d)"
            nearest = nearest_multiples(self.width, unit)
            raise ValueError(f"width={self.width} is not a multiple of {reason}; the nearest that are: {nearest}")
        return self

    @property
    def stem_channels(self) -> list[int]:
        """Channels before, between and after the convolutions of ``stem="conv"``."""
        return [3, *(self.width >> i for i in reversed(range(self.patch_size.bit_length())))]

    @property
    def prefix_tokens(self) -> int:
        """Tokens before those of the patches: the class token and the registers."""
        return (self.pool == "cls") + self.reg_tokens

    @property
    def embedded_prefix(self) -> int:
        """Those of them that have a position embedding."""
        return 0 if self.no_embed_class else self.prefix_tokens


def parse_model_arguments(arguments: dict[str, Any]) -> ModelArguments:
    """Check the names and the values of `arguments`; the ones left out take their defaults.

    Raises ValueError for an unknown name or a value that does not fit.
    """
    return parse(ModelArguments, arguments)


def is_not_timms(stem: str = "patch", pool: str = "cls", **_: Any) -> bool:
    """Return whether timm's `VisionTransformer` has no such stem or pooling."""
    return stem == "conv" or pool == "seq"


def timm_arguments(**arguments: Any) -> dict[str, Any]:
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
        "no_embed_class": a.no_embed_class,
        "reg_tokens": a.reg_tokens,
        "init_values": a.init_values,
    }


def timm_name(**arguments: object) -> str | None:
    """Return the `timm.create_model` name of a standard shape, as "vit_base_patch16_224", or None for any other."""
    a = parse_model_arguments(arguments)
    size = _TIMM_SIZES.get((a.width, a.depth, a.heads))
    family = {(None, False): "vit", (DEIT3_INIT_VALUES, True): "deit3"}.get((a.init_values, a.no_embed_class))
    name = f"{family}_{size}_patch{a.patch_size}_{a.image_size}"
    standard = a.pool == "cls" and a.mlp_ratio == 4 and a.reg_tokens == 0
    return name if standard and _TIMM_NAMES.fullmatch(name) else None
