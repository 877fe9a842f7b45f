"""The Vision Transformer, its moving average and its FLOPs."""
