"""ViT-B/16 on Caltech-101 with AMP_TYPE.APEX: apex's level O1, implemented with PyTorch; otherwise
config_fp32.py.

    DATA=/path/to/caltech101 torchrun --nproc_per_node 1 train.py --config config/config_AMP_apex.py

Source: Colossal-AI's AMP example: 17.9 GB and 115.2 images/s on an unnamed GPU.
"""

from colossalai.amp import AMP_TYPE

from configs.config_fp32 import *

fp16 = dict(mode=AMP_TYPE.APEX, opt_level="O1")
