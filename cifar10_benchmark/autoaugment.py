"""AutoAugment's policy for CIFAR-10 (Cubuk et al., arXiv 1805.09501, table 7), for batches on any device."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import AutoAugment, AutoAugmentPolicy

from cifar10_benchmark import operations as ops

# the sub-policy; then for each of its two operations whether it is applied, and its sign
UNIFORMS_PER_SAMPLE = 5
LEVELS = 10

# operation: (function, magnitude at level 0, at level 9, whether its sign is random)
OPERATIONS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], float, float, bool]] = {
    "ShearY": (ops.shear_y, 0, 0.3, True),
    "TranslateX": (ops.translate_x, 0, 150 / 331, True),
    "TranslateY": (ops.translate_y, 0, 150 / 331, True),
    "Rotate": (ops.rotate, 0, 30, True),
    "Brightness": (ops.brightness, 0, 0.9, True),
    "Color": (ops.color, 0, 0.9, True),
    "Contrast": (ops.contrast, 0, 0.9, True),
    "Sharpness": (ops.sharpness, 0, 0.9, True),
    "Posterize": (ops.posterize, 8, 4, False),
    "Solarize": (ops.solarize, 1, 0, False),
    "AutoContrast": (ops.autocontrast, 0, 0, False),
    "Equalize": (ops.equalize, 0, 0, False),
    "Invert": (ops.invert, 0, 0, False),
}
NAMES = list(OPERATIONS)
NONE = len(NAMES)

# each sub-policy: two times (operation, probability, level), without a level for operations that have no strength
POLICY = AutoAugment(AutoAugmentPolicy.CIFAR10).policies


def auto_augment(images_BCYX: Tensor, uniforms: np.ndarray) -> Tensor:
    """Augment images uint8 [B, 3, Y, X]; the uniforms in [0, 1) are float64 [B, `UNIFORMS_PER_SAMPLE`]."""
    sub_policies = (uniforms[:, 0] * len(POLICY)).astype(np.int64)
    for stage in range(2):
        applied, sign = uniforms[:, 1 + 2 * stage : 3 + 2 * stage].T
        operations = np.where(applied < _PROBABILITY[sub_policies, stage], _OPERATION[sub_policies, stage], NONE)
        magnitudes = _MAGNITUDE[sub_policies, stage] * np.where((sign < 0.5) & _SIGNED[sub_policies, stage], -1, 1)
        images_BCYX = apply_operations(images_BCYX, operations, magnitudes)
    return images_BCYX


def apply_operations(images_BCYX: Tensor, operations: np.ndarray, magnitudes: np.ndarray) -> Tensor:
    """Apply to each image its own operation, an index into `NAMES` or `NONE`, with its own magnitude."""
    # sorted by operation, so that each works on one slice with bounds known on the host
    order = np.argsort(operations, kind="stable")
    sizes = np.bincount(operations, minlength=NONE + 1).tolist()
    rows, places, strengths = (
        torch.from_numpy(values).to(images_BCYX.device, non_blocking=True)
        for values in (order, np.argsort(order), magnitudes[order].astype(np.float32))
    )
    ordered_BCYX = images_BCYX.index_select(0, rows)  # copies whole images, where indexing goes byte by byte on a CPU
    groups = zip(NAMES, ordered_BCYX.split(sizes), strengths.split(sizes), strict=False)  # the last one is `NONE`
    for name, group_BCYX, group_B in groups:
        if len(group_BCYX):
            group_BCYX.copy_(OPERATIONS[name][0](group_BCYX, group_B))
    return ordered_BCYX.index_select(0, places)


def magnitude(name: str, level: int | None) -> float:
    """Return an operation's unsigned magnitude at a level from 0 to 9."""
    _, first, last, _ = OPERATIONS[name]
    value = first + (last - first) * (level or 0) / (LEVELS - 1)
    return round(value) if name == "Posterize" else value


def _table(value: Callable[[str, float, int | None], object]) -> np.ndarray:
    """Return ``value(operation, probability, level)`` of the policy, by [sub-policy, stage]."""
    return np.array([[value(*operation) for operation in sub_policy] for sub_policy in POLICY])


_OPERATION = _table(lambda name, probability, level: NAMES.index(name))
_PROBABILITY = _table(lambda name, probability, level: probability)
_MAGNITUDE = _table(lambda name, probability, level: magnitude(name, level))
_SIGNED = _table(lambda name, probability, level: OPERATIONS[name][3])
