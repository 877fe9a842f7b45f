"""What tests share: tiny data sets, a tiny config, a command line, and corrupt images."""

import functools
import io
import os
import shlex
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from common.testing.photographs import write_colours
from imagenet_dali import prepare
from imagenet_dali.dataset import open_split

HERE = Path(__file__).parent
LAUNCHERS = ("SLURM_", "OMPI_", "PMIX_")
MODEL = dict(image_size=16, patch_size=8, width=32, depth=2, heads=2, mlp_ratio=2.0, num_classes=3)
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


def write_config(folder: Path) -> Path:
    """Write `CONFIG`, a recipe of 12 steps with everything in it, as ``folder/tiny.py``."""
    path = folder / "tiny.py"
    path.write_text(CONFIG)
    return path


def prepare_data(folder: Path) -> Path:
    """Prepare 65 images of three colours as shards, in ``folder/shards``."""
    images = write_colours(folder / "images", 65, 20, 24, "jpg")
    prepare.main([str(images), str(folder / "shards"), "--validation-share", "0.2", "--workers", "1"])
    return folder / "shards"


def write_images(root: Path, per_class: int, classes: int = 2) -> Path:
    """Write different small JPEGs as ``root/class_<label>/<number>.jpg``; return ``root``."""
    for label in range(classes):
        folder = root / f"class_{label}"
        folder.mkdir(parents=True)
        for number in range(per_class):
            (folder / f"{number:04d}.jpg").write_bytes(jpeg(24 + number % 16, 40 + label, seed=number))
    return root


def write_photographs(root: Path, names: Sequence[str], per_class: int) -> Path:
    """Write smooth JPEGs of many shapes, as photographs are, as ``root/<name>/<number>.jpg``; return ``root``."""
    random = np.random.default_rng(0)
    for name in names:
        (root / name).mkdir(parents=True)
        for number in range(per_class):
            coarse = Image.fromarray(random.integers(0, 256, (4, 5, 3), np.uint8))
            width, height = random.integers(30, 90, 2).tolist()
            coarse.resize((width, height), Image.Resampling.BICUBIC).save(root / name / f"{number}.jpg", quality=90)
    return root


def run(
    command: str, cwd: Path = HERE, code: int = 0, timeout: float = 300, **environ: str
) -> subprocess.CompletedProcess:
    """Run a command line as a user would, by default in the task's folder; expect exit status ``code``.

    ``python`` in it is this interpreter; launchers' variables are not inherited.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    answer = subprocess.run(
        ["bash", "-c", command.replace("python ", f"{shlex.quote(sys.executable)} ")],
        cwd=cwd,
        env={**kept, "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert answer.returncode == code, f"{command}: {answer.returncode}\n{answer.stdout}\n{answer.stderr}"
    assert "Traceback" not in answer.stderr or (code and "torch.distributed" in command), answer.stderr
    return answer


def gradient(height: int = 24, width: int = 40, seed: int = 0) -> Image.Image:
    """Return a smooth colour image, which JPEG hardly changes and in which a wrong rotation or channel shows."""
    y, x = np.mgrid[0:height, 0:width]
    pixels = np.stack([x * 255 / width, y * 255 / height, np.full_like(x, (40 + 83 * seed) % 256)], -1)
    return Image.fromarray(pixels.astype(np.uint8))


def encode(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    """Return the content of an image's file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def jpeg(height: int = 24, width: int = 40, seed: int = 0, **options: Any) -> bytes:
    """Return the content of a good JPEG."""
    return encode(gradient(height, width, seed), **options)


def with_dimensions(data: bytes, height: int, width: int) -> bytes:
    """Overwrite the dimensions in the start-of-frame segment of a baseline JPEG."""
    start = data.index(b"\xff\xc0") + 5
    return data[:start] + struct.pack(">HH", height, width) + data[start + 4 :]


def without(data: bytes, start: int, count: int) -> bytes:
    """Leave out some bytes."""
    return data[:start] + data[start + count :]


