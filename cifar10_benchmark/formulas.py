"""Bytes sent by the matrix products of a Vision Transformer's blocks in each parallel mode, by the papers' formulas.

For a product [M, K] x [K, N] over p ranks, |A| = M K, |B| = K N, |C| = M N numbers; forward and backward pass together;
what a rank sends, on average over the ranks:

    1d      Megatron-LM (arXiv 1909.08053): a block's two pairs of products all-reduce their outcome forwards and their
            input's gradient backwards: 2 (p - 1) / p numbers sent for each number reduced
    2d      Optimus (arXiv 2104.05343), SUMMA on q x q ranks: C = A B broadcasts A and B, dA = dC B' broadcasts B and
            reduces dA, dB = A' dC broadcasts A and reduces dB: 3 (q - 1) / q^2 (|A| + |B|)
    2.5d    Tesseract (arXiv 2105.14500), d such squares, each with 1/d of the samples: |A| / d in place of |A|,
            and dB is all-reduced over the d squares
    3d      (arXiv 2105.14450), l x l x l ranks: A, B gathered and C scattered forwards; dC gathered, dA, dB scattered
            backwards: 2 (l - 1) / l^3 (|A| + |B| + |C|)
"""

from collections.abc import Mapping
from typing import Any

BYTES = 4  # of a number in float32


def expected_bytes(tensor: Mapping[str, Any], batch: int, model: Mapping[str, Any]) -> float:
    """Return the bytes that a rank sends per step of ``batch`` samples in ``tensor``'s mode."""
    width, hidden = model["width"], int(model["width"] * model["mlp_ratio"])
    tokens = (model["image_size"] // model["patch_size"]) ** 2 + (model["pool"] == "cls")
    rows = batch * tokens
    products = [(width, 3 * width), (width, width), (width, hidden), (hidden, width)]
    mode, ranks, depth = tensor["mode"], tensor["size"], tensor.get("depth", 1)
    if mode is None:
        return 0.0
    if mode == "1d":
        return BYTES * model["depth"] * 4 * 2 * (ranks - 1) / ranks * rows * width
    numbers = 0.0
    for inner, outer in products:
        a, b, c = rows * inner, inner * outer, rows * outer
        if mode == "3d":
            side = round(ranks ** (1 / 3))
            numbers += 2 * (side - 1) / side**3 * (a + b + c)
        else:
            side = round((ranks / depth) ** 0.5)
            numbers += 3 * (side - 1) / side**2 * (a / depth + b)
            numbers += 2 * (depth - 1) / depth * b / side**2
    return BYTES * model["depth"] * numbers
