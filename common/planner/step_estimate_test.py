"""Step estimates against the bytes of real processes, and the memory that a profiler sees."""

import ctypes
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import profile, record_function

from common.config.load import load_config
from common.engine.tensor_parallel.layout import resolve_parallel
from common.engine.upstream import AMP_TYPE
from common.planner.step_estimate import Traffic, estimate_step
from common.testing.commands import run_forked
from common.testing.parity_cases import CASES, MODEL, MODERN
from common.testing.ranks import launched, run_ranks, slow
from common.training import build_training

TINY = MODEL | {"depth": 4}
STEPS = 3  # DDP settles in the second


def build_config(
    processes: int, parallel: Any = None, model: dict[str, Any] = TINY, **keys: Any
) -> dict[str, Any]:
    config = load_config("vit_s16_vanilla", [f"MODEL={model}"] if "timm" in model else []) | keys
    config["MODEL"] = config["MODEL"] | model
    config["parallel"] = resolve_parallel(parallel, processes)
    return config


def train(config: dict[str, Any], micro_batch: int, accumulation: int) -> Traffic:
    """Launch, and train as a task does; return the traffic of the last step."""
    images = torch.randn(
        micro_batch, 3, config["MODEL"]["image_size"], config["MODEL"]["image_size"]
    )
    labels = torch.zeros(micro_batch, dtype=torch.long)
    options = {key: config[key] for key in ("parallel", "zero", "fp16", "clip_grad_norm")}
    with launched(**options, gradient_accumulation=accumulation):
        engine = build_training(config, torch.nn.CrossEntropyLoss()).engine
        engine.train()
        for step in range(STEPS):
            with Traffic() as traffic, record_function(f"step {step}"):
                for _ in range(accumulation):
                    engine.zero_grad()
                    engine.backward(engine.criterion(engine(images), labels))
                    engine.step()
    return traffic


def count_traffic(config: dict[str, Any], micro_batch: int, accumulation: int) -> Counter:
    return train(config, micro_batch, accumulation).nbytes


LAMB = {"name": "lamb", "max_grad_norm": 1.0}
MUON = {"name": "muon"}


@pytest.mark.parametrize(
    ("case", "optimizer"),
    [
        ("dp2 x 1d-2", LAMB),
        ("2d-4", LAMB),
        ("zero 1", LAMB),
        ("zero 3 x 1d-2", LAMB),
        ("2.5d-8", LAMB),
        ("3d-8", LAMB),
        ("zero 1", MUON),
        ("2d-4", MUON),
    ],
)
def test_bytes_are_those_of_real_processes(case, optimizer):
    processes, mode = CASES[case]
    # float16, because its loss scaler sends too
    config = build_config(
        processes, model=MODEL | {"drop_path": 0.1}, fp16=FLOAT16, OPTIMIZER=optimizer, **mode
    )
    counted, *_ = run_ranks(processes, count_traffic, config, 8, 3)
    estimated = estimate_step(config, processes, 8, 3, "cpu")
    assert estimated.nbytes == counted
    assert sum(estimated.nbytes.values()) > 0


@pytest.mark.parametrize("case", ["1d-2", "2d-4", "zero 3 x 1d-2"])
def test_muon_gathers_and_shares_out_all_matrices_of_a_shape_at_once(case):
    """qkv and projection are of one shape, fc1 and fc2 of two more; `TINY` has four blocks."""
    processes, mode = CASES[case]
    with_muon = build_config(processes, OPTIMIZER={"name": "muon"}, **mode)
    with_adamw = build_config(processes, OPTIMIZER={"name": "adamw"}, **mode)
    of_muon = estimate_step(with_muon, processes, 8)
    of_adamw = estimate_step(with_adamw, processes, 8)
    route = "all_to_all", tuple(range(processes))
    assert of_muon.calls - of_adamw.calls == {route: 3 * 2}
    # A rank's share of the matrices goes each way: of four blocks with 8 width^2 numbers.
    numbers = 4 * 8 * TINY["width"] ** 2
    nbytes = 2 * 4 * numbers / processes
    assert of_muon.nbytes[route] == pytest.approx(nbytes)


def measure_peak(config: dict[str, Any], micro_batch: int, accumulation: int) -> int:
    """Return the peak of PyTorch's allocations in the last step, in a process of its own.

    The flag makes the allocator count what all threads free: the profiler alone misses Gloo's.
    """
    libc10 = ctypes.CDLL(Path(torch.__file__).parent / "lib" / "libc10.so")
    ctypes.c_bool.in_dll(libc10, "FLAGS_caffe2_report_cpu_memory_usage").value = True
    with profile(profile_memory=True, acc_events=True) as profiler:
        train(config, micro_batch, accumulation)
    events = profiler.profiler.kineto_results.experimental_event_tree()
    for event in events:
        events += event.children
    (start,) = (event.start_time_ns for event in events if event.name == f"step {STEPS - 1}")
    allocations = [
        event for event in events if event.tag == torch._C._profiler._EventType.Allocation
    ]
    return max(
        event.extra_fields.total_allocated for event in allocations if event.start_time_ns >= start
    )


SMALL = {"image_size": 96, "width": 192, "depth": 6, "heads": 3, "num_classes": 100}
VIT_TI = SMALL | {"depth": 12}
# In bfloat16 where that is fast, else in float32: these models would take minutes.
TORCH = {"mode": AMP_TYPE.TORCH}
NAIVE = {"mode": AMP_TYPE.NAIVE}
FLOAT16 = TORCH | {"dtype": "float16"}
CHECKPOINT = {"activation_checkpoint": True}


