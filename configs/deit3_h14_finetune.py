"""DeiT III ViT-H/14 on ImageNet-1k, fine-tuning at 224 px after deit3_h14.py: as
deit3_b16_finetune.py.

    DATA=/path/to/imagenet torchrun --nproc_per_node 8 train_dali.py --config deit3_h14_finetune \
        --init outputs/deit3_h14

Source: https://arxiv.org/abs/2204.07118: 85.2 % top-1 at 224 px. Not run by this project.
"""

from configs.deit3_b16_finetune import *
from configs.deit3_h14 import MODEL

MICRO_BATCH_SIZE = 32  # the source's, on 16 GPUs
MODEL = dict(MODEL, image_size=224, drop_path=0.55)
