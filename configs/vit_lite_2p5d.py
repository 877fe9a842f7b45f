"""ViT-Lite-7/4 on CIFAR-10 as in vit_lite_vanilla.py, the model split over 2 x 2 x 1 GPUs: 2.5D
tensor parallel.

    DATA=/path/to/cifar10 torchrun --nproc_per_node 8 train.py --config vit_lite_2p5d

Source: Colossal-AI's benchmark, which has no results for this mode; Tesseract (arXiv 2105.14500).
Expected: the same curves as vit_lite_vanilla. Not run by this project at full length.
"""

from configs.vit_lite_vanilla import *

TENSOR_PARALLEL_SIZE = 4  # one square of 2 x 2: depth 1, as in the source
TENSOR_PARALLEL_MODE = "2.5d"
