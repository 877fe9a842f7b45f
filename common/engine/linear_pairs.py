"""The linear layers of a Vision Transformer's block, under timm's names: two pairs.

Tensor parallelism shards the first and the second layer of a pair in different dimensions; Muon
updates their matrices. The weight of a first layer may stack several matrices along its outputs:
those of queries, keys and values, or of an MLP's gate and values.
"""

import re
from collections.abc import Mapping, Sequence

# The first layer of each pair: the second.
LINEAR_PAIRS = {"attn.qkv": "attn.proj", "mlp.fc1": "mlp.fc2"}
FIRST_LAYERS = tuple(LINEAR_PAIRS)
SECOND_LAYERS = tuple(LINEAR_PAIRS.values())
BRANCHES = {layer.partition(".")[0] for layer in FIRST_LAYERS}
# Of timm's models with stages too, such as stages.0.blocks.1.attn.qkv.weight.
WEIGHT = re.compile(rf"(?:^|\.)blocks\.\d+\.({'|'.join(FIRST_LAYERS + SECOND_LAYERS)})\.weight$")


def count_matrices(name: str, shapes: Mapping[str, Sequence[int]]) -> int:
    """Return how many matrices the parameter ``name`` stacks along dimension 0.

    It is 0 for all but the weights of a block's linear layers. ``shapes`` are those of the model's
    full parameters, by name.
    """
    weight = WEIGHT.search(name)
    if weight is None or len(shapes[name]) != 2:
        return 0
    second = LINEAR_PAIRS.get(weight[1])
    if second is None:
        return 1
    # The second layer reads as many channels as one matrix returns: qkv is [3 D, D], proj [D, D].
    # Some blocks of timm's GC ViT have no queries. TinyViT stacks q, k and v head by head: each of
    # the three parts has a third of the heads.
    return shapes[name][0] // shapes[name.replace(weight[1], second)][1]
