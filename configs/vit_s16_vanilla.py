"""ViT-S/16 on ImageNet-1k, 300 epochs at batch 4,096: AdamW, label smoothing, mixed precision, data
parallel on 8 GPUs.

    DATA=/path/to/imagenet torchrun --nproc_per_node 8 train.py --config vit_s16_vanilla
    DATA=/path/to/imagenet python train.py --world_size=8 --rank=$RANK --local_rank=$LOCAL_RANK \
        --host=$HOST --port=29500 --config=vit_s16_vanilla

Source: Colossal-AI's benchmark: about 74.5 % top-1, in about 16.5 hours on 8 A100. Not run by this
project at full length.

Differences from the source: evaluation keeps the aspect ratio (short side 256, centre 224), while
the source resizes to 256 x 256; the schedule advances at every step instead of every epoch; weights
are initialised as in timm.
"""

from colossalai.amp import AMP_TYPE

TOTAL_BATCH_SIZE = 4096
LEARNING_RATE = 3e-3
WEIGHT_DECAY = 0.3
LABEL_SMOOTHING = 0.1

NUM_EPOCHS = 300
WARMUP_EPOCHS = 32

# Dropout is not in the source's config: it is the default of its model.
MODEL = dict(
    image_size=224, patch_size=16, width=384, depth=12, heads=6, num_classes=1000, dropout=0.1
)
DATA = dict(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))  # 127.5 for both in the source
SEED = 42  # the source's
GPUS = 8

fp16 = dict(mode=AMP_TYPE.TORCH)

gradient_accumulation = 2  # BATCH_SIZE is derived: TOTAL_BATCH_SIZE // gradient_accumulation
clip_grad_norm = 1.0
