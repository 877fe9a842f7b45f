import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from common.colossal import AMP_TYPE
from common.model.flops import flops_per_image, peak_flops, peak_images_per_s
from common.model.vit import build_model

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "model",
    [
        {"image_size": 224, "patch_size": 16, "width": 768, "depth": 12, "heads": 12, "num_classes": 1000},
        {"image_size": 32, "patch_size": 4, "width": 256, "depth": 7, "heads": 4, "mlp_ratio": 2.0, "num_classes": 10},
        {"image_size": 32, "patch_size": 8, "width": 64, "depth": 3, "heads": 2, "pool": "avg", "num_classes": 7},
    ],
)
def test_flops_are_three_forward_passes_of_pytorchs_count(model):
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        build_model(**model)(torch.empty(2, 3, model["image_size"], model["image_size"]))
    assert flops_per_image(model) == 3 * counter.get_total_flops() / 2


def test_flops_of_vit_b16_are_those_of_the_literature():
    model = {"image_size": 224, "patch_size": 16, "width": 768, "depth": 12, "heads": 12, "num_classes": 1000}
    assert flops_per_image(model) / 6 == pytest.approx(17.6e9, rel=0.01)  # arXiv 2012.12877, table 5: multiply-adds


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4),
        ("NVIDIA H100 PCIe", torch.float16, 756.0),
        ("NVIDIA A100-SXM4-80GB", torch.float32, 19.5),
    ],
)
def test_the_peak_of_a_known_gpu_is_its_data_sheets(monkeypatch, name, dtype, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda", 0), dtype) == tflops * 1e12


def test_tf32_counts_where_it_is_allowed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert peak_flops(torch.device("cuda", 0), torch.float32) == 156e12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_peak_of_another_device_is_measured(dtype):
    assert 1e7 < peak_flops(CPU, dtype) < 1e14


def test_the_peak_rate_is_of_all_gpus_in_the_runs_precision(monkeypatch):
    monkeypatch.setattr(
        "common.model.flops.peak_flops", lambda device, dtype: 3e12 if dtype == torch.bfloat16 else 1e12
    )
    model = {"image_size": 224, "patch_size": 16, "width": 192, "depth": 1, "heads": 3, "num_classes": 10}
    single = peak_images_per_s(model, None, 1, CPU)
    assert single == pytest.approx(1e12 / flops_per_image(model))
    assert peak_images_per_s(model, {"mode": AMP_TYPE.TORCH, "dtype": "bfloat16"}, 4, CPU) == pytest.approx(12 * single)
