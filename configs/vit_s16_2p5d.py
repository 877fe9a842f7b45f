"""ViT-S/16 on ImageNet-1k as in vit_s16_vanilla.py, the model split over 2 x 2 x 1 GPUs: 2.5D
tensor parallel.

    DATA=/path/to/imagenet torchrun --nproc_per_node 8 train.py --config vit_s16_2p5d

Source: Colossal-AI's benchmark, which has no results for this mode; Tesseract (arXiv 2105.14500).
Expected: the same curves as vit_s16_vanilla. Not run by this project at full length.
"""

from configs.vit_s16_vanilla import *

TENSOR_PARALLEL_SIZE = 4  # one square of 2 x 2: depth 1, as in the source
TENSOR_PARALLEL_MODE = "2.5d"
