import functools

import pytest

from common.colossal import resolve_parallel
from common.config.load import load_config
from common.config.plan import build_plan
from common.planner.cluster import LATENCY, Cluster
from common.planner.scaling import (
    ASSUMED_MFU,
    BEST_MFU,
    LAUNCH,
    MEMORY_BANDWIDTH,
    assumed_flops,
    predict_modes,
    whole_model_flops,
)
from common.planner.step_estimate import estimate_step

CLUSTER = Cluster(memory=80e9, node=8, inside=400e9, between=50e9, decode=1e9)
RATE = 1e14
WHOLE_ONLY = {"heads": 1}  # an odd number that no mode can cut


def build_config(**model: object) -> dict:
    config = load_config("vit_s16_vanilla") | {"BATCH_SIZE": None}
    return config | {"MODEL": config["MODEL"] | {"depth": 2} | model}


@functools.cache
def predict(gpus: int, cluster: Cluster = CLUSTER, **model: object) -> dict:
    config = build_config(**model)
    plan = build_plan(config, gpus, None)
    return {prediction.mode: prediction for prediction in predict_modes(config, plan, cluster, RATE)}


def test_every_mode_that_the_model_and_the_gpus_allow_is_there():
    assert set(predict(8)) == {"data parallel", "1d 2", "2d 2 x 2", "2.5d 2 x 2 x 2", "3d 2 x 2 x 2"}
    assert set(predict(8, **WHOLE_ONLY)) == {"data parallel"}
    config = build_config() | {"COMPILE": True}  # which tensor parallelism refuses
    plan = build_plan(config, 8, None)
    assert [prediction.mode for prediction in predict_modes(config, plan, CLUSTER, RATE)] == ["data parallel"]


def test_the_mode_of_the_config_is_there():
    parallel = resolve_parallel({"tensor": {"mode": "2.5d", "size": 4, "depth": 1}}, 4)
    config = build_config(heads=2) | {"parallel": parallel}
    found = predict_modes(config, build_plan(config, 4, None), CLUSTER, RATE)
    assert [prediction.mode for prediction in found] == ["data parallel", "1d 2", "2d 2 x 2", "2.5d 2 x 2 x 1"]


def test_the_assumed_speed_is_that_of_the_precision():
    tf32, half, full = (
        assumed_flops(load_config("vit_s16_vanilla", settings))
        for settings in (["fp16=dict(mode=AMP_TYPE.APEX, opt_level='O0')"], [], ["fp16=None", "TF32=False"])
    )
    assert (half / tf32, tf32 / full) == (pytest.approx(2), pytest.approx(494.7 / 66.9))


def test_one_gpu_needs_its_arithmetic_and_nothing_else():
    (alone,) = predict(1).values()
    compute = 4096 * whole_model_flops(build_config()) / RATE
    update = 7 * alone.estimate.gradients / MEMORY_BANDWIDTH  # AdamW
    assert alone.step == pytest.approx(compute + update)
    assert alone.fastest_step == pytest.approx(compute * ASSUMED_MFU / BEST_MFU + update)


def test_small_micro_batches_and_slow_decoding_bound_the_step():
    small = predict(2048, **WHOLE_ONLY)["data parallel"]
    assert small.estimate.flops / RATE < 2 * LAUNCH * small.accumulation < small.fastest_step < small.step
    decoding = predict(1, Cluster(decode=100.0), **WHOLE_ONLY)["data parallel"]
    assert decoding.step == decoding.fastest_step == pytest.approx(4096 / 100)


@pytest.mark.parametrize(("between", "all_hidden"), [(50e9, True), (1e6, False)])
def test_gradients_are_reduced_during_the_last_backward_pass(between, all_hidden):
    """With a measured rate, nothing else is open."""
    cluster = Cluster(inside=400e9, between=between, decode=1e9, images_per_s=1000.0)
    found = predict(16, cluster, **WHOLE_ONLY)["data parallel"]
    estimate, compute = found.estimate, found.estimate.flops / RATE
    reduction = 2 * 15 / 16 * estimate.gradients / (8 * between) + sum(estimate.calls.values()) * LATENCY
    overlap = 2 / 3 * compute / found.accumulation
    assert (reduction < overlap) == all_hidden
    assert found.step == pytest.approx(compute + 7 * estimate.gradients / MEMORY_BANDWIDTH + reduction)
    assert found.step - found.fastest_step == pytest.approx(min(reduction, overlap))


def test_the_micro_batch_shrinks_until_it_fits():
    roomy, tight = (predict(8, cluster, **WHOLE_ONLY)["data parallel"] for cluster in (CLUSTER, Cluster(memory=1e9)))
    assert (roomy.micro_batch, roomy.accumulation) == (256, 2)
    assert roomy.estimate.peak > 0.9e9 >= tight.estimate.peak
    assert tight.fits
    assert tight.micro_batch * tight.accumulation == 512
    twice = estimate_step(build_config(**WHOLE_ONLY), 8, 2 * tight.micro_batch, tight.accumulation // 2)
    assert twice.peak > 0.9e9
    assert not predict(8, Cluster(memory=1e6), **WHOLE_ONLY)["data parallel"].fits


def test_zero_is_predicted_where_data_parallelism_does_not_fit():
    config = build_config(**WHOLE_ONLY) | {"TOTAL_BATCH_SIZE": 8, "gradient_accumulation": 1}
    plan = build_plan(config, 8, None)
    found = {memory: predict_modes(config, plan, Cluster(memory=memory), RATE) for memory in (80e6, 120e6)}
    assert {p.mode: p.fits for p in found[80e6]} == {"data parallel": False, "zero 1": True, "zero 3": True}
    assert [p.mode for p in found[120e6]] == ["data parallel"]
    assert found[80e6][2].estimate == estimate_step(config | {"zero": {"stage": 3}}, 8, 1)


def test_a_prediction_is_the_estimate_of_its_mode():
    cut, parallel = predict(8)["1d 2"], resolve_parallel({"tensor": {"mode": "1d", "size": 2}}, 8)
    assert cut.estimate == estimate_step(build_config() | {"parallel": parallel}, 8, cut.micro_batch, cut.accumulation)
    assert cut.data_parallel * cut.micro_batch * cut.accumulation == 4096
