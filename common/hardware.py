"""What the machine computes with. torch is imported where it is needed, so that the rest is available without it."""

import os
import platform
from functools import cache

# Matrix products run in oneDNN, all else in ATen; each chooses its kernels by itself, and both can be limited.
WIDTHS = ("SSE4.1", "AVX", "AVX2", "AVX-512", "AVX512_BF16", "AMX")
BFLOAT16 = ("AVX512_BF16", "AMX")  # those with instructions for it
# Values of ONEDNN_MAX_CPU_ISA, by the dispatcher control page of oneDNN's documentation; any other is no limit here.
ONEDNN = {
    "SSE41": "SSE4.1",
    "AVX": "AVX",
    **dict.fromkeys(("AVX2", "AVX2_VNNI", "AVX2_VNNI_2"), "AVX2"),
    **dict.fromkeys(("AVX512_CORE", "AVX512_CORE_VNNI"), "AVX-512"),
    **dict.fromkeys(("AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX10_1_512"), "AVX512_BF16"),
}
ATEN = {
    "DEFAULT": "SSE4.1",
    "AVX2": "AVX2",
    "AVX512": "AMX",
}  # AMX: it has no kernels wider than AVX-512, none narrower


def instruction_set() -> str:
    """Return the widest of `WIDTHS` that both oneDNN and ATen may use; other than on x86-64, ATen's name of its own."""
    import torch

    aten = torch.backends.cpu.get_cpu_capability()  # follows ATEN_CPU_CAPABILITY
    if platform.machine() not in ("x86_64", "AMD64"):
        return aten
    return min(_onednn_set(), ATEN.get(aten, "AMX"), key=WIDTHS.index)


def is_fast(dtype_name: str) -> bool:
    """Return whether this CPU has instructions for matrix products in "bfloat16" or "float16", which oneDNN may use.

    Without them such a product takes up to some hundred times as long as in float32 (pytorch issues 118499, 146508).
    """
    import torch

    if dtype_name == "float16":
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    # which is true of AVX-512 without these instructions too, where oneDNN converts to float32 and back
    return platform.machine() not in ("x86_64", "AMD64") or _onednn_set() in BFLOAT16


@cache  # oneDNN, too, reads its variables once
def _onednn_set() -> str:
    """Return the widest of `WIDTHS` that the CPU has and oneDNN may use."""
    import torch

    limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA", "")
    has = {
        "AMX": torch.cpu._is_amx_tile_supported(),
        "AVX512_BF16": torch.cpu._is_avx512_bf16_supported(),
        "AVX-512": torch.cpu._is_avx512_supported(),
        "AVX2": torch.cpu._is_avx2_supported(),
    }
    widest = next((name for name, supported in has.items() if supported), "AVX")
    return min(widest, ONEDNN.get(limit.upper(), "AMX"), key=WIDTHS.index)
