"""The instruction set's name, and which types are computed fast, under oneDNN's and ATen's limits."""

import time

import pytest
import torch

from common import hardware

CPU = ("amx_tile", "avx512_bf16", "avx512", "avx2")


@pytest.mark.parametrize(
    ("has", "limit", "aten", "name", "fast"),
    [
        (CPU, "", "AVX512", "AMX", True),
        (CPU, "AVX512_CORE_BF16", "AVX512", "AVX512_BF16", True),
        (CPU, "avx512_core_vnni", "AVX512", "AVX-512", False),
        (CPU, "", "AVX2", "AVX2", True),
        (CPU[1:], "AVX512_CORE_AMX", "AVX512", "AVX512_BF16", True),
        (CPU[2:], "ALL", "AVX512", "AVX-512", False),
        (CPU[3:], "AVX512_CORE", "AVX2", "AVX2", False),
        (CPU[3:], "SSE41", "AVX2", "SSE4.1", False),
        ((), "", "DEFAULT", "SSE4.1", False),
    ],
)
def test_instruction_sets(monkeypatch: pytest.MonkeyPatch, has, limit, aten, name, fast) -> None:
    hardware._onednn_set.cache_clear()
    for flag in CPU:
        monkeypatch.setattr(torch.cpu, f"_is_{flag}_supported", lambda flag=flag: flag in has)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: aten)
    monkeypatch.setattr(hardware.platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    # torch's own answer, true from AVX-512 on, which is too much
    supported = "avx512" in has and hardware.ONEDNN.get(limit.upper()) not in ("SSE4.1", "AVX", "AVX2")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported, raising=False)
    try:
        assert (hardware.instruction_set(), hardware.is_fast("bfloat16")) == (name, fast)
    finally:
        hardware._onednn_set.cache_clear()


def test_what_is_called_fast_is_fast() -> None:
    def seconds(dtype: torch.dtype) -> float:
        matrix, times = torch.ones(192, 192, dtype=dtype), []
        for _ in range(5):
            started = time.thread_time()
            matrix @ matrix
            times.append(time.thread_time() - started)
        return min(times)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ratios = {name: seconds(getattr(torch, name)) / seconds(torch.float32) for name in ("bfloat16", "float16")}
    finally:
        torch.set_num_threads(threads)
    print(hardware.instruction_set(), ratios)
    for name, ratio in ratios.items():  # without instructions: 1.5 (bfloat16 in AVX-512), 8 (float16) to 100
        assert ratio < 2.5 if hardware.is_fast(name) else ratio > 1.1, name


def test_peak_memory_is_that_since_it_was_reset() -> None:
    hardware.reset_peak_memory()
    before = hardware.peak_memory()
    tensor = torch.ones(50_000_000)
    del tensor
    assert hardware.peak_memory() > before + 190e6
    hardware.reset_peak_memory()
    assert hardware.peak_memory() < before + 100e6
