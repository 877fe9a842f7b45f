"""ViT-S/16 on ImageNet-1k, 90 epochs: vit_s16_plain with images that grow from 128 to 224 pixels.

    DATA=/path/to/imagenet torchrun --nproc_per_node 8 train.py --config vit_s16_fast

Planned, not run by this project: 1,910 PFLOP instead of 3,160, 40 % fewer. On eight GPUs that train
2,500 images/s each at 224 pixels (--images-per-s 2500), an hour instead of 1.6, if 7,300 images/s
are decoded for each. At the 2,600 that the plan assumes both recipes take 1.5 hours on eight H100s:
they wait for decoding.
"""

from configs.vit_s16_plain import *

IMAGE_SIZES = [(25, 128), (25, 160), (20, 192)]  # then 20 epochs at 224
