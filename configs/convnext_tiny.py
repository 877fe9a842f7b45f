"""ConvNeXt-T on ImageNet-1k, 300 epochs at batch 4,096: AdamW, RandAugment, Mixup, CutMix, EMA.

    DATA=/path/to/imagenet torchrun --nproc_per_node 8 train.py --config convnext_tiny

Source: "A ConvNet for the 2020s" (https://arxiv.org/abs/2201.03545), table 5, and
facebookresearch/ConvNeXt: 82.1 % top-1. Not run by this project.

Differences from the source: bfloat16 by autocast instead of float32, no repeated evaluation of the
weights themselves beside those of their moving average.
"""

from colossalai.amp import AMP_TYPE

TOTAL_BATCH_SIZE = 4096
MICRO_BATCH_SIZE = 128
GPUS = 8

NUM_EPOCHS = 300
WARMUP_EPOCHS = 20
LEARNING_RATE = 4e-3
WEIGHT_DECAY = 0.05
OPTIMIZER = dict(name="adamw", decay_all=False)
EMA = 0.9999
EMA_WARMUP = False  # timm's ModelEma, which the source uses, has none

MODEL = dict(timm="convnext_tiny.fb_in1k", drop_path_rate=0.1)
# torchvision: timm's RandAugment runs on the CPU.
DATA = dict(loader="torchvision", randaugment="rand-m9-mstd0.5-inc1", eval_crop=0.875)
LABEL_SMOOTHING = 0.1
MIXUP = 0.8
CUTMIX = 1.0
ERASING = 0.25
ERASING_MODE = "pixel"

fp16 = dict(mode=AMP_TYPE.TORCH)
