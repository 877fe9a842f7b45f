"""ViT-B/16 on Caltech-101 in full precision: SGD, 128 images a GPU. The base of the comparison of mixed precision.

    DATA=/path/to/caltech101 torchrun --nproc_per_node 1 train.py --config config/config_fp32.py
    python -m torch.distributed.launch --nproc_per_node 4 --master_addr localhost --master_port 29500 train.py \
        --config config/config_fp32.py

Source: Colossal-AI's AMP example: 25.0 GB and 107.5 images/s on a GPU that it does not name, and no accuracy. From
random weights, on 6,941 images, a few epochs show speed and memory, not what the model could reach.

Other than the source: 10 epochs instead of 2; crops are cut from whole images, not from ones resized to 256; and its
dataset is Caltech-101 with 101 classes, where the source's code loads CIFAR-10 into a head of 1,000.
"""

MICRO_BATCH_SIZE = 128  # on each GPU, however many
GPUS = 1

NUM_EPOCHS = 10
WARMUP_EPOCHS = 1
LR_SCHEDULE = "linear"
LEARNING_RATE = 1e-2
WEIGHT_DECAY = 0.1
OPTIMIZER = dict(name="sgd", momentum=0.0)
clip_grad_norm = 1.0

MODEL = dict(image_size=224, patch_size=16, width=768, depth=12, heads=12, mlp_ratio=4.0, num_classes=101, dropout=0.1)
DATA = dict(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
