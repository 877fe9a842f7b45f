"""Predictions against the formulas of rings, peaks and overlaps."""

import functools
import math
from collections import Counter

import pytest

from common.config.load import load_config
from common.config.plan import build_plan
from common.engine.tensor_parallel.layout import resolve_parallel
from common.engine.upstream import AMP_TYPE
from common.errors import UserError
from common.planner.cluster import Cluster
from common.planner.prediction import Planner, Prediction, check_limits
from common.planner.step_estimate import estimate_step

CLUSTER = Cluster(memory=80e9, node=8, inside=400e9, between=50e9, decode=1e9)
WHOLE_ONLY = {"heads": 1}  # an odd number that no mode can cut


def build_config(**model: object) -> dict:
    config = load_config("vit_s16_vanilla") | {"BATCH_SIZE": None}
    return config | {"MODEL": config["MODEL"] | {"depth": 2} | model}


def in_micro_batches(size: int) -> dict:
    return {"MICRO_BATCH_SIZE": size, "gradient_accumulation": None}


def build_planner(config: dict, world_size: int, cluster: Cluster = CLUSTER) -> Planner:
    return Planner(config, build_plan(config, world_size, None), cluster)


@functools.cache
def predict(world_size: int, cluster: Cluster = CLUSTER, **model: object) -> dict[str, Prediction]:
    found = build_planner(build_config(**model), world_size, cluster).predict_modes()
    return {prediction.mode: prediction for prediction in found}


def test_every_mode_that_the_model_and_the_gpus_allow_is_there():
    whole = predict(8, **WHOLE_ONLY)
    assert set(whole) == {"data parallel"}

    tensor = {"mode": "2.5d", "size": 4, "depth": 1}
    own = {
        "parallel": resolve_parallel({"tensor": tensor}, 4),
        "zero": {"stage": 1},
    }
    planner = build_planner(build_config(heads=2) | own, 4)
    found = planner.predict_modes()
    assert [prediction.mode for prediction in found] == [
        "data parallel",
        "1d 2",
        "2d 2 x 2",
        "2.5d 2 x 2 x 1",
        "zero 1",
        "zero 3",
        "1d 2, zero 3",
    ]
    assert planner.settings_of(found[5]) == (
        "--set parallel=None --set TENSOR_PARALLEL_SIZE=1 --set TENSOR_PARALLEL_MODE=None "
        "--set zero='dict(stage=3)' --set MICRO_BATCH_SIZE=1024"
    )

    config = build_config() | {"TOTAL_BATCH_SIZE": 18}
    of_nine = build_planner(config, 9).predict_modes()
    micro_batches = {prediction.mode: prediction.micro_batch for prediction in of_nine}
    assert micro_batches == {
        "data parallel": 2,
        "1d 3": 6,
        "2d 3 x 3": 18,
    }
    assert len(of_nine) == 3


HALF = {"mode": AMP_TYPE.TORCH}


@pytest.mark.parametrize(
    ("keys", "teraflops"),
    [
        ({"fp16": HALF}, 989.4),
        ({"fp16": None, "TF32": True}, 494.7),
        ({"fp16": None, "TF32": False}, 66.9),
    ],
)
def test_a_gpus_rate_is_a_fifth_of_its_data_sheets_in_the_configs_precision(keys, teraflops):
    planner = build_planner(build_config() | keys, 8, Cluster(gpu="H100"))
    assert planner.rate == pytest.approx(0.2 * teraflops * 1e12)


def test_a_measured_rate_is_that_of_the_whole_model_however_the_run_splits_it():
    measured = Cluster(images_per_s=1000.0)
    split = {"parallel": resolve_parallel({"tensor": {"mode": "1d", "size": 2}}, 2)}
    config = build_config()
    whole = build_planner(config, 2, measured).rate
    assert build_planner(config | split, 2, measured).rate == whole
    # multiplications and additions, forward and backward: about 6 for each parameter and token
    blocks = 2 * 12 * 384**2
    assert whole == pytest.approx(1000 * 6 * blocks * 197, rel=0.2)


def test_what_is_not_compiled_has_one_speed():
    config = build_config() | {"COMPILE": False}
    (eager,) = build_planner(config, 1).predict_modes()
    split = predict(2)["1d 2"]
    for prediction in (eager, split):
        assert prediction.slowest_step == pytest.approx(prediction.fastest_step)


def test_small_micro_batches_and_slow_decoding_bound_the_step():
    small = predict(2048, **WHOLE_ONLY)["data parallel"]
    launches = 2 * 1e-3 * small.accumulation  # 1 ms for each of two blocks
    assert launches < small.fastest_step
    assert small.fastest_step < small.slowest_step
    decoding = predict(1, Cluster(decode=100.0), **WHOLE_ONLY)["data parallel"]
    assert decoding.slowest_step == decoding.fastest_step
    assert decoding.fastest_step == pytest.approx(4096 / 100)


def test_each_micro_batch_is_launched_and_decoded():
    config = build_config(**WHOLE_ONLY) | in_micro_batches(1)
    (launching,) = build_planner(config, 256).predict_modes()
    assert launching.accumulation == 16
    # 1 ms for each of two blocks, and little for reducing and updating 10 MB
    assert launching.fastest_step == pytest.approx(16 * 2e-3, rel=0.1)
    slow_disk = Cluster(decode=100.0)
    (decoding,) = build_planner(config, 256, slow_disk).predict_modes()
    assert decoding.fastest_step == pytest.approx(16 / 100)


