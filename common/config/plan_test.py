import pytest

from common.config.plan import DataSummary, build_plan, shrink_micro_batch
from common.errors import UserError

IMAGENET = DataSummary(train_samples=1_281_167, eval_samples=50_000, num_classes=1000, fingerprint="")


def config(**keys):
    defaults = dict(
        TOTAL_BATCH_SIZE=32768,
        MICRO_BATCH_SIZE=None,
        BATCH_SIZE=None,
        gradient_accumulation=None,
        NUM_EPOCHS=300,
        WARMUP_EPOCHS=150,
        MAX_STEPS=None,
        DATA=dict(repeats=3),
        parallel=dict(tensor=dict(size=1, mode=None)),
    )
    return defaults | keys


@pytest.mark.parametrize(("gpus", "accumulation"), [(4, 32), (8, 16), (128, 1)])
def test_micro_batch_derives_accumulation_from_the_number_of_gpus(gpus, accumulation):
    plan = build_plan(config(MICRO_BATCH_SIZE=256), gpus, IMAGENET)
    assert (plan.micro_batch, plan.accumulation) == (256, accumulation)
    assert plan.steps_per_epoch == 1_281_167 // 32768 == 39
    assert (plan.warmup_steps, plan.total_steps, plan.last_step) == (150 * 39, 300 * 39, 300 * 39)


def test_accumulation_derives_the_micro_batch():
    plan = build_plan(config(gradient_accumulation=16, BATCH_SIZE=2048), 8, IMAGENET)
    assert (plan.micro_batch, plan.data_parallel) == (256, 8)


def test_without_a_global_batch_it_grows_with_the_number_of_gpus():
    plan = build_plan(config(TOTAL_BATCH_SIZE=None, MICRO_BATCH_SIZE=128, gradient_accumulation=2), 4, IMAGENET)
    assert (plan.total_batch, plan.micro_batch, plan.accumulation) == (1024, 128, 2)


def test_tensor_parallel_gpus_share_their_samples():
    plan = build_plan(config(parallel=dict(tensor=dict(size=4, mode="2d")), gradient_accumulation=16), 8, IMAGENET)
    assert (plan.micro_batch, plan.data_parallel, plan.tensor_parallel) == (1024, 2, 4)


def test_max_steps_ends_the_run_and_leaves_the_schedule():
    plan = build_plan(config(MAX_STEPS=7), 8, IMAGENET)
    assert (plan.last_step, plan.total_steps) == (7, 11700)


@pytest.mark.parametrize(
    ("keys", "gpus", "words"),
    [
        (
            dict(TOTAL_BATCH_SIZE=100, gradient_accumulation=3),
            2,
            "=3 x 2 data-parallel processes: set it to 96 or 102$",
        ),
        (
            dict(TOTAL_BATCH_SIZE=100, MICRO_BATCH_SIZE=256),
            1,
            "x 1 .* process: set it to 256, or MICRO_BATCH_SIZE=None$",
        ),
        (dict(TOTAL_BATCH_SIZE=33, MICRO_BATCH_SIZE=4), 8, "=4 x 8 .* processes: set it to 32 or 64$"),
        (dict(TOTAL_BATCH_SIZE=33), 8, "not divisible by 8 data-parallel processes: set it to 32 or 40$"),
        (dict(MICRO_BATCH_SIZE=256, gradient_accumulation=16), 4, "is 16384, not TOTAL_BATCH_SIZE=32768"),
        (dict(BATCH_SIZE=256, gradient_accumulation=16), 8, "BATCH_SIZE=256 is not .* = 2048"),
        (dict(parallel=dict(tensor=dict(size=4, mode="2d"))), 6, "size=4 does not divide .* 6: start 4 or 8"),
        (dict(WARMUP_EPOCHS=299.999), 8, "WARMUP_EPOCHS=299.999 makes 11700 of 11700 steps the warm-up"),
        (dict(TOTAL_BATCH_SIZE=2), 1, "DATA.repeats=3 is more than TOTAL_BATCH_SIZE=2, "),
        (
            dict(TOTAL_BATCH_SIZE=2_000_000),
            1,
            "more than the 1281167 training images, so an epoch has no step",
        ),
    ],
)
def test_what_does_not_divide_is_refused_with_the_nearest_that_does(keys, gpus, words):
    with pytest.raises(UserError, match=words):
        build_plan(config(**keys), gpus, IMAGENET)


def test_a_micro_batch_shrinks_to_what_a_process_has_of_the_global_batch():
    config = dict(TOTAL_BATCH_SIZE=1024, MICRO_BATCH_SIZE=256, parallel=dict(tensor=dict(size=2)))
    assert [shrink_micro_batch(config, gpus)["MICRO_BATCH_SIZE"] for gpus in (2, 8, 16, 4096)] == [
        *(256, 256, 128, None)
    ]
    assert shrink_micro_batch(config | dict(MICRO_BATCH_SIZE=None), 16)["MICRO_BATCH_SIZE"] is None
