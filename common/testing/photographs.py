"""Images for tests and benchmarks: JPEGs like photographs, and images of three colours."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

DIFFERENT = 64  # JPEGs; more are links to them


def write_photographs(
    folder: Path, names: Sequence[str], count: int, width: int, height: int
) -> Path:
    """Write JPEGs of about 0.3 bytes a pixel into ``folder/<name>/`` in turn; return ``folder``."""
    random = np.random.default_rng(0)
    paths = [
        folder / names[number % len(names)] / f"image_{number:05d}.jpg" for number in range(count)
    ]
    for number, path in enumerate(paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        if number < DIFFERENT:
            coarse = Image.fromarray(
                random.integers(0, 256, (height // 8, width // 8, 3), np.uint8)
            )
            smooth = coarse.resize((width, height), Image.Resampling.BICUBIC)
            pixels = np.asarray(smooth, np.int16)
            pixels = pixels + random.integers(-12, 13, pixels.shape)
            pixels = pixels.clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(path, quality=85)
        else:
            path.hardlink_to(paths[number % DIFFERENT])
    return folder


def noise_image(height: int, width: int, seed: int = 0) -> Image.Image:
    """Return an image each of whose values is random."""
    random = np.random.default_rng(seed)
    return Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8))


def write_colours(
    folder: Path, count: int, height: int, width: int, kind: str = "png", seed: int = 0
) -> Path:
    """Write noisy red, green and blue images as ``folder/{r,g,b}/<number>``; return ``folder``."""
    noise = np.random.default_rng(seed)
    for number in range(count):
        pixels = noise.integers(0, 80, (height, width, 3), np.uint8)
        pixels[..., number % 3] += 120
        path = folder / "rgb"[number % 3] / f"{number}.{kind}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path, quality=95)
    return folder
