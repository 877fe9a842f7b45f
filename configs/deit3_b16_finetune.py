"""DeiT III ViT-B/16 on ImageNet-1k, fine-tuning at 224 px after deit3_b16.py: 20 epochs at batch
512, AdamW.

    DATA=/path/to/imagenet torchrun --nproc_per_node 8 train_dali.py --config deit3_b16_finetune \
        --init outputs/deit3_b16

Source: https://arxiv.org/abs/2204.07118: 83.8 % top-1 at 224 px. Not run by this project.

Difference from the source: RandAugment's operations are torchvision's, at one magnitude, after the
crop.
"""

from configs.deit3_b16 import *

TOTAL_BATCH_SIZE = 512
MICRO_BATCH_SIZE = 64
NUM_EPOCHS = 20
LEARNING_RATE = 1e-5  # to which MIN_LR is equal: constant after warm-up
WEIGHT_DECAY = 0.1
OPTIMIZER = dict(name="adamw", decay_all=False)

MODEL = dict(MODEL, image_size=224)
BCE_THRESHOLD = None
LABEL_SMOOTHING = 0.1
THREE_AUGMENT = False
COLOR_JITTER = 0.0  # timm has none beside RandAugment
DATA = dict(randaugment=(2, 9), interpolation="bicubic", eval_crop=1.0)
