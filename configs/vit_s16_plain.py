"""ViT-S/16 on ImageNet-1k, 90 epochs at batch 1,024, after "Better plain ViT baselines for
ImageNet-1k" (2205.01580).

    DATA=/path/to/imagenet torchrun --nproc_per_node 8 train.py --config vit_s16_plain

Source: https://arxiv.org/abs/2205.01580 and big_vision's vit_s16_i1k.py: 76.5 % top-1 after 90
epochs, in 6 to 7 hours on a TPU v3-8; 80.0 % after 300 (--set NUM_EPOCHS=300). Not run by this
project.

Differences from the source: RandAugment's operations are torchvision's, without Invert, SolarizeAdd
and Cutout; all training images are used, while the source holds out 1 %; the head is one linear
layer, before which the source has one with tanh; GELU is exact, while the source's is the tanh
approximation; weights are initialised as in timm, while the source's are Xavier-uniform, and
0 in the head. AdamW's weight decay of 0.1 equals the source's 1e-4, as torch multiplies it by the
learning rate.
"""

from colossalai.amp import AMP_TYPE

TOTAL_BATCH_SIZE = 1024
GPUS = 8

NUM_EPOCHS = 90
WARMUP_EPOCHS = 10_000 / (1_281_167 // TOTAL_BATCH_SIZE)  # 10,000 steps
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.1
OPTIMIZER = dict(name="adamw", decay_all=False)  # matrices only
clip_grad_norm = 1.0

MODEL = dict(
    image_size=224,
    patch_size=16,
    width=384,
    depth=12,
    heads=6,
    num_classes=1000,
    pool="avg",
    position="sincos2d",
)
MIXUP = 0.2
# big_vision's inception_crop takes 5 to 100 % of the area; its values are from -1 to 1.
DATA = dict(crop_scale=(0.05, 1.0), randaugment=(2, 10), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))

fp16 = dict(mode=AMP_TYPE.TORCH)
