"""ViT-Lite-7/4 on CIFAR-10 as in vit_lite_vanilla.py, the model split over 2 x 2 GPUs: 2D tensor
parallel.

    DATA=/path/to/cifar10 torchrun --nproc_per_node 8 train.py --config vit_lite_2d

Source: Colossal-AI's benchmark, which has no results for this mode; Optimus (arXiv 2104.05343).
Expected: the same curves as vit_lite_vanilla. Not run by this project at full length.
"""

from configs.vit_lite_vanilla import *

TENSOR_PARALLEL_SIZE = 4
TENSOR_PARALLEL_MODE = "2d"
