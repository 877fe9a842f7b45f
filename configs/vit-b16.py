"""ViT-B/16 on ImageNet-1k, 300 epochs at batch 32K: LAMB, Mixup, mixed precision, on 8 GPUs.

    DATA=/path/to/imagenet torchrun --nproc_per_node 8 train_dali.py --config vit-b16.py
    srun python train_dali.py --local_rank=$SLURM_PROCID --world_size=$SLURM_NPROCS --host=$HOST \
        --port=29500 --config=vit-b16.py

Source: Colossal-AI's large-batch ViT example. It published curves only: accuracy drops where the
learning rate peaks, and ends near 72.7 % top-1. Not run by this project at full length.

Differences from the source: its last version applies RandAugment, which the published run did not;
images are normalised with ImageNet's mean and standard deviation instead of 127.5 for both; mixed
precision is bfloat16 on GPUs that have it; the source uses float16
(``--set fp16.dtype=float16``).
"""

from colossalai.amp import AMP_TYPE

TOTAL_BATCH_SIZE = 32 * 1024
MICRO_BATCH_SIZE = 256  # x 16 accumulated x 8 GPUs; the accumulation adapts to other GPU counts
GPUS = 8

NUM_EPOCHS = 300
WARMUP_EPOCHS = NUM_EPOCHS / 2  # as in the source, whose accuracy drops at the end of it
LR_SCHEDULE = "linear"
LEARNING_RATE = 1.8e-2
WEIGHT_DECAY = 0.1
OPTIMIZER = dict(name="lamb")
clip_grad_norm = 1.0

MODEL = dict(
    image_size=224, patch_size=16, width=768, depth=12, heads=12, num_classes=1000, dropout=0.1
)
MIXUP = 0.2

fp16 = dict(mode=AMP_TYPE.TORCH)
