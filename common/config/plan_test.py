import pytest

from common.config.plan import DataSummary, build_plan
from common.errors import UserError
from common.resolutions import Resolution

IMAGENET = DataSummary(
    train_samples=1_281_167, eval_samples=50_000, num_classes=1000, fingerprint=""
)
CONFIG = dict(
    TOTAL_BATCH_SIZE=32768,
    MICRO_BATCH_SIZE=None,
    BATCH_SIZE=None,
    gradient_accumulation=None,
    NUM_EPOCHS=300,
    WARMUP_EPOCHS=150,
    COOLDOWN_EPOCHS=0,
    LR_SCHEDULE="cosine",
    DECAY=0.2,
    MAX_STEPS=None,
    IMAGE_SIZES=[],
    BATCH_SIZES=[],
    SMALLEST_BATCH=None,
    MODEL=dict(image_size=224),
    DATA=dict(repeats=64),
    parallel=dict(tensor=dict(size=1, mode=None)),
)
FOUR = dict(tensor=dict(size=4, mode="2d"))


@pytest.mark.parametrize(
    ("keys", "world_size", "expected"),
    [
        (
            dict(MICRO_BATCH_SIZE=256, MAX_STEPS=10**6),
            128,
            dict(accumulation=1, warmup_steps=5850, last_step=11700, steps_per_epoch=39),
        ),
        (
            dict(gradient_accumulation=16, BATCH_SIZE=2048),
            8,
            dict(micro_batch=256, data_parallel=8),
        ),
        (
            dict(TOTAL_BATCH_SIZE=None, MICRO_BATCH_SIZE=128, gradient_accumulation=2),
            4,
            dict(total_batch=1024),
        ),
        (
            dict(TOTAL_BATCH_SIZE=None, MICRO_BATCH_SIZE=512, parallel=FOUR),
            8,
            dict(total_batch=1024),
        ),
        (
            dict(MICRO_BATCH_SIZE=256, IMAGE_SIZES=[(9, 128, 512), (1, 160), (1, 192, 10**6)]),
            8,
            dict(
                resolutions=[
                    Resolution(9, 128, 512, 8, 32768, 39),
                    Resolution(10, 160, 256, 16, 32768, 39),
                    Resolution(11, 192, 4096, 1, 32768, 39),
                    Resolution(300, 224, 256, 16, 32768, 39),
                ]
            ),
        ),
        (
            # 312, 156 and 39 steps an epoch; the micro-batches of a process's 512 are smaller
            dict(MICRO_BATCH_SIZE=1024, BATCH_SIZES=[(2, 4096), (3, 8192)], IMAGE_SIZES=[(4, 128)]),
            8,
            dict(
                resolutions=[
                    Resolution(2, 128, 512, 1, 4096, 312),
                    Resolution(4, 128, 1024, 1, 8192, 156),
                    Resolution(5, 224, 1024, 1, 8192, 156),
                    Resolution(300, 224, 1024, 4, 32768, 39),
                ],
                total_steps=300 * 312,  # of the smallest batch
                warmup_steps=150 * 312,
                last_step=2 * 312 + 3 * 156 + 295 * 39,
            ),
        ),
        (dict(parallel=FOUR, gradient_accumulation=16), 8, dict(micro_batch=1024, data_parallel=2)),
        (
            dict(NUM_EPOCHS=1, WARMUP_EPOCHS=0.99, COOLDOWN_EPOCHS=0.04),
            8,
            dict(warmup_steps=36, cooldown_steps=2),
        ),
        (
            dict(TOTAL_BATCH_SIZE=10**6, NUM_EPOCHS=3, COOLDOWN_EPOCHS=2.6),
            1,
            dict(cooldown_steps=2, warmup_steps=0),
        ),
        *(
            (dict(LR_SCHEDULE="wsd", DECAY=decay), 8, dict(decay_steps=steps, decay_start=start))
            for decay, steps, start in ((0.1, 1170, 10530), (2, 78, 11622), (1e-9, 1, 11699))
        ),
        (
            dict(NUM_EPOCHS=2, WARMUP_EPOCHS=1, COOLDOWN_EPOCHS=0.5)
            | dict(LR_SCHEDULE="wsd_sqrt", DECAY=0.25),
            8,
            # 78 steps: 39 of warm-up, 20 to the floor, 20 there: one too many is the warm-up's
            dict(warmup_steps=38, decay_steps=20, cooldown_steps=20, decay_start=38),
        ),
        (
            dict(MAX_STEPS=7, WARMUP_EPOCHS=0.4),
            8,
            dict(last_step=7, total_steps=11700, warmup_steps=16),
        ),
    ],
)
def test_a_batch_is_cut_for_the_number_of_gpus(keys, world_size, expected):
    plan = build_plan(CONFIG | keys, world_size, IMAGENET)
    assert {name: getattr(plan, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("keys", "world_size", "words"),
    [
        (
            dict(TOTAL_BATCH_SIZE=100, gradient_accumulation=3),
            2,
            "by 6 .* 2 .* processes.: set it to 96 or 102, or",
        ),
        (
            dict(TOTAL_BATCH_SIZE=1000, MICRO_BATCH_SIZE=256),
            3,
            "by 768 .* set it to 768 or 1536, or",
        ),
        (
            dict(MICRO_BATCH_SIZE=256, gradient_accumulation=16),
            4,
            "is 16384, not TOTAL_BATCH_SIZE=32768",
        ),
        (dict(BATCH_SIZE=256, gradient_accumulation=16), 8, "BATCH_SIZE=256 is not .* = 2048"),
        *(
            (
                dict(MICRO_BATCH_SIZE=256, IMAGE_SIZES=[(9, 128, micro_batch)]),
                8,
                f"of {micro_batch} images at 128 pixels: choose one of .256, 512, 1024,",
            )
            for micro_batch in (128, 1000)
        ),
        (dict(parallel=FOUR), 6, "size=4 does not divide .* 6: start 4 or 8"),
        (dict(TOTAL_BATCH_SIZE=32), 1, "DATA.repeats=64 is more than TOTAL_BATCH_SIZE=32: lower"),
        (
            dict(BATCH_SIZES=[(1, 1026)]),
            8,
            "^BATCH_SIZES: a batch of 1026 is not .* by 8 data.*: set it to 1024 or 1032$",
        ),
        (dict(BATCH_SIZES=[(1, 32)]), 8, "=64 is more than BATCH_SIZES: a batch of 32: lower it$"),
        (
            dict(BATCH_SIZES=[(1, 2_000_000)]),
            8,
            "^BATCH_SIZES: a batch of 2000000 is more than the 1281167 training images: set it",
        ),
        (
            dict(BATCH_SIZES="noise", TOTAL_BATCH_SIZE=1536),
            64,
            "^SMALLEST_BATCH=96 is not .*=1536 halved .* by 64 .* of .768, 384, 192.$",
        ),
        (
            dict(BATCH_SIZES="noise"),
            1,
            "^BATCH_SIZES='noise' needs several .* 2048 .* one: add .* MICRO_BATCH_SIZE=1024$",
        ),
        (dict(TOTAL_BATCH_SIZE=2_000_000), 1, "more than the 1281167 training images: set it"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_nearest_that_does(keys, world_size, words):
    with pytest.raises(UserError, match=words):
        build_plan(CONFIG | keys, world_size, IMAGENET)
