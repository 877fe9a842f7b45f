"""A task as small as one can be, of images of seven colours, for tests of what follows a run."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from common.data.image_folder import list_classes, list_folders
from common.data.image_split import FolderSplit
from common.model.build import timm_arguments
from common.run.train import train as train_on
from common.task import TASKS, image_task
from common.testing.commands import in_words

NAMES = (
    "blue",
    "cyan",
    "green",
    "magenta$^$",
    "red",
    "white",
    "yellow",
)  # one is a bad formula to Matplotlib
CHANNELS = ((2,), (1, 2), (1,), (0, 2), (0,), (0, 1, 2), (0, 1))
SAMPLES = {"train": 70, "test": 45}
MODEL = dict(image_size=16, patch_size=8, width=32, depth=2, heads=2, mlp_ratio=2.0)
CONFIG = f"""
from colossalai.amp import AMP_TYPE
TOTAL_BATCH_SIZE = 14
NUM_EPOCHS = 2
EVAL_EVERY = 2
LEARNING_RATE = 2e-3
MODEL = dict({", ".join(f"{key}={value}" for key, value in MODEL.items())})
DATA = dict(workers=0, eval_crop=0.8)
LOG = dict(tensorboard=False)
"""


def write_images(folder: Path) -> Path:
    """Write noisy images of 24 x 20 pixels as ``folder/<split>/<colour>/<number>.png``."""
    noise = np.random.default_rng(0)
    for split, samples in SAMPLES.items():
        for number in range(samples):
            label = number % len(NAMES)
            pixels = noise.integers(0, 150, (20, 24, 3), np.uint8)
            pixels[..., CHANNELS[label]] += 60
            path = folder / split / NAMES[label] / f"{number:02d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
    return folder


def train(root: Path, output: Path, *settings: str, flags: Sequence[str] = ()) -> Path:
    """Train for ten steps on what `write_images` wrote to ``root``; return ``output``."""
    config = output.parent / "tiny.py"
    partial = config.with_suffix(f".{os.getpid()}")  # every rank writes it
    partial.write_text(CONFIG)
    partial.replace(config)
    words = [
        "--config",
        str(config),
        "--output",
        str(output),
        *in_words(f"DATA.root={root}", *settings),
        *flags,
    ]
    train_on(words, TASK, __doc__)
    return output


def timm_logits(run: Path, images: Iterable[Image.Image], size: int = 16) -> Tensor:
    """Return what timm's model and preprocessing compute with the weights after ten steps."""
    from timm.data import create_transform
    from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn

    transform = create_transform((3, size, size), crop_pct=0.8)
    arguments = MODEL | {"image_size": size, "num_classes": len(NAMES)}
    model = VisionTransformer(**timm_arguments(**arguments)).eval()
    weights = load_file(run / "checkpoints" / "step-00000010" / "model.safetensors")
    model.load_state_dict(checkpoint_filter_fn(weights, model))
    with torch.no_grad():
        return model(torch.stack([transform(image) for image in images]))


def _open(data: Mapping[str, Any], split: str) -> FolderSplit:
    root = Path(data["root"], split)
    names = list_folders(root)
    return FolderSplit(root, names, list_classes(root, root, names))


TASK = image_task(
    "tiny",
    _open,
    script="common/testing/tiny_task.py",
    recipe="vit-b16",
    recipes=("tiny",),
    train_samples=SAMPLES["train"],
)
TASKS["tiny"] = __name__
