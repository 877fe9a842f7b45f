"""Dropout in a compiled block: what inductor generates for a GPU, and its masks on a CPU."""

import re
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._inductor import config

from common.model import vit
from common.model.build import build_model
from common.model.vit import Dropout
from common.testing.gpu_code import Generated, generate_code
from common.testing.ranks import run_ranks, slow

# Dynamo looks at the gradient of a parameter's copy
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
BATCH = 64
TOKENS = 197
WIDTH = 768
VALUES = BATCH * TOKENS * WIDTH
UNIT = 2 * VALUES  # bytes: one read or write of the block's input in bfloat16


def generate_block(dropout: float) -> list[Generated]:
    """Return the code of a block of ViT-B/16, its attention by PyTorch's kernel."""
    vit.attend = lambda *qkv: torch.ops.aten._scaled_dot_product_flash_attention(*qkv)[0]
    with torch.device("meta"):
        model = build_model(
            image_size=224, width=WIDTH, depth=1, heads=12, num_classes=10, dropout=dropout
        )
    return generate_code(model.blocks[0], (BATCH, TOKENS, WIDTH))


generates_code = pytest.mark.skipif(
    torch.__version__ < "2.15", reason="older fake CUDA tensors need a driver"
)


@pytest.fixture(scope="module")
def blocks() -> list[list[Generated]]:
    """The code without and with dropout."""
    return [run_ranks(1, generate_block, dropout)[0] for dropout in (0.0, 0.1)]


@generates_code
def test_a_philox_draws_four_values(blocks):
    """Dropout after attention's projection, and after the layers of the MLP, 4 and 1 times as wide;
    none is drawn again in the backward pass.
    """
    forward, backward = (generated.code for generated in blocks[1])
    philox = 0
    for kernel in forward.split("@triton.jit")[1:]:
        calls = kernel.count("randint64(")
        if calls:
            (size,) = re.findall(r"xnumel = (\d+)", kernel)
            philox += calls * int(size)
    assert philox * 4 == (1 + 4 + 1) * VALUES
    assert "tl.rand" not in forward + backward
    assert "randint64(" not in backward


@generates_code
def test_dropout_reads_and_writes_few_bytes(blocks):
    without, with_dropout = (
        sum(generated.nbytes for generated in graphs) / UNIT for graphs in blocks
    )
    assert 1 < with_dropout - without <= 15


def generate_dropout_of_pytorch() -> str:
    """Return a model's code where torch draws four random numbers at once."""
    wrong = config.patch(use_rand4x=True) if hasattr(config, "use_rand4x") else nullcontext()
    with wrong:
        forward, _ = generate_code(nn.Sequential(nn.Dropout(0.5)), (64, 64))
    return forward.code


@generates_code
def test_wrong_masks_of_torch_are_turned_off():
    """pytorch issue 198333: on by default in torch 2.13 and 2.14."""
    (code,) = run_ranks(1, generate_dropout_of_pytorch)
    assert "tl.rand(" in code
    assert "rand4x" not in code


@pytest.mark.parametrize("backend", ["aot_eager", slow("inductor")])
def test_the_backward_pass_has_the_masks_of_the_forward_pass(backend):
    """For any number of values. The generator's state repeats the masks."""
    torch._dynamo.reset()
    layer = torch.compile(Dropout(0.3), backend=backend)
    scale = vit.MASK_LEVELS / round(0.7 * vit.MASK_LEVELS)
    for shape in ((13,), (5, 7, 64)):
        x = torch.rand(shape).add(1).requires_grad_()
        state = torch.get_rng_state()
        y = layer(x)
        y.sum().backward()
        assert torch.equal(y, x * x.grad)
        assert {*x.grad.unique().tolist()} <= {0.0, torch.tensor(scale).item()}
        torch.set_rng_state(state)
        assert torch.equal(layer(x), y)
        assert not torch.equal(layer(x), y)
