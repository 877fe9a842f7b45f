"""ViT-B/16 on Caltech-101 in full precision: SGD, 128 images a GPU. The base of the comparison of mixed precision.

    DATA=/path/to/caltech101 torchrun --nproc_per_node 1 train.py --config config/config_fp32.py
    python -m torch.distributed.launch --nproc_per_node 4 --master_addr localhost --master_port 29500 train.py \
        --config config/config_fp32.py --set TOTAL_BATCH_SIZE=512

Source: Colossal-AI's AMP example: 25.0 GB and 107.5 images/s on a GPU that it does not name, and no accuracy. From
random weights, on 6,941 images, a few epochs show speed and memory, not what the model could reach.
"""

TOTAL_BATCH_SIZE = 128
GPUS = 1

NUM_EPOCHS = 10
WARMUP_EPOCHS = 2
LR_SCHEDULE = "linear"
LEARNING_RATE = 1e-2
WEIGHT_DECAY = 0.1
OPTIMIZER = dict(name="sgd")
clip_grad_norm = 1.0

MODEL = dict(image_size=224, patch_size=16, width=768, depth=12, heads=12, mlp_ratio=4.0, num_classes=101, dropout=0.1)
