"""DeiT III ViT-H/14 on ImageNet-1k, pre-training at 154 px: deit3_s16.py at another size; then
deit3_h14_finetune.py.

    DATA=/path/to/imagenet torchrun --nproc_per_node 8 train_dali.py --config deit3_h14

Source: https://arxiv.org/abs/2204.07118: 85.2 % top-1 at 224 px after fine-tuning. The source uses
160 px, of which its patches cover 154. Not run by this project.
"""

from configs.deit3_s16 import *

LEARNING_RATE = 3e-3
MICRO_BATCH_SIZE = 64  # the source has 32 GPUs, without accumulation
MODEL = dict(MODEL, image_size=154, patch_size=14, width=1280, depth=32, heads=16, drop_path=0.6)
