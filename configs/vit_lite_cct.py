"""ViT-Lite-7/4 on CIFAR-10, 300 epochs at batch 128: AutoAugment, Mixup, CutMix, stochastic depth.

    python train.py --config vit_lite_cct --set DATA.root=/path/to/cifar10 --set DATA.download=True

Source: "Escaping the Big Data Paradigm with Compact Transformers"
(https://arxiv.org/abs/2104.05704) and its repository SHI-Labs/Compact-Transformers, with
cct_7-3x1_cifar10_300epochs.yml for a larger model; it reports 91.38 % top-1 for this one, after 200
epochs with less augmentation. Not run by this project.

Differences from the source: AutoAugment's policy for CIFAR-10 instead of timm's RandAugment with
random magnitudes, a padded crop instead of 80 to 100 % of the area, no dropout in attention, Mixup
and CutMix until the end instead of for 175 epochs.
"""

from configs.vit_lite_vanilla import *

TOTAL_BATCH_SIZE = 128
GPUS = 1

NUM_EPOCHS = 300
WARMUP_EPOCHS = 10
LEARNING_RATE = 5.5e-4
WEIGHT_DECAY = 6e-2
OPTIMIZER = dict(name="adamw", decay_all=False)  # matrices only

MODEL = MODEL | dict(dropout=0.0, drop_path=0.1)
DATA = DATA | dict(flip=True, std=(0.2470, 0.2435, 0.2616))  # of all pixels
MIXUP = 0.8
CUTMIX = 1.0
