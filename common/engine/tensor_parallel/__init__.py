"""Tensor parallelism: one Vision Transformer on several ranks, in the modes 1d, 2d, 2.5d and 3d."""
