"""A ViT of 2.2 M parameters with residual convolutions in its stem on CIFAR-10, 20 epochs at batch
128, of which 15 on smaller images: Muon on matrices and filters, for one or two CPU cores.

    python train.py --config vit_lite_residual --set DATA.root=/path/to/cifar10 --set DATA.download=True
    DATA=/path/to/cifar10 torchrun --nproc_per_node 2 train.py --config vit_lite_residual

`vit_lite_fast` with four blocks instead of six, a residual stem and Muon on the filters.
"""

from configs.vit_lite_fast import *

NUM_EPOCHS = 20
WARMUP_EPOCHS = 2
IMAGE_SIZES = [(8, 16), (7, 24)]  # then 5 epochs at 32
EVAL_EVERY = 5
LR_SCHEDULE = "wsd_sqrt"
OPTIMIZER = OPTIMIZER | dict(filters=True)

MODEL = MODEL | dict(depth=4, stem="residual")
