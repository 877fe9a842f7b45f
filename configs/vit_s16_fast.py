"""ViT-S/16 on ImageNet-1k, 90 epochs: vit_s16_plain with images that grow from 128 to 224 pixels.

    DATA=/path/to/imagenet torchrun --nproc_per_node 8 train.py --config vit_s16_fast

Planned, not run by this project: 1,910 PFLOP instead of 3,160, 40 % fewer. On eight GPUs that train
2,500 images/s each at 224 pixels (--images-per-s 2500), an hour instead of 1.6. On eight H100s the
plan has 33 minutes for both recipes, in which the host decodes: no time is saved there.
"""

from configs.vit_s16_plain import *

IMAGE_SIZES = [(25, 128), (25, 160), (20, 192)]  # then 20 epochs at 224
