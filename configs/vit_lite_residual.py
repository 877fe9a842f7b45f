"""A ViT of 2.2 M parameters with residual convolutions in its stem on CIFAR-10, 56 epochs at batch
128, of which 38 on smaller images: Muon on matrices and filters, for one or two CPU cores.

    python train.py --config vit_lite_residual --set DATA.root=DIR --set DATA.download=True
    DATA=DIR torchrun --nproc_per_node 2 train.py --config vit_lite_residual

`vit_lite_fast` with four blocks instead of six, a residual stem and Muon on the filters. Not run to
its end: six epochs reach 82.3 and 82.7 % where `vit_lite_fast` has 78.6 and 78.4 % (docs/log.md).
"""

from configs.vit_lite_fast import *

OPTIMIZER = OPTIMIZER | dict(filters=True)
MODEL = MODEL | dict(depth=4, stem="residual")
