"""DeiT III ViT-L/16 on ImageNet-1k, fine-tuning at 224 px after deit3_l16.py: as
deit3_b16_finetune.py.

    DATA=/path/to/imagenet torchrun --nproc_per_node 8 train_dali.py --config deit3_l16_finetune \
        --init outputs/deit3_l16

Source: https://arxiv.org/abs/2204.07118: 84.9 % top-1 at 224 px. Not run by this project.
"""

from configs.deit3_b16_finetune import *
from configs.deit3_l16 import MODEL

MICRO_BATCH_SIZE = 32
MODEL = dict(MODEL, image_size=224, drop_path=0.45)
