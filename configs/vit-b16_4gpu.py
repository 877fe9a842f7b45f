"""ViT-B/16 on ImageNet-1k at batch 32K on one server of 4 GPUs: vit-b16.py, with 32 micro-batches
per step.

    python -m torch.distributed.launch --nproc_per_node 4 train_dali.py --world_size 4 \
        --config vit-b16_4gpu.py

Source: "How to quickly reproduce ViT pre-training with only one small server" (Colossal-AI). Not
run by this project at full length.
"""

from configs.vit_b16 import *

GPUS = 4
