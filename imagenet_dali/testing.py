"""What tests share: tiny data sets, a tiny config, a command line, and corrupt images."""

import io
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from common.config.schema import Data
from common.data.loader import Loader
from common.shards.dataset import open_split
from common.shards.prepare import prepare
from common.shards.tfrecord_format import frame, unframe
from common.testing.commands import in_words
from common.testing.photographs import write_colours, write_photographs
from imagenet_dali import train_dali
from imagenet_dali.task import build_eval_loader, build_train_loader

HERE = Path(__file__).parent
LAUNCHERS = ("SLURM_", "OMPI_", "PMIX_")
MODEL = {
    "image_size": 16,
    "patch_size": 8,
    "width": 32,
    "depth": 2,
    "heads": 2,
    "mlp_ratio": 2.0,
    "num_classes": 3,
}
CONFIG = f"""
from colossalai.amp import AMP_TYPE
TOTAL_BATCH_SIZE = 16
gradient_accumulation = 2
NUM_EPOCHS = 4
WARMUP_EPOCHS = 1
EVAL_EVERY = 3
LEARNING_RATE = 1e-2
WEIGHT_DECAY = 0.1
LR_SCHEDULE = "linear"
OPTIMIZER = dict(name="lamb")
MODEL = dict({", ".join(f"{key}={value}" for key, value in MODEL.items())}, dropout=0.1)
MIXUP = 0.2
clip_grad_norm = 1.0
fp16 = dict(mode=AMP_TYPE.TORCH)
LOG = dict(every=2)
"""


# Width and height: with `VIEWS`, crops shrink and enlarge.
SHAPES = (400, 300), (167, 129), (97, 61), (40, 150)
EDGE = 5  # pixels: a simple crop moves the edge inwards by up to 4
# Interpolation, crop, RandAugment, size of the images that the network sees.
VIEWS = [
    ("bilinear", "random_resized", None, 96),
    ("bicubic", "random_resized", None, 96),
    ("bilinear", "random_resized", None, 224),
    ("bicubic", "random_resized", None, 224),
    ("bilinear", "simple", None, 96),
    ("bicubic", "random_resized", (2, 10), 96),
]


def write_config(folder: Path) -> Path:
    """Write `CONFIG`, a recipe of 12 steps with everything in it, as ``folder/tiny.py``."""
    path = folder / "tiny.py"
    path.write_text(CONFIG)
    return path


def train(folder: Path, output: str, *settings: str, flags: Sequence[str] = ()) -> None:
    """Train `CONFIG` with some settings in this process, into ``folder/output``."""
    config = write_config(folder)
    words = ["--config", str(config), "--output", str(folder / output)]
    train_dali.main([*words, *in_words(*settings), *flags])


def prepare_data(folder: Path) -> Path:
    """Prepare 65 images of three colours as shards, in ``folder/shards``."""
    images = folder / "images"
    shards = folder / "shards"
    write_colours(images, 65, height=20, width=24, kind="jpg")
    prepare(images, shards)
    return shards


def prepare_photographs(folder: Path) -> Path:
    """Prepare photographs of `SHAPES`, a grey and a CMYK one, as shards in ``folder/shards``."""
    images = folder / "images"
    shards = folder / "shards"
    for width, height in SHAPES:
        for split in ("train", "val"):
            of_shape = folder / f"{split}{width}"
            write_photographs(of_shape, "ab", count=3, width=width, height=height)
            for path in of_shape.glob("*/*"):
                moved = images / split / path.parent.name / f"{width}_{path.name}"
                moved.parent.mkdir(parents=True, exist_ok=True)
                path.rename(moved)
                if path.stem.endswith("0"):
                    for mode in ("L", "CMYK"):
                        converted = Image.open(moved).convert(mode)
                        converted.save(moved.with_name(f"{width}_{mode}.jpg"), quality=85)
    prepare(images, shards)
    return shards


