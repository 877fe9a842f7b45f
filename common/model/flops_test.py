import time
from itertools import count

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from common.engine.upstream import AMP_TYPE
from common.model.build import build_model, freeze
from common.model.flops import (
    FlopCount,
    _measure_peak,
    flops_per_image,
    known_gpu,
    peak_flops,
    peak_images_per_s,
)
from common.model.vit import attend

CPU = torch.device("cpu")
POOLED = {
    "image_size": 32,
    "patch_size": 8,
    "width": 64,
    "depth": 3,
    "heads": 2,
    "pool": "avg",
    "num_classes": 7,
}
CONVOLUTIONS = POOLED | {"stem": "conv", "pool": "seq", "mlp_ratio": 2.0}


@pytest.mark.parametrize(
    "model",
    [
        POOLED,
        POOLED | {"norm": "rmsnorm", "mlp": "swiglu"},
        CONVOLUTIONS,
        CONVOLUTIONS | {"stem": "residual"},
        {"image_size": 224},
        {"timm": "resnet18", "image_size": 64},
    ],
)
def test_flops_are_three_forward_passes_of_pytorchs_count(model):
    for size in (model["image_size"], model["image_size"] // 2):
        with torch.device("meta"), FlopCounterMode(display=False) as counter:
            build_model(**model)(torch.empty(2, 3, size, size))
        assert flops_per_image(model, None, size) == 3 * counter.get_total_flops() / 2


def test_attention_on_a_cpu_counts():
    """Two products forward; backward, as on a GPU, five: the scores are computed again."""
    query_BHNE = torch.ones(2, 3, 5, 8, requires_grad=True)
    with FlopCount() as count:
        attend(query_BHNE, query_BHNE, query_BHNE).sum().backward()
    assert count.total == (2 + 5) * 2 * (2 * 3 * 5 * 5 * 8)


def test_flops_of_a_frozen_body_are_pytorchs_count():
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model = build_model(**POOLED)
        freeze(model, "body")
        model(torch.empty(2, 3, 32, 32)).sum().backward()
    assert flops_per_image(POOLED, "body") == counter.get_total_flops() / 2


# TFLOP/s of 16 bits, TF32 and float32 on NVIDIA's data sheets. Those of tensor cores are for sparse
# matrices from Ampere on, but for the L40S: twice the dense ones.
DATA_SHEETS = {
    "NVIDIA H200 NVL": (1671 / 2, 835 / 2, 60),
    "NVIDIA H200": (1979 / 2, 989 / 2, 67),
    "NVIDIA H100 NVL": (1671 / 2, 835 / 2, 60),
    "NVIDIA H100 PCIe": (1513 / 2, 756 / 2, 51),
    "NVIDIA H100 80GB HBM3": (1979 / 2, 989 / 2, 67),
    "NVIDIA A100-SXM4-80GB": (624 / 2, 312 / 2, 19.5),
    "NVIDIA L40S": (362, 183, 91.6),
    "Tesla V100-SXM2-32GB": (125, 15.7, 15.7),
}


@pytest.mark.parametrize("name", DATA_SHEETS)
def test_the_peak_of_a_known_gpu_is_its_data_sheets(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    peaks = []
    for dtype, precision in (
        (torch.bfloat16, "highest"),
        (torch.float32, "high"),  # TF32
        (torch.float32, "highest"),
    ):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)  # noqa: B023
        peaks.append(peak_flops(torch.device("cuda", 0), dtype) / 1e12)
    # They are rounded: 51 is 51.2.
    assert peaks == pytest.approx(DATA_SHEETS[name], rel=0.005)


def test_the_peak_of_another_device_is_measured(monkeypatch):
    assert known_gpu("NVIDIA RTX A1000") is None
    ticks = count(step=0.1)
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    assert _measure_peak.__wrapped__(CPU, torch.float32) == pytest.approx(2 * 1024**3 / 0.1)


def test_the_peak_rate_is_of_all_gpus_in_the_runs_precision(monkeypatch):
    peaks = {torch.bfloat16: 3e12}
    monkeypatch.setattr("common.model.flops.peak_flops", lambda _, dtype: peaks[dtype])
    bfloat16 = {"mode": AMP_TYPE.TORCH, "dtype": "bfloat16"}
    rate = peak_images_per_s(POOLED, bfloat16, 4, CPU, "body")
    assert rate == pytest.approx(12e12 / flops_per_image(POOLED, "body"))
