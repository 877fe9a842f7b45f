"""A ViT of 2.0 M parameters with a convolutional stem on CIFAR-10, 56 epochs at batch 128, of which
38 on smaller images: Muon, for one or two CPU cores.

    python train.py --config vit_lite_fast --set DATA.root=/path/to/cifar10 --set DATA.download=True
    DATA=/path/to/cifar10 torchrun --nproc_per_node 2 train.py --config vit_lite_fast

Stem: Xiao et al., arXiv 2106.14881; sequence pooling: Compact Transformers, arXiv 2104.05704.
Result: top-1 90.9, 90.9 and 91.2 % (images as JPEG), the last in 77 minutes on two quiet cores. 34
epochs at full size, as long on one core, reach 90.0, 89.7 and 89.4 %; 120 epochs of growing images,
in 165 minutes on two, 91.8 % (docs/recipes.md).
"""

from colossalai.amp import AMP_TYPE

from configs.vit_lite_vanilla import *

TOTAL_BATCH_SIZE = 128
GPUS = 1

NUM_EPOCHS = 56
WARMUP_EPOCHS = 4
IMAGE_SIZES = [(22, 16), (16, 24)]  # then 18 epochs at 32
EVAL_EVERY = 4
LEARNING_RATE = 3e-3
WEIGHT_DECAY = 0.3
OPTIMIZER = dict(name="muon", decay_all=False, bfloat16=True)
clip_grad_norm = 1.0

MODEL = MODEL | dict(
    width=192, depth=6, heads=3, dropout=0.0, drop_path=0.05, stem="conv", pool="seq"
)
DATA = DATA | dict(flip=True, std=(0.2470, 0.2435, 0.2616))  # of all pixels

fp16 = dict(mode=AMP_TYPE.TORCH)
