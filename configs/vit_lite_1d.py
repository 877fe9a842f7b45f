"""ViT-Lite-7/4 on CIFAR-10 as in vit_lite_vanilla.py, the model split over 2 GPUs: 1D tensor
parallel.

    DATA=/path/to/cifar10 torchrun --nproc_per_node 8 train.py --config vit_lite_1d

Source: Colossal-AI's benchmark, which has no results for this mode; Megatron-LM (arXiv 1909.08053).
Expected: the same curves as vit_lite_vanilla. Not run by this project at full length.
"""

from configs.vit_lite_vanilla import *

TENSOR_PARALLEL_SIZE = 2
TENSOR_PARALLEL_MODE = "1d"
