"""Pre-train a Vision Transformer on ImageNet-1k, with data and tensor parallelism.

torchrun --nproc_per_node 8 train.py --config vit_s16_vanilla --set DATA.root=/path/to/imagenet

The benchmark's name for train_dali.py, whose default recipe is vit_s16_vanilla; DATA.loader is DALI
or torchvision.
"""

from dataclasses import replace
from functools import partial

from common.errors import run_command
from imagenet_dali.task import TASK
from imagenet_dali.train_dali import main

if __name__ == "__main__":
    run_command(partial(main, task=replace(TASK, recipe="vit_s16_vanilla"), text=__doc__))
