"""ViT-L/32 on ImageNet-1k, 300 epochs at batch 32K: vit-b16.py with another model.

    DATA=/path/to/imagenet torchrun --nproc_per_node 8 train_dali.py --config vit-l32

Source: Colossal-AI's large-batch ViT example, which lists this model without a result. Not run by
this project.
"""

from configs.vit_b16 import *

MODEL = dict(MODEL, patch_size=32, width=1024, depth=24, heads=16)
