"""DeiT III ViT-S/16 on ImageNet-1k, 800 epochs at batch 2,048: LAMB, BCE, 3-Augment, LayerScale, on
8 GPUs.

    DATA=/path/to/imagenet torchrun --nproc_per_node 8 train_dali.py --config deit3_s16

Source: "DeiT III: Revenge of the ViT" (https://arxiv.org/abs/2204.07118): 81.4 % top-1 at 224 px.
Not run by this project.

Differences from the source: stochastic depth rises from 0 to its rate over the blocks, as in timm,
while the source uses the same rate in all; the learning rate changes every step instead of every
epoch; the class token begins at a standard deviation of 1e-6 instead of 0.02.
"""

from colossalai.amp import AMP_TYPE

TOTAL_BATCH_SIZE = 2048
MICRO_BATCH_SIZE = 256
GPUS = 8

NUM_EPOCHS = 800
WARMUP_EPOCHS = 5
LEARNING_RATE = 4e-3
LR_SCHEDULE = "timm"
WARMUP_LR = 1e-6
MIN_LR = 1e-5
WEIGHT_DECAY = 0.05
# The source trains by apex's FusedLAMB, with the epsilon of DeiT's script.
OPTIMIZER = dict(name="lamb", variant="apex", eps=1e-8, decay_all=False)

MODEL = dict(
    image_size=224,
    patch_size=16,
    width=384,
    depth=12,
    heads=6,
    num_classes=1000,
    drop_path=0.05,
    init_values=1e-4,
    no_embed_class=True,  # as in timm's deit3 models
)
MIXUP = 0.8
CUTMIX = 1.0
BCE_THRESHOLD = 0.0  # all classes of a blended label are on
THREE_AUGMENT = True
COLOR_JITTER = 0.3
DATA = dict(repeats=3, interpolation="bicubic", eval_crop=1.0)

fp16 = dict(mode=AMP_TYPE.TORCH)
