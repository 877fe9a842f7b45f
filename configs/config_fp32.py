"""ViT-B/16 on Caltech-101 in full precision: SGD, 128 images per GPU. The baseline for mixed
precision.

    DATA=/path/to/caltech101 torchrun --nproc_per_node 1 train.py --config config/config_fp32.py
    python -m torch.distributed.launch --nproc_per_node 4 --master_addr localhost \
        --master_port 29500 train.py --config config/config_fp32.py

Source: Colossal-AI's AMP example: 25.0 GB and 107.5 images/s on an unnamed GPU, no accuracy. A few
epochs from random weights on 6,941 images show speed and memory, not the model's best accuracy.

Differences from the source: 10 epochs instead of 2; an evaluation; crops of whole images instead of
images resized to 256; Caltech-101 with 101 classes, while the source's code loads CIFAR-10 into a
head of 1,000.
"""

MICRO_BATCH_SIZE = 128  # per GPU

NUM_EPOCHS = 10
WARMUP_EPOCHS = 1
LR_SCHEDULE = "linear"
LEARNING_RATE = 1e-2
WEIGHT_DECAY = 0.1
OPTIMIZER = dict(name="sgd", momentum=0.0)  # as in the source
clip_grad_norm = 1.0

MODEL = dict(
    image_size=224, patch_size=16, width=768, depth=12, heads=12, num_classes=101, dropout=0.1
)
TF32 = False  # the baseline is float32 itself
COMPILE = False  # the source compares eager modes
DATA = dict(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
