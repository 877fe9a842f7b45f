"""Handwritten digits in minutes on two CPU cores, with all components of the 32K recipe.

    bash scripts/quickstart.sh

Data: scikit-learn's 1,797 digits of 8 x 8 pixels, enlarged to 32 x 32, a fifth held out. Expected:
about 98.1 % top-1, 97.5 to 98.6 % with 10 seeds (docs/log.md). Precision: bfloat16 on a CPU with
instructions for it (AVX512_BF16, AMX), float32 on others. One to four minutes.
"""

from colossalai.amp import AMP_TYPE

TOTAL_BATCH_SIZE = 128
gradient_accumulation = 2

NUM_EPOCHS = 80
WARMUP_EPOCHS = 10
LR_SCHEDULE = "linear"
LEARNING_RATE = 2e-2
WEIGHT_DECAY = 0.1
OPTIMIZER = dict(name="lamb")
clip_grad_norm = 1.0

MODEL = dict(
    image_size=32, patch_size=8, width=128, depth=4, heads=4, mlp_ratio=2.0, num_classes=10
)
MIXUP = 0.2
# Mild crops, and no mirroring: a mirrored digit is no digit.
DATA = dict(
    root="data/digits", crop_scale=(0.5, 1.0), crop_ratio=(0.85, 1.18), flip=False, eval_crop=1.0
)
EVAL_EVERY = 10

fp16 = dict(mode=AMP_TYPE.TORCH)