def test_ranks_of_a_group_share_the_decoding_and_gather_its_images():
    tensor = {"mode": "1d", "size": 2}
    config = build_config() | {"parallel": {"tensor": tensor}} | in_micro_batches(256)

    def predict_with(decode: float) -> Prediction:
        planner = build_planner(config, 2, Cluster(decode=decode))
        return planner.predict(config, 256, 16)

    # 4096 images of a step in 16 micro-batches, each decoded by one of the two
    slow = predict_with(decode=100.0)
    assert slow.fastest_step == pytest.approx(4096 / 2 / 100)
    fast = predict_with(decode=1e9).estimate
    in_memory = predict_with(decode=math.inf).estimate
    route = "all_gather", (0, 1)
    gathered = fast.nbytes[route] - in_memory.nbytes[route]
    gathers = fast.calls[route] - in_memory.calls[route]
    assert gathered == 4096 * 3 * 224 * 224
    assert gathers == 16


@pytest.mark.parametrize(
    ("between", "micro_batch", "all_hidden"),
    [
        (50e9, 256, True),
        (1e6, 256, False),
        (1e6, 16, False),
    ],
)
def test_gradients_are_reduced_during_the_last_backward_pass(between, micro_batch, all_hidden):
    """With a measured rate, nothing else is open."""
    cluster = Cluster(inside=400e9, between=between, decode=1e9, images_per_s=1000.0)
    config = build_config(**WHOLE_ONLY) | in_micro_batches(micro_batch)
    (found,) = build_planner(config, 16, cluster).predict_modes()
    assert found.accumulation == 256 // micro_batch
    estimate = found.estimate
    compute = 256 / 1000  # seconds for 256 of 4096 images on each GPU
    update = 7 * estimate.gradients / 2e12
    transfer = 2 * 15 / 16 * estimate.gradients / (8 * between)
    latency = sum(estimate.calls.values()) * 20e-6
    reduction = transfer + latency
    overlap = 2 / 3 * compute / found.accumulation
    assert (reduction < overlap) == all_hidden
    assert found.slowest_step == pytest.approx(compute + update + reduction)
    hidden = found.slowest_step - found.fastest_step
    assert hidden == pytest.approx(min(reduction, overlap))


def test_a_modes_collectives_take_time_and_its_groups_memory():
    """2D on 4 GPUs: 4 linear layers a block; forward, and backward for each of both factors, two
    products of a SUMMA, which send 2 blocks forward, and backward one and a sum.
    """
    config = build_config(depth=12) | in_micro_batches(64)
    cluster = Cluster(decode=1e9, images_per_s=1e9)
    predictions = build_planner(config, 4, cluster).predict_modes()
    found = {prediction.mode: prediction for prediction in predictions}
    square = found["2d 2 x 2"]
    calls = Counter()
    for (kind, _), count in square.estimate.calls.items():
        calls[kind] += count
    products = square.accumulation * 12 * 4
    assert calls["broadcast"] == products * (2 * 2 + 2 * 2)
    assert calls["reduce"] == products * 4
    # A launch of a block is 1 ms, a collective 20 us.
    assert square.slowest_step > square.accumulation * (12e-3 + 576 * 20e-6)
    groups_of_mode = {
        "data parallel": 1,
        "1d 2": 2,
        "2d 2 x 2": 3,
    }
    for mode, groups in groups_of_mode.items():
        buffers = found[mode].memory - found[mode].estimate.peak
        assert buffers == pytest.approx(groups * 0.4e9)


def test_the_micro_batch_is_the_one_that_is_set_or_the_largest_that_fits():
    small_gpu = Cluster(memory=1e9 + 0.4e9 / 0.9)  # with NCCL's buffers
    roomy = predict(8, **WHOLE_ONLY)["data parallel"]
    tight = predict(8, small_gpu, **WHOLE_ONLY)["data parallel"]
    assert roomy.micro_batch == 512
    assert roomy.accumulation == 1
    assert roomy.estimate.peak > 0.9e9
    assert tight.estimate.peak <= 0.9e9
    assert tight.fits
    assert tight.micro_batch * tight.accumulation == 512
    config = build_config(**WHOLE_ONLY)
    doubled = estimate_step(config, 8, 2 * tight.micro_batch, tight.accumulation // 2)
    assert doubled.peak > 0.9e9


@pytest.mark.parametrize(
    "split",
    [
        ["zero.stage=1"],
        ["TENSOR_PARALLEL_SIZE=2", "TENSOR_PARALLEL_MODE=1d"],
    ],
)
def test_a_model_is_refused_for_what_it_needs_at_least(split):
    config = load_config("quickstart", ["MODEL.width=65536", *split])
    plan = build_plan(config, 2, None)
    # 4 blocks of 8 width^2 parameters; with gradients and two moments 16 bytes each, on two GPUs
    message = "e[+]11 parameters take 1,099.7 GB per process, more than the 1.0 GB here"
    with pytest.raises(UserError, match=message):
        check_limits(config, plan, 1e9)


@pytest.mark.parametrize(
    ("settings", "numbers"),
    [
        ([], 4),  # weights, gradients and two moments
        (["FREEZE=body"], 1),
        (["OPTIMIZER.name=muon"], 3),  # matrices have one moment
        (["OPTIMIZER.name=sgd", "OPTIMIZER.momentum=0"], 2),
        (["fp16=dict(mode=AMP_TYPE.APEX, opt_level='O3')"], 2),  # in half precision
    ],
)
def test_the_least_memory_is_that_of_weights_gradients_and_moments(settings, numbers):
    config = load_config("quickstart", ["MODEL.width=65536", *settings])
    parameters = 4 * 8 * 65536**2  # of four blocks
    least = 4 * numbers * parameters
    plan = build_plan(config, 1, None)
    check_limits(config, plan, 1.01 * least)
    with pytest.raises(UserError, match="per process, more than"):
        check_limits(config, plan, 0.99 * least)