def with_flipped_bit(data: bytes, position: int) -> bytes:
    """Flip one bit of a byte."""
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


@functools.cache
def png_bomb(side: int, bytes_that_are_there: int) -> bytes:
    """Return a black and white PNG of ``side`` x ``side`` pixels, whose data may be incomplete."""
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(bytes_that_are_there))), (b"IEND", b""))
    framed = (struct.pack(">I", len(data)) + kind + data + _crc(kind + data) for kind, data in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


def _crc(data: bytes) -> bytes:
    return struct.pack(">I", zlib.crc32(data))


# name of the fault: (content of a file, by a number that varies the image; part of the reason given by preparation)
BAD_IMAGES: dict[str, tuple[Callable[[int], bytes], str]] = {
    "empty": (lambda seed: b"", "empty file"),
    "zeros": (lambda seed: bytes(1000 + seed), "not one of JPEG"),
    "noise": (lambda seed: np.random.default_rng(seed).bytes(1000), "not one of JPEG"),
    "an error page": (lambda seed: b"<html>404, %d</html>" % seed, "not one of JPEG"),
    "GIF": (lambda seed: encode(gradient(seed=seed), "GIF"), "not one of JPEG"),
    "a PostScript program": (lambda seed: encode(gradient(seed=seed), "EPS"), "not one of JPEG"),
    "a magic number alone": (lambda seed: b"\xff\xd8\xff", "JPEG"),
    "JPEG cut in its header": (lambda seed: jpeg(seed=seed)[:100], "JPEG"),
    "JPEG cut in its data": (lambda seed: jpeg(200, 200, seed)[:-200], "Premature end of JPEG file"),
    "JPEG without its last byte": (lambda seed: jpeg(seed=seed)[:-1], "Premature end of JPEG file"),
    "JPEG that lost bytes": (lambda seed: without(jpeg(200, 200, seed), -600, 25), "Corrupt JPEG data"),
    "JPEG that says it is larger": (lambda seed: with_dimensions(jpeg(seed=seed), 240, 400), "premature end of data"),
    "JPEG that says it is smaller": (lambda seed: with_dimensions(jpeg(seed=seed), 8, 8), "extraneous bytes"),
    "JPEG that says it has 20000x20000 pixels": (
        lambda seed: with_dimensions(jpeg(seed=seed), 20_000, 20_000),
        "more than 100 million pixels",
    ),
    "PNG cut": (lambda seed: encode(gradient(seed=seed), "PNG")[:-40], "Truncated"),
    "PNG with a flipped bit": (lambda seed: with_flipped_bit(encode(gradient(seed=seed), "PNG"), 80), "checksum"),
    "PNG that decodes to 144 million pixels": (lambda seed: png_bomb(12_000, 18_012_000), "100 million pixels"),
    "PNG that says it has 2 billion pixels": (lambda seed: png_bomb(45_000, 1000), "100 million pixels"),
    "BMP cut": (lambda seed: encode(gradient(seed=seed), "BMP")[:-40], "truncated"),
    "TIFF cut": (lambda seed: encode(gradient(seed=seed), "TIFF")[:-400], "truncated"),
    "WebP cut": (lambda seed: encode(gradient(seed=seed), "WEBP")[:-40], "decoder"),
    "TIFF of floats": (lambda seed: encode(Image.new("F", (4, 4), seed), "TIFF"), "32-bit pixels"),
    "too wide for JPEG": (lambda seed: encode(Image.new("RGB", (70_000, 1)), "PNG"), "65500"),
}


def spoil_record(root: Path, split: str, index: int) -> Path:
    """Flip a bit in the middle of an image of a prepared data set; return its shard."""
    opened = open_split(root, split)
    row = opened.records[index]
    shard = opened.shards[row["shard"]]
    position = int(row["offset"] + row["image_start"] + row["image_size"] // 2)
    shard.write_bytes(with_flipped_bit(shard.read_bytes(), position))
    return shard
