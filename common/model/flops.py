"""FLOPs of a model, and the peak FLOP/s of a device."""

import functools
import math
import re
import time
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from common.engine.amp import compute_dtype, name_dtype
from common.errors import UserError
from common.files import Values
from common.hardware import is_fast
from common.model.build import build_on_meta
from common.text import first_line, nearest_multiples

# Dense TFLOP/s in 16 bits, TF32 and float32, by part of the device name; from NVIDIA's data sheets,
# SXM by default.
PEAKS = {
    "H200 NVL": (835.0, 417.5, 60.0),
    "H200": (989.4, 494.7, 66.9),
    "H100 NVL": (835.0, 417.5, 60.0),
    "H100 PCIe": (756.0, 378.0, 51.2),
    "H100": (989.4, 494.7, 66.9),
    "A100": (312.0, 156.0, 19.5),
    "L40S": (362.0, 183.2, 91.6),
    "V100": (125.0, 15.7, 15.7),  # 16 bits are float16: it has neither TF32 nor bfloat16
}
MEASURING = 0.15  # seconds
# torch 2.11 does not count the CPU's attention. Its arguments begin as the GPU's do.
ATEN = torch.ops.aten
FORMULAS = {
    ATEN._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        ATEN._scaled_dot_product_flash_attention
    ],
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        ATEN._scaled_dot_product_flash_attention_backward
    ],
} | flop_registry
COUNTED: dict[str, int] = {}  # results of `flops_per_image`, which a start asks for several times


def flops_per_image(model: Values, frozen: str | None = None, image_size: int | None = None) -> int:
    """Return the FLOPs per image of the forward and backward pass of ``model`` (the config's
    MODEL), for images of ``image_size``, by default the model's.

    Two per multiply-add of the matrix products, including attention, in the forward pass, times 3
    for both passes; activation recomputation does not count. A body frozen by FREEZE (``frozen``)
    has no backward pass, and the head then only that of its weights. This is the convention of PaLM
    (arXiv 2204.02311, appendix B) and torchtitan.

    Raises `UserError` for images that the model does not take.
    """
    size = image_size or model["image_size"]
    key = repr((model, frozen, size))
    if key not in COUNTED:
        COUNTED[key] = _count(model, frozen, size)
    return COUNTED[key]


def _count(model: Values, frozen: str | None, size: int) -> int:
    built = build_on_meta(dict(model)).eval()
    try:
        with FlopCount() as count, torch.no_grad():
            built(torch.empty(1, 3, size, size, device="meta"))
    except (RuntimeError, AssertionError, ValueError) as error:
        if not model["timm"]:
            # The schema has checked MODEL.image_size.
            raise UserError(
                f"IMAGE_SIZES: {size} pixels are no multiple of MODEL.patch_size="
                f"{model['patch_size']}: set {nearest_multiples(size, model['patch_size'])}"
            ) from error
        key = "MODEL.image_size" if size == model["image_size"] else "IMAGE_SIZES"
        raise UserError(
            f"{key}: the model takes no images of {size} pixels ({first_line(error)}); most of "
            "timm's ViTs take several sizes with --set MODEL.dynamic_img_size=True"
        ) from error
    if not frozen:
        return 3 * count.total
    # Two FLOPs for each weight: the gradient of the head, whose input needs none.
    heads = [built.get_submodule(name).weight for name in built.head_names]  # pyright: ignore
    return count.total + 2 * sum(head.numel() for head in heads)  # pyright: ignore


def peak_images_per_s(
    model: Values,
    fp16: Values | None,
    devices: int,
    device: torch.device,
    frozen: str | None = None,
) -> float:
    """Return the images/s of ``devices`` training at peak FLOP/s in the precision of ``fp16``.

    Model FLOPs utilisation is the ratio of the achieved rate to this one. ``model``, ``fp16`` and
    ``frozen`` (FREEZE) are the config's.
    """
    peak = peak_flops(device, compute_dtype(fp16, device.type))
    return devices * peak / flops_per_image(model, frozen)


def knows_peak(device: torch.device) -> bool:
    """Return whether utilisation is reported: a CPU's peak, measured while others use the CPU, is
    lower than what a run gets.
    """
    return device.type == "cuda"


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the peak FLOP/s of matrix products in ``dtype``: from `PEAKS`, else measured within
    0.3 s.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    gpu = known_gpu(name)
    # A MIG device is a slice of the GPU that its name says.
    if gpu is None or "MIG" in name:
        return _measure_peak(device, dtype)
    # The setting that cuBLAS follows for float32 matrices.
    half, tf32, single = PEAKS[gpu]
    full = single if torch.get_float32_matmul_precision() == "highest" else tf32
    return 1e12 * (full if dtype == torch.float32 else half)


def known_gpu(name: str) -> str | None:
    """Return the key of `PEAKS` that a GPU's name contains: not A100 for an RTX A1000."""
    return next((part for part in PEAKS if re.search(rf"{part}\b", name)), None)


@functools.cache
def _measure_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of the fastest of the matrix products in `MEASURING` seconds."""
    size = 8192 if device.type == "cuda" else 1024
    if device.type == "cpu" and dtype != torch.float32 and not is_fast(name_dtype(dtype)):
        size = 192  # takes milliseconds even without instructions for the dtype
    # Ones: the sums stay finite, and random numbers would take longer than the products.
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    fastest = math.inf
    end = time.perf_counter() + MEASURING
    while time.perf_counter() < end or fastest == math.inf:
        started = time.perf_counter()
        (matrix @ matrix)[0, 0].item()  # `item` waits for the device
        fastest = min(fastest, time.perf_counter() - started)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # the run reports its own peak
    return 2 * size**3 / fastest


class FlopCount(TorchDispatchMode):
    """Sum the FLOPs of matrix products, convolutions and attention within the context in ``total``.

    Uses the formulas of `torch.utils.flop_counter.FlopCounterMode`, which itself tracks modules and
    thus keeps activations alive.
    """

    total = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        outcome = function(*args, **(kwargs or {}))
        formula = FORMULAS.get(function._overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=outcome)
        return outcome
