"""ViT-B/16 on Caltech-101 with AMP_TYPE.NAIVE: half precision with float32 masters; otherwise
config_fp32.py.

    DATA=/path/to/caltech101 torchrun --nproc_per_node 1 train.py \
        --config config/config_AMP_naive.py

Source: Colossal-AI's AMP example: 14.8 GB and 119.0 images/s on an unnamed GPU.
"""

from colossalai.amp import AMP_TYPE

from configs.config_fp32 import *

fp16 = dict(mode=AMP_TYPE.NAIVE)
