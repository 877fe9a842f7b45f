"""Which parameters of timm's models are how many matrices."""

import pytest
import torch
from timm import create_model

from common.engine.linear_pairs import count_matrices


@pytest.mark.parametrize(
    ("model", "block", "expected"),
    [
        ("vit_tiny_patch16_224", "blocks.0", [3, 1, 1, 1, 0]),
        # The gate and the values of SwiGLU are stacked.
        ("eva02_tiny_patch14_224", "blocks.0", [3, 1, 2, 1, 0]),
        # A block with global queries computes keys and values only.
        ("gcvit_xxtiny", "stages.0.blocks.1", [2, 1, 1, 1, 0]),
    ],
)
def test_which_parameters_are_how_many_matrices(model, block, expected):
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in create_model(model).state_dict().items()}
    layers = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2", "norm1")
    assert [count_matrices(f"{block}.{layer}.weight", shapes) for layer in layers] == expected
