"""The keys of MODEL: the shape of a plain ViT, or with ``timm`` a model of timm's by name."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import ConfigDict, model_validator

from common.config.fields import BelowOne, Natural, Number, Section, UpToOne, key, parse
from common.errors import UserError
from common.files import Values
from common.text import did_you_mean, nearest_multiples

# Keys of DATA, and what timm's configuration of weights calls them.
TIMM_DATA = {
    "mean": "mean",
    "std": "std",
    "interpolation": "interpolation",
    "eval_crop": "crop_pct",
}
# Values of MODEL that timm's `VisionTransformer` does not have.
NOT_IN_TIMM = (("stem", "conv"), ("stem", "residual"), ("pool", "seq"))
Size = Annotated[int, Ge(1), Le(65536)]
Classes = Annotated[int, Ge(1), Le(10**8)]


class Model(Section):
    """The defaults are ViT-S/16 for ImageNet-1k."""

    timm: str | None = None
    """name of a timm model; the other keys are its arguments (docs/fine-tune.md)"""

    image_size: Size = 224
    """side of the square input, in pixels"""

    patch_size: Size = 16
    """side of a patch, in pixels; divides `image_size`"""

    width: Size = 384
    """channels of a token"""

    depth: int = key(12, ge=1, le=1000)
    """number of blocks"""

    heads: Natural = 6
    """attention heads; divides `width`"""

    mlp_ratio: Number = key(4.0, gt=0, le=1000)
    """outputs of the MLP's first layer / `width`"""

    mlp: Literal["gelu", "swiglu"] = "gelu"
    """activation; with `swiglu` (arXiv 2002.05202) half of the outputs are its gate:
    `mlp_ratio=16/3` has the parameters of 4 with `gelu`"""

    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """`rmsnorm`: arXiv 1910.07467"""

    num_classes: Classes | None = None
    """classes of the head; `None`: the data set's"""

    dropout: BelowOne = 0.0
    """after the position embedding and every projection of a block except qkv"""

    drop_path: BelowOne = 0.0
    """stochastic depth (arXiv 1603.09382): the last block's rate"""

    stem: Literal["patch", "conv", "residual"] = "patch"
    """`conv`: 3 x 3 convolutions, one of stride 1 and then of stride 2, as patch embedding;
    `residual`: after each of stride 2 also a residual branch of two"""

    pool: Literal["cls", "avg", "seq"] = "cls"
    """input of the head: class token, mean of the patches, or learned mean (arXiv 2104.05704)"""

    position: Literal["learned", "sincos2d"] = "learned"
    """position embedding; `sincos2d` is fixed"""

    no_embed_class: bool = False
    """no position embedding for class token and registers"""

    reg_tokens: int = key(0, ge=0, le=65536)
    """register tokens (arXiv 2309.16588), which the head does not read"""

    init_values: UpToOne | None = None
    """LayerScale (arXiv 2103.17239): first factor of a residual branch; `None`: none"""

    activation_checkpoint: bool = False
    """recompute each block in the backward pass, to save memory"""

    @model_validator(mode="after")
    def _divide(self) -> "Model":
        """Refuse sizes that do not divide."""
        if self.image_size % self.patch_size:
            raise ValueError(
                f"image_size={self.image_size} is not a multiple of patch_size={self.patch_size}; "
                f"the nearest that are: {nearest_multiples(self.image_size, self.patch_size)}"
            )
        if self.mlp == "swiglu" and self.hidden_width % 2:
            raise ValueError(
                f"mlp='swiglu' needs an even width x mlp_ratio, not {self.hidden_width}; "
                f"the nearest that are: {nearest_multiples(self.hidden_width, 2)}"
            )
        # Each convolution but the first halves the image's side and doubles the channels.
        unit = self.patch_size
        if self.stem != "patch" and (unit & (unit - 1) or self.width % unit):
            raise ValueError(
                f"stem={self.stem!r} needs a power of two that divides width as patch_size, not "
                f"{unit}"
            )
        # a fixed embedding has sine and cosine of two coordinates
        unit = math.lcm(self.heads, 4) if self.position == "sincos2d" else self.heads
        if self.width % unit:
            raise ValueError(
                f"width={self.width} is not a multiple of {unit} (heads, and 4 for sincos2d); "
                f"the nearest that are: {nearest_multiples(self.width, unit)}"
            )
        return self

    @property
    def hidden_width(self) -> int:
        """Channels that the MLP's first layer returns."""
        return int(self.width * self.mlp_ratio)

    @property
    def classes(self) -> int:
        """Classes of the head; ImageNet's where the data set is not known."""
        return self.num_classes or 1000

    @property
    def prefix_tokens(self) -> int:
        """Tokens before those of the patches: the class token and the registers."""
        return (self.pool == "cls") + self.reg_tokens

    @property
    def embedded_prefix(self) -> int:
        """Those of them that have a position embedding."""
        return 0 if self.no_embed_class else self.prefix_tokens


class TimmModel(Section):
    """MODEL with ``timm``; further keys are arguments of that model, which `build_model` checks."""

    model_config = ConfigDict(extra="allow")

    timm: str
    image_size: Size
    """side of the square input"""

    num_classes: Classes | None = None
    """classes of the head"""

    pretrained: bool = False
    """with `timm`: its weights as `INIT`"""

    sync_bn: bool = False
    """with `timm`: batch-norm statistics over all GPUs"""

    activation_checkpoint: bool = False
    """recompute each block in the backward pass"""

    @model_validator(mode="before")
    @classmethod
    def _size(cls, values: Any) -> Any:
        """Take the size of the input that the model is configured with where none is given."""
        return {"image_size": pretrained_config(values["timm"]).input_size[-1], **values}


def choose_model(value: Any, parse_shape: Any) -> Any:
    """Return MODEL's ``value`` as `TimmModel` where it names one, else by ``parse_shape``."""
    # A ``timm`` that is no text goes to ``parse_shape``, which refuses it as any wrong value.
    has_name = isinstance(value, Mapping) and isinstance(value.get("timm"), str)
    return parse(TimmModel, value) if has_name else parse_shape(value)


def pretrained_config(name: str) -> Any:
    """Return timm's configuration of the model or weights ``name``.

    Raises `UserError` with the nearest name.
    """
    import timm  # takes a second
    from timm.models import get_pretrained_cfg

    # "vit_small_patch16_224.augreg_in21k" is an architecture and the tag of its weights.
    architecture = name.partition(".")[0]
    if not timm.is_model(architecture):
        known = did_you_mean(architecture, timm.list_models())
        raise UserError(
            f"timm={name!r}: timm has no such model{known}; timm.list_models() lists all"
        )
    try:
        return get_pretrained_cfg(name, allow_unregistered=False)
    except RuntimeError:
        known = did_you_mean(name, timm.list_pretrained(f"{architecture}.*"))
        raise UserError(f"timm={name!r}: timm has no such weights{known}") from None


def data_of(data_config: Values) -> dict[str, Any]:
    """Return the keys of DATA of timm's ``data_config``.

    Without an interpolation that training does not know.
    """
    data = {name: data_config[theirs] for name, theirs in TIMM_DATA.items()}
    if data["interpolation"] not in ("bilinear", "bicubic"):
        del data["interpolation"]
    return data
