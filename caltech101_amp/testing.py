"""Shared by the tests: a miniature data set of three categories."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from caltech101_amp import task

NAMES = ("accordion", "bass", "cup")
PER_CATEGORY = 20


def write_categories(folder: Path) -> Path:
    """Write images of one colour per category, and the background folder."""
    noise = np.random.default_rng(0)
    for label, name in enumerate((*NAMES, task.BACKGROUND)):
        (folder / name).mkdir(parents=True)
        for number in range(PER_CATEGORY):
            pixels = noise.integers(0, 80, (*noise.integers(20, 40, 2), 3), np.uint8)
            pixels[..., label % 3] += 120
            Image.fromarray(pixels).save(folder / name / f"image_{number:04d}.jpg")
    return folder


def expect_miniature(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `dataset` accept the miniature as complete."""
    monkeypatch.setattr(task, "CATEGORIES", len(NAMES))
    monkeypatch.setattr(task, "IMAGES", len(NAMES) * PER_CATEGORY)
    task._open.cache_clear()
