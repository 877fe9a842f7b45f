"""ViT-S/16 on ImageNet-1k as in vit_s16_vanilla.py, the model split over 2 x 2 GPUs: 2D tensor
parallel.

    DATA=/path/to/imagenet torchrun --nproc_per_node 8 train.py --config vit_s16_2d

Source: Colossal-AI's benchmark, which has no results for this mode; Optimus (arXiv 2104.05343).
Expected: the same curves as vit_s16_vanilla. Not run by this project at full length.
"""

from configs.vit_s16_vanilla import *

TENSOR_PARALLEL_SIZE = 4
TENSOR_PARALLEL_MODE = "2d"
