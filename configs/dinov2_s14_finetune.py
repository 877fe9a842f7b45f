"""DINOv2's ViT-S/14, fine-tuned at 224 px on the data set at hand: 20 epochs at batch 256, AdamW
with layer decay.

    DATA=/path/to/images torchrun --nproc_per_node 8 train_dali.py --config dinov2_s14_finetune \
        --set MODEL.pretrained=True

Source: the weights of "DINOv2" (https://arxiv.org/abs/2304.07193), as timm has them; a linear
classifier on their features reaches 81.1 % top-1 on ImageNet-1k there. The source has no recipe for
fine-tuning this size: the schedule and the layer decay are BEiT's
(https://arxiv.org/abs/2106.08254), shortened. Not run by this project.
"""

from colossalai.amp import AMP_TYPE

TOTAL_BATCH_SIZE = 256
GPUS = 8

NUM_EPOCHS = 20
WARMUP_EPOCHS = 2
LEARNING_RATE = 5e-4
WEIGHT_DECAY = 0.05
OPTIMIZER = dict(name="adamw", decay_all=False, layer_decay=0.65)
clip_grad_norm = 1.0

MODEL = dict(timm="vit_small_patch14_dinov2.lvd142m", image_size=224, drop_path_rate=0.1)
DATA = dict(crop_scale=(0.3, 1.0))
LABEL_SMOOTHING = 0.1

fp16 = dict(mode=AMP_TYPE.TORCH)
