"""Images that pieces make for themselves."""

import io
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

DIFFERENT = 64  # JPEGs; more are links to them


def write_folders(folder: Path, names: Iterable[str], per_class: int, width: int, height: int) -> Path:
    """Write ``per_class`` JPEGs, smooth noise of about 0.3 bytes a pixel, in a folder for each name."""
    random = np.random.default_rng(0)
    originals = []
    for number in range(DIFFERENT):
        path = folder.with_name(f".{folder.name}.originals") / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_encode(random, width, height))
        originals.append(path)
    for label, name in enumerate(names):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(per_class):
            os.link(originals[(label + number) % DIFFERENT], folder / name / f"image_{number:04d}.jpg")
    return folder


def _encode(random: np.random.Generator, width: int, height: int) -> bytes:
    coarse = random.integers(0, 256, (max(1, height // 8), max(1, width // 8), 3), np.uint8)
    pixels = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), np.int16)
    pixels = (pixels + random.integers(-12, 13, pixels.shape)).clip(0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=85)
    return file.getvalue()
