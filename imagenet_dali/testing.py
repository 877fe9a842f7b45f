"""What the tests of whole runs share: a tiny data set, a tiny config, and a command line."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from imagenet_dali import prepare

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
    noise = np.random.default_rng(0)
    for number in range(65):
        label = number % 3
        pixels = noise.integers(0, 80, (20, 24, 3), np.uint8)
        pixels[..., label] += 120
        path = folder / "images" / "rgb"[label] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path, quality=95)
    prepare.main([str(folder / "images"), str(folder / "shards"), "--validation-share", "0.2", "--workers", "1"])
    return folder / "shards"


def run(command: str, cwd: Path = HERE, code: int = 0, **environ: str) -> subprocess.CompletedProcess:
    """Run a command line as a user would, by default in the task's folder; it must end with exit status ``code``.

    ``python`` in it is this interpreter, and no launcher's variables are inherited.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    answer = subprocess.run(
        ["bash", "-c", command.replace("python ", f"{shlex.quote(sys.executable)} ")],
        cwd=cwd,
        env={**kept, "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert answer.returncode == code, f"{command}: {answer.returncode}\n{answer.stdout}\n{answer.stderr}"
    return answer
