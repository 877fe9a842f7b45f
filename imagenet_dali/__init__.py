"""ViT-B/16 on ImageNet-1k at batch 32K: DALI and TFRecord preparation."""