def pixel_differences(
    root: Path, device: torch.device, image_size: int, **settings: Any
) -> tuple[Tensor, Tensor]:
    """Return how far DALI's images on ``device`` are from `ImageReader`'s, in grey levels.

    Of an epoch of training and of evaluation: the mean of each image, and the largest of each that
    is not at its edges, where DALI and PyTorch filter differently. The labels are compared too.
    ``settings`` are keys of DATA.
    """
    data = Data(workers=0, **settings).model_dump() | {"root": str(root)}
    std_C11 = torch.tensor(data["std"])[:, None, None]

    def read_by(loader: str, device: torch.device) -> tuple[Tensor, Tensor]:
        given = data | {"loader": loader}
        place: dict[str, Any] = dict(image_size=image_size, device=device)
        train = build_train_loader(given, 6, 6, order="random", seed=1, **place)
        batches = read(train)
        batches += read(build_eval_loader(given, 5, **place))
        images, labels = zip(*batches, strict=True)
        return torch.cat(images).cpu(), torch.cat(labels).cpu()

    images, labels = read_by("dali", device)
    expected, expected_labels = read_by("torchvision", torch.device("cpu"))
    assert torch.equal(labels, expected_labels)
    levels = 255 * std_C11 * (images - expected).abs()
    inner = levels[..., EDGE:-EDGE, EDGE:-EDGE]
    return levels.mean((1, 2, 3)), inner.amax((1, 2, 3))


def read(loader: Loader) -> list[tuple[Tensor, Tensor]]:
    """Return a pass over the loader, which is closed."""
    try:
        return list(loader)
    finally:
        loader.close()


def write_images(root: Path, per_class: int, names: Sequence[str] = ("class_0", "class_1")) -> Path:
    """Write small JPEGs of many shapes as ``root/<name>/<number>.jpg``; return ``root``."""
    for label, name in enumerate(names):
        (root / name).mkdir(parents=True)
        for number in range(per_class):
            path = root / name / f"{number:04d}.jpg"
            path.write_bytes(jpeg(24 + number % 16, 40 + label, number))
    return root


def run(
    command: str, cwd: Path = HERE, code: int = 0, timeout: float = 300, **environ: str
) -> subprocess.CompletedProcess:
    """Run a command line in the task's folder, as a user would; expect exit status ``code``.

    ``python`` in it is this interpreter; launchers' variables are not inherited.
    """
    python = shlex.quote(sys.executable)
    inherited = {}
    for name, value in os.environ.items():
        if not name.startswith(LAUNCHERS):
            inherited[name] = value
    answer = subprocess.run(
        ["bash", "-c", command.replace("python ", f"{python} ")],
        cwd=cwd,
        env=inherited | environ,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    printed = f"{answer.stdout}\n{answer.stderr}"
    assert answer.returncode == code, f"{command}: {answer.returncode}\n{printed}"
    launcher_prints_one = code and "torch.distributed" in command
    assert "Traceback" not in answer.stderr or launcher_prints_one, answer.stderr
    return answer


def gradient(height: int = 24, width: int = 40, seed: int = 0) -> Image.Image:
    """Return a smooth image, which JPEG hardly changes; a wrong rotation or channel shows."""
    pixels = np.empty((height, width, 3), np.uint8)
    pixels[..., 0] = np.arange(width) * 255 / width
    pixels[..., 1] = np.arange(height)[:, None] * 255 / height
    pixels[..., 2] = (40 + 83 * seed) % 256
    return Image.fromarray(pixels)


def encode(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    """Return the content of an image's file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def jpeg(*shape_and_seed: int, **options: Any) -> bytes:
    """Return the content of a good JPEG, of a `gradient`."""
    return encode(gradient(*shape_and_seed), **options)


def with_flipped_bit(data: bytes, position: int) -> bytes:
    """Flip one bit of a byte."""
    changed = bytearray(data)
    changed[position] ^= 1
    return bytes(changed)


def spoil_record(root: Path, split: str, index: int) -> Path:
    """Flip a bit in the middle of an image of a prepared data set; return its shard."""
    opened = open_split(root, split)
    row = opened.records[index]
    shard = opened.shards[row["shard"]]
    image_start = row["offset"] + row["image_start"]
    position = int(image_start + row["image_size"] // 2)
    shard.write_bytes(with_flipped_bit(shard.read_bytes(), position))
    return shard


def make_undecodable(root: Path, index: int) -> str:
    """Give a training record no image and a right checksum; return where it is, as errors say."""
    split = open_split(root, "train")
    row = split.records[index]
    shard = split.shards[row["shard"]]
    content = bytearray(shard.read_bytes())
    start = int(row["offset"])
    end = start + int(row["size"])
    image, _ = split.read(index)
    no_image = bytes(len(image))
    payload = bytes(unframe(bytes(content[start:end])))
    content[start:end] = frame(payload.replace(bytes(image), no_image))
    shard.write_bytes(content)
    return f"{shard}: record {index} of train at byte {row['offset']}: "
