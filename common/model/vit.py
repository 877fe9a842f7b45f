"""The Vision Transformer (Dosovitskiy et al., arXiv 2010.11929), equal to timm's
`VisionTransformer`.

Parameter names, mathematics and initialisation are timm's, so a `state_dict` loads strictly either
way. The model does not know the parallel mode it is in: `shard_model` replaces its layers.

Shape suffixes: B batch, C image channels, Y X pixel rows and columns, N tokens, D width, H heads,
E width of a head, M width of the hidden layer, K values of a patch.
"""

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from common.config.model_keys import Model

MASK_LEVELS = 1 << 16  # 16 random bits per value of a dropout mask


def init_weight_(tensor: Tensor, std: float = 0.02) -> Tensor:
    """Initialise ``tensor``, unless it is on the meta device, where that would take a second."""
    return tensor if tensor.is_meta else nn.init.trunc_normal_(tensor, std=std)


def build_linear(in_features: int, out_features: int) -> nn.Linear:
    layer = nn.Linear(in_features, out_features)
    init_weight_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` in its weight's dtype, to which autocast on CPUs does not cast its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def build_norm(arguments: Model) -> nn.Module:
    norm = RMSNorm if arguments.norm == "rmsnorm" else nn.LayerNorm
    return norm(arguments.width, eps=1e-6)


class PatchProjection(nn.Conv2d):
    """A convolution with non-overlapping patches as a matrix product: [B, C, Y, X] to [B, N, D]."""

    def forward(self, images_BCYX: Tensor) -> Tensor:
        side = self.stride[0]
        # [B, C, rows, side, columns, side]
        patches = images_BCYX.unflatten(3, (-1, side))
        patches = patches.unflatten(2, (-1, side))
        # [B, rows, columns, C, side, side]
        patches = patches.permute(0, 2, 4, 1, 3, 5)
        # A patch is the C * side * side values that a filter of the convolution multiplies.
        patches_BNK = patches.flatten(3).flatten(1, 2)
        weight_DK = self.weight.flatten(1)
        return F.linear(patches_BNK, weight_DK, self.bias)


class PatchEmbed(nn.Module):
    def __init__(self, patch_size: int, width: int):
        super().__init__()
        self.proj = PatchProjection(3, width, kernel_size=patch_size, stride=patch_size)

    def forward(self, images_BCYX: Tensor) -> Tensor:
        return self.proj(images_BCYX)


def _convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    convolution = nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1)
    nn.init.kaiming_normal_(convolution.weight)
    nn.init.zeros_(convolution.bias)  # pyright: ignore[reportArgumentType]
    return convolution


class ResidualConvolutions(nn.Module):
    """Add two convolutions of [B, C, Y, X] to it.

    Without norms: the second convolution starts at zero (Fixup, arXiv 1901.09321).
    """

    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = _convolution(channels, channels)
        self.conv2 = _convolution(channels, channels)
        nn.init.zeros_(self.conv2.weight)

    def forward(self, x_BCYX: Tensor) -> Tensor:
        return x_BCYX + self.conv2(F.gelu(self.conv1(x_BCYX)))


class ConvStem(nn.Sequential):
    """Overlapping convolutions without batch norms: [B, C, Y, X] to [B, N, D].

    After Xiao et al., arXiv 2106.14881. All but the first have stride 2; with ``residual`` each of
    them is followed by `ResidualConvolutions`.
    """

    def __init__(self, width: int, patch_size: int, residual: bool):
        # With a width of 384 and patches of 16 pixels: 3, 24, 48, 96, 192, 384.
        convolutions = patch_size.bit_length()
        channels = [3, *(width >> i for i in reversed(range(convolutions)))]
        layers: list[nn.Module] = []
        for number, (before, after) in enumerate(pairwise(channels)):
            layers += [_convolution(before, after, stride=2 if number else 1), nn.GELU()]
            if residual and number:
                layers.append(ResidualConvolutions(after))
        super().__init__(*(layers if residual else layers[:-1]))

    def forward(self, images_BCYX: Tensor) -> Tensor:
        features_BDYX = super().forward(images_BCYX)
        return features_BDYX.flatten(2).transpose(1, 2)


class Dropout(nn.Dropout):
    """`nn.Dropout`, except that on CPUs and in compiled code it draws other random numbers.

    PyTorch draws one Bernoulli number per value on CPUs, which takes longer than a block's matrix
    products in bfloat16. Inductor computes one Philox per value, three to five times the cost of
    the memory traffic. Here a 64-bit random integer serves four values. ``p`` is rounded to a
    multiple of 1/65536; kept values are scaled by the inverse of the exact keep probability.
    """

    def forward(self, x: Tensor) -> Tensor:
        kept_levels = round((1 - self.p) * MASK_LEVELS)
        is_random = self.training and 0 < kept_levels < MASK_LEVELS
        if is_random and torch.compiler.is_compiling():
            is_kept = draw_mask(x, kept_levels)
            return torch.where(is_kept, x * (MASK_LEVELS / kept_levels), 0)
        if not is_random or not x.is_cpu:
            return super().forward(x)
        count = x.numel()
        integers = torch.empty((count + 3) // 4, dtype=torch.int64)
        # The default lower bound, 0, would never set the sign bit.
        integers.random_(-(2**63), None)
        levels = integers.view(torch.int16)
        # In place and without bool tensors, which PyTorch converts slowly.
        is_kept = levels.lt_(kept_levels - MASK_LEVELS // 2)
        # Up to three values of the last integer are left over.
        mask = is_kept[:count].view(x.shape).to(x.dtype)
        return (x * mask).mul_(MASK_LEVELS / kept_levels)


def draw_mask(x: Tensor, kept_levels: int) -> Tensor:
    """Return which values of ``x`` to keep, bool, in code that inductor compiles.

    A kernel of its own writes the mask packed, eight values a byte: a kernel for ``x`` would
    compute the random numbers of each value anew.
    """
    octets = (x.numel() + 7) // 8
    packed = torch.zeros(octets, dtype=torch.uint8, device=x.device)
    for first in (0, 4):
        integers = torch.randint(-(2**63), 2**63 - 1, (octets,), device=x.device)
        for number in range(4):
            levels = (integers >> 16 * number) & (MASK_LEVELS - 1)
            packed |= (levels < kept_levels).to(torch.uint8) << (first + number)
    bits = torch.arange(8, dtype=torch.uint8, device=x.device)
    is_kept = (packed[:, None] >> bits) & 1
    return is_kept.flatten()[: x.numel()].view(x.shape).bool()


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.head_width = width // heads
        self.qkv = build_linear(width, 3 * width)
        self.proj = build_linear(width, width)
        self.dropout = Dropout(dropout)

    def forward(self, x_BND: Tensor) -> Tensor:
        # Three slices of the projection, whose gradients are written side by side. timm permutes
        # them to the front, and its backward pass permutes a copy of all three back.
        qkv = self.qkv(x_BND)  # [B, N, 3 D]
        q_BHNE, k_BHNE, v_BHNE = map(self._split_heads, qkv.chunk(3, dim=-1))
        x_BHNE = attend(q_BHNE, k_BHNE, v_BHNE)
        # The heads side by side again.
        x_BND = x_BHNE.transpose(1, 2).flatten(2)
        return self.dropout(self.proj(x_BND))

    def _split_heads(self, x_BND: Tensor) -> Tensor:
        # Of a shard, H is the number of its heads.
        x_BNHE = x_BND.unflatten(-1, (-1, self.head_width))
        return x_BNHE.transpose(1, 2)


def attend(q_BHNE: Tensor, k_BHNE: Tensor, v_BHNE: Tensor) -> Tensor:
    """Return softmax(q k^T / sqrt(E)) v for each head [B, H, N, E]."""
    if q_BHNE.is_cpu and q_BHNE.dtype == torch.bfloat16 and q_BHNE.requires_grad:
        # PyTorch's fused kernel is 2 to 6 times slower here, mostly in its backward pass.
        # The smaller tensor is scaled, before the product.
        head_width = q_BHNE.shape[-1]
        q_BHNE = q_BHNE * head_width**-0.5
        scores_BHNN = q_BHNE @ k_BHNE.transpose(-2, -1)
        return scores_BHNN.softmax(dim=-1) @ v_BHNE
    return F.scaled_dot_product_attention(q_BHNE, k_BHNE, v_BHNE)


class Mlp(nn.Module):
    """Two linear layers with GELU, or SwiGLU: the first layer then returns a gate and the values
    that it multiplies, side by side, as timm's `SwiGLUPacked`.
    """

    def __init__(self, arguments: Model):
        super().__init__()
        hidden_width = arguments.hidden_width
        self.is_gated = arguments.mlp == "swiglu"
        self.fc1 = build_linear(arguments.width, hidden_width)
        self.drop1 = Dropout(arguments.dropout)
        if self.is_gated:
            hidden_width //= 2
            # As in timm, all values begin as 1.
            init_weight_(self.fc1.weight[hidden_width:], std=1e-6)
            nn.init.ones_(self.fc1.bias[hidden_width:])
        self.fc2 = build_linear(hidden_width, arguments.width)
        self.drop2 = Dropout(arguments.dropout)

    def forward(self, x_BND: Tensor) -> Tensor:
        hidden_BNM = self.fc1(x_BND)
        if self.is_gated:
            gate_BNM, values_BNM = hidden_BNM.chunk(2, dim=-1)
            hidden_BNM = F.silu(gate_BNM) * values_BNM
        else:
            hidden_BNM = F.gelu(hidden_BNM)
        hidden_BNM = self.drop1(hidden_BNM)
        return self.drop2(self.fc2(hidden_BNM))


class DropPath(nn.Module):
    """Drop a residual branch for randomly chosen samples (stochastic depth, arXiv 1603.09382)."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate
        # A tensor is an input of compiled code. A number would be a constant, and each block, with
        # its own rate, a graph of its own. On the CPU it is read without waiting.
        self.keep_rate = torch.tensor(1 - rate, device="cpu")

    def forward(self, branch_BND: Tensor) -> Tensor:
        if not self.training:
            return branch_BND
        batch = branch_BND.shape[0]
        if torch.compiler.is_compiling():
            uniforms_B11 = torch.rand(batch, 1, 1, device=branch_BND.device)
            is_kept_B11 = uniforms_B11 < self.keep_rate
            factors_B11 = is_kept_B11 / self.keep_rate
            return branch_BND * factors_B11.to(branch_BND.dtype)
        if self.rate == 0:
            return branch_BND
        keep = 1 - self.rate
        # Kept branches are scaled by 1 / keep: their expectation is that of evaluation.
        mask_B11 = branch_BND.new_empty(batch, 1, 1)
        mask_B11.bernoulli_(keep)
        return branch_BND * (mask_B11 / keep)


def bfloat16_as(tensor: Tensor, other: Tensor) -> Tensor:
    """Return ``tensor`` in bfloat16 if ``other`` is.

    So the residual stream stays in bfloat16 under autocast. float16's range is too small for it.
    """
    return tensor.bfloat16() if other.dtype == torch.bfloat16 else tensor


class LayerScale(nn.Module):
    """Multiply each channel of a residual branch by a learned factor (arXiv 2103.17239)."""

    def __init__(self, width: int, init_value: float):
        super().__init__()
        # float32, whatever autocast computes in: a value such as 1e-6 is learned.
        self.gamma = nn.Parameter(torch.full((width,), float(init_value)))

    def forward(self, branch_BND: Tensor) -> Tensor:
        return bfloat16_as(branch_BND * self.gamma, branch_BND)


class Block(nn.Module):
    def __init__(self, arguments: Model, drop_path: float):
        super().__init__()
        self.norm1 = build_norm(arguments)
        self.attn = Attention(arguments.width, arguments.heads, arguments.dropout)
        self.ls1 = _build_layer_scale(arguments)
        self.norm2 = build_norm(arguments)
        self.mlp = Mlp(arguments)
        self.ls2 = _build_layer_scale(arguments)
        self.drop_path = DropPath(drop_path) if arguments.drop_path else nn.Identity()

    def forward(self, x_BND: Tensor) -> Tensor:
        # Norms stand in the branches (pre-norm), so the residual stream is never rescaled.
        x_BND = x_BND + self.drop_path(self.ls1(self.attn(self.norm1(x_BND))))
        return x_BND + self.drop_path(self.ls2(self.mlp(self.norm2(x_BND))))


class VisionTransformer(nn.Module):
    """Map images [B, 3, image_size, image_size], or square ones of another size, to logits [B,
    classes].
    """

    head_names = ("head",)

    def __init__(self, arguments: Model):
        super().__init__()
        width = arguments.width
        depth = arguments.depth
        pool = arguments.pool
        self.heads = arguments.heads
        self.activation_checkpoint = arguments.activation_checkpoint
        # The numbers of class token and registers, and of those that have a position embedding.
        self.prefix_tokens = arguments.prefix_tokens
        self.embedded_prefix = arguments.embedded_prefix
        self.cls_token = _build_tokens(int(pool == "cls"), width)
        self.reg_token = _build_tokens(arguments.reg_tokens, width)
        self.pos_embed = _build_position(arguments)
        if arguments.stem == "patch":
            self.patch_embed = PatchEmbed(arguments.patch_size, width)
        else:
            is_residual = arguments.stem == "residual"
            self.patch_embed = ConvStem(width, arguments.patch_size, is_residual)
        self.dropout = Dropout(arguments.dropout)
        # Rates of drop_path grow linearly from 0.
        last = max(depth - 1, 1)
        drop_paths = [arguments.drop_path * i / last for i in range(depth)]
        self.blocks = nn.ModuleList(Block(arguments, drop_path) for drop_path in drop_paths)
        # As in timm, the last norm is before class-token pooling, but after mean pooling.
        self.norm = build_norm(arguments) if pool != "avg" else nn.Identity()
        self.attention_pool = build_linear(width, 1) if pool == "seq" else None
        self.fc_norm = build_norm(arguments) if pool == "avg" else nn.Identity()
        self.head = build_linear(width, arguments.classes)

    def forward(self, images_BCYX: Tensor) -> Tensor:
        x_BND = self.patch_embed(images_BCYX)
        batch, patches, _ = x_BND.shape
        pos_embed = resample_positions(self.pos_embed, patches, self.embedded_prefix)
        # In float32 it would make the residual stream float32 under autocast, as in timm.
        pos_embed = bfloat16_as(pos_embed, x_BND)
        # The patches alone have positions.
        if not self.embedded_prefix:
            x_BND = x_BND + pos_embed
        prefix = [token for token in (self.cls_token, self.reg_token) if token is not None]
        if prefix:
            expanded = [bfloat16_as(token, x_BND).expand(batch, -1, -1) for token in prefix]
            x_BND = torch.cat([*expanded, x_BND], dim=1)
        if self.embedded_prefix:
            x_BND = x_BND + pos_embed
        x_BND = self.dropout(x_BND)
        for block in self.blocks:
            if self.activation_checkpoint and self.training:
                # The backward pass computes the block again, with the same random numbers.
                x_BND = checkpoint(block, x_BND, use_reentrant=False)
            else:
                x_BND = block(x_BND)
        x_BND = self.norm(x_BND)
        features_BD = self.fc_norm(self._pool(x_BND))
        return self.head(features_BD)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return the patterns of the layers' parameters, as timm's models do for layer decay."""
        return {
            "stem": r"^(?:cls_token|reg_token|pos_embed|patch_embed)",
            # The last norm counts as a layer after all blocks.
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }

    def no_weight_decay(self) -> set[str]:
        """Return the parameters that timm's optimizers do not decay."""
        return {"cls_token", "reg_token", "pos_embed"}

    def _pool(self, x_BND: Tensor) -> Tensor:
        """Return the class token, or the mean of the patches, [B, D]."""
        if self.cls_token is not None:
            return x_BND[:, 0]
        patches_BND = x_BND[:, self.prefix_tokens :]
        if self.attention_pool is None:
            return patches_BND.mean(dim=1)
        # The weights of the mean are learned functions of the patch (SeqPool, arXiv 2104.05704).
        shares_BN1 = self.attention_pool(patches_BND).softmax(dim=1)
        # [B, 1, N] times [B, N, D], without the 1
        return (shares_BN1.mT @ patches_BND)[:, 0]


def _build_layer_scale(arguments: Model) -> nn.Module:
    value = arguments.init_values
    return nn.Identity() if value is None else LayerScale(arguments.width, value)


def _build_tokens(count: int, width: int) -> nn.Parameter | None:
    if not count:
        return None
    tokens_1ND = torch.empty(1, count, width)
    return nn.Parameter(tokens_1ND.normal_(std=1e-6))


def _build_position(arguments: Model) -> nn.Parameter:
    """Return the position embedding [1, prefix + side * side, width]."""
    side = arguments.image_size // arguments.patch_size
    width = arguments.width
    prefix = arguments.embedded_prefix
    if arguments.position == "learned":
        table_1ND = torch.empty(1, prefix + side * side, width)
        return nn.Parameter(init_weight_(table_1ND))
    # A parameter, although it is fixed: it is in the state_dict, as in timm.
    return nn.Parameter(build_sincos2d(side, width, prefix), requires_grad=False)


def resample_positions(table_1ND: Tensor, patches: int, prefix: int) -> Tensor:
    """Return the position embedding of a square of ``patches``; that of ``prefix`` tokens is kept.

    Equal to timm's `resample_abs_pos_embed` but for rounding. Channels are independent, so they may
    be sharded.
    """
    if table_1ND.shape[1] == prefix + patches:
        return table_1ND
    # Both grids are square: `MODEL.image_size` is one number.
    old = math.isqrt(table_1ND.shape[1] - prefix)
    new = math.isqrt(patches)
    # What each old row adds to each new one.
    unit_11OO = torch.eye(old, device=table_1ND.device)[None, None]
    kernel_11NO = F.interpolate(unit_11OO, (new, old), mode="bicubic", antialias=True)
    kernel_NO11 = kernel_11NO.permute(2, 3, 0, 1)
    grid_YXD = table_1ND[0, prefix:].unflatten(0, (old, old))
    # Rows, then columns. Interpolating the grid itself would have a gradient that GPUs add up in
    # any order, and runs that cannot be repeated.
    for _ in range(2):
        grid_YXD = (kernel_NO11 * grid_YXD).sum(1).transpose(0, 1)
    resampled_ND = grid_YXD.flatten(0, 1).to(table_1ND.dtype)
    return torch.cat([table_1ND[:, :prefix], resampled_ND[None]], dim=1)


def build_sincos2d(side: int, width: int, prefix: int) -> Tensor:
    """Return the fixed position embedding [1, prefix + side * side, width].

    It is 0 for the first ``prefix`` tokens. A patch has sin x, cos x, sin y, cos y, a quarter of
    the width each. Frequencies decrease geometrically from 1 to 1/10000; formula of arXiv
    2205.01580 (big_vision, `posemb_sincos_2d`).
    """
    exponents = torch.linspace(0, 1, width // 4)
    frequencies = 10_000.0**-exponents  # [width / 4]
    positions = torch.arange(side, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)  # [side, width / 4]
    # Row by row, as `PatchEmbed` counts patches: both [side * side, width / 4].
    rows = angles.repeat_interleave(side, dim=0)
    columns = angles.repeat(side, 1)
    table_ND = torch.cat([columns.sin(), columns.cos(), rows.sin(), rows.cos()], dim=1)
    return F.pad(table_ND, (0, 0, prefix, 0))[None]
