"""The Vision Transformer, EMA and FLOPs."""
