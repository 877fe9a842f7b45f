"""DeiT III ViT-L/16 on ImageNet-1k, pre-training at 192 px: deit3_s16.py at another size; then
deit3_l16_finetune.py.

    DATA=/path/to/imagenet torchrun --nproc_per_node 8 train_dali.py --config deit3_l16

Source: https://arxiv.org/abs/2204.07118: 84.9 % top-1 at 224 px after fine-tuning. Not run by this
project.
"""

from configs.deit3_s16 import *

LEARNING_RATE = 3e-3
MICRO_BATCH_SIZE = 64  # the source has 32 GPUs, without accumulation
MODEL = dict(MODEL, image_size=192, width=1024, depth=24, heads=16, drop_path=0.45)