@pytest.mark.parametrize(
    ("model", "fp16", "optimizer", "micro_batch", "accumulation"),
    [
        (SMALL | {"frozen": "body"}, TORCH, "adamw", 8, 2),
        (SMALL, None, "lamb", 8, 2),
        ({"timm": "resnet18", "image_size": 96}, None, "adamw", 16, 1),
        (
            {"timm": "vit_small_patch14_dinov2", "image_size": 56, "depth": 3} | CHECKPOINT,
            None,
            "adamw",
            32,
            1,
        ),
        (SMALL, TORCH, "adamw", 8, 1),
        (SMALL | CHECKPOINT, None, "adamw", 8, 1),
        (SMALL | MODERN, None, "muon", 1, 1),
        slow(VIT_TI, NAIVE, "adamw", 24, 2),
        slow(VIT_TI | {"dropout": 0.1, "drop_path": 0.1}, TORCH, "adamw", 16, 1),
    ],
)
def test_memory_is_within_a_tenth_of_the_measured(
    model, fp16, optimizer, micro_batch, accumulation
):
    model = dict(model)
    config = build_config(
        1, None, model, fp16=fp16, OPTIMIZER={"name": optimizer}, FREEZE=model.pop("frozen", None)
    )
    (measured,) = run_ranks(1, measure_peak, config, micro_batch, accumulation)
    assert estimate_step(config, 1, micro_batch, accumulation, "cpu").peak == pytest.approx(
        measured, rel=0.1
    )


@pytest.mark.parametrize(
    "case",
    [
        "1d-2",
        slow("zero 1"),
        slow("dp2"),
        slow("2d-4"),
        "3d-8",
        slow("zero 3"),
        slow("zero 3 x 1d-2"),
    ],
)
def test_memory_of_a_cut_model_is_within_a_tenth_of_the_measured(case):
    processes, mode = CASES[case]
    model = SMALL | {"image_size": 64, "heads": 4, "depth": 3}
    config = build_config(processes, model=model, OPTIMIZER={"name": "lamb"}, fp16=TORCH, **mode)
    # takes more than the whole model, which a rank builds first, in what is a GPU's host memory
    micro_batch = 64
    measured = run_ranks(processes, measure_peak, config, micro_batch, 1)
    assert estimate_step(config, processes, micro_batch, 1, "cpu").peak == pytest.approx(
        max(measured), rel=0.1
    )


def test_a_gpu_keeps_a_byte_of_dropouts_masks_where_a_cpu_keeps_four():
    config = build_config(1, model=TINY | {"dropout": 0.1}, fp16=None)
    on_cpu = estimate_step(config, 1, 64, device="cpu")
    on_gpu = estimate_step(config, 1, 64, device="cuda")
    assert on_cpu.activations > 1.2 * on_gpu.activations


def test_a_gpus_autocast_keeps_four_bytes_of_what_a_layer_norm_reads_where_a_cpus_keeps_two():
    mixer = {"timm": "mixer_s32_224", "image_size": 224}  # 17 of 49 tokens of width 512
    config = build_config(1, model=mixer, fp16=TORCH | {"dtype": "bfloat16"})
    on_cpu = estimate_step(config, 1, 64, device="cpu")
    on_gpu = estimate_step(config, 1, 64, device="cuda")
    more = on_gpu.activations - on_cpu.activations
    assert more == pytest.approx(2 * 64 * 17 * 49 * 512, rel=0.1)


def test_a_gpus_rms_norm_keeps_what_its_layer_norm_keeps():
    """The kernel of a CPU keeps the normalized activations too."""
    config = build_config(1, model=TINY, fp16=None)
    with_rms_norm = build_config(1, model=TINY | {"norm": "rmsnorm"}, fp16=None)
    layer_norm = estimate_step(config, 1, 64)
    rms_norm = estimate_step(with_rms_norm, 1, 64)
    assert rms_norm.activations == pytest.approx(layer_norm.activations, rel=0.001)


def test_averages_take_as_much_as_the_weights():
    config = build_config(1, fp16=None)
    plain = estimate_step(config | {"EMA": None}, 1, 8)
    averaged = estimate_step(config | {"EMA": 0.9}, 1, 8)
    assert averaged.weights == 2 * plain.weights
    assert averaged.peak == plain.peak + plain.weights


def test_the_default_precision_is_that_of_the_device_that_is_planned(monkeypatch):
    """A GPU has bfloat16, also if it is planned on a CPU without."""
    monkeypatch.setattr("common.engine.amp.is_fast", lambda _: False)
    precise = estimate_step(build_config(1, fp16=None), 1, 256, device="cuda")
    default = estimate_step(build_config(1, fp16=TORCH), 1, 256, device="cuda")
    assert default.activations < 0.8 * precise.activations


def test_micro_batches_between_the_first_and_the_last_are_counted():
    config = build_config(1, fp16=None)
    few = estimate_step(config, 1, 8, 3)
    many = estimate_step(config, 1, 8, 30)
    assert many.flops == 10 * few.flops


@pytest.mark.parametrize("optimizer", ["sgd", "muon"])
def test_a_process_that_has_used_several_threads_gets_an_answer(optimizer):
    """As one that has loaded INIT: a fork does not copy the threads, and would wait for them."""
    config = build_config(1, model=TINY | {"width": 512}, OPTIMIZER={"name": optimizer})

    def plan(_: object) -> None:
        torch.set_num_threads(2)
        torch.ones(1 << 22).sin_()
        print(estimate_step(config, 1, 8).weights)

    assert int(run_forked(plan, OMP_NUM_THREADS="2").stdout) > 2**20
