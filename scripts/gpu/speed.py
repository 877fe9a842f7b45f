"""Pieces: training speed and memory."""

import statistics
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from bench import step

from caltech101_amp.compare import CONFIGS, compare, summarise
from caltech101_amp.dataset import CATEGORIES, IMAGES
from common.config.load import load_config
from common.errors import UserError
from common.model.flops import peak_images_per_s
from common.testing.photographs import write_photographs
from common.tools.harness import Row, in_processes
from gpu.job import MODES, PRECISIONS, ROUNDS, TINY, VIT_B16, VIT_S16, Job, open_engine, train_step

BATCH = 256  # per GPU, as in configs/vit-b16.py
ENOUGH = 45  # seconds for one more row
WARM_UP_ROUNDS, STEPS = 4, 20  # the warm-up is more than 5 s of steps, since none is faster than 60 ms
FIRST_STEPS = 10  # after which the loss is recorded
TOLERANCE = 0.05  # of a loss and a gradient's norm, in bfloat16
VIT_LITE = load_config("vit_lite_vanilla")["MODEL"] | {"dropout": 0.0}
EAGER, COMPILED = ("COMPILE=False",), ("COMPILE=True",)
LOOPS = {  # settings of the recipe, training loop of scripts/bench/step.py, library
    "bare PyTorch": ((), step.bare, "torch"),
    "ours": (EAGER, step.ours, "torch"),
    "ours, compiled": (COMPILED, step.ours, "torch"),
    "timm's train.py": ((), step.timm, "timm"),
    "timm's train.py, compiled": ((), partial(step.timm, compiled=True), "timm"),
    "timm's loop, our model": ((), partial(step.timm, own_model=False), "timm"),
    "Lightning, our model": ((), step.lightning, "lightning"),
    "accelerate, our model": ((), step.accelerate, "accelerate"),
}
CASES = [  # model, batch per GPU, precision, compiled, accumulation
    *((VIT_B16, BATCH, precision, False, 1) for precision in ("bf16", "fp16", "tf32", "fp32")),
    (VIT_B16, BATCH, "bf16", True, 1),
    (VIT_B16, BATCH, "bf16", "model", 1),
    (VIT_B16, BATCH, "bf16", False, 16),
    (VIT_B16, BATCH, "bf16", True, 16),
    (VIT_S16, BATCH, "bf16", False, 1),
    (VIT_S16, BATCH, "bf16", True, 1),
]
CALTECH_SIZE = 300, 200  # pixels, about
TINY_CALTECH = ("MODEL.image_size=16", "MODEL.patch_size=8", "MODEL.width=32", "MODEL.depth=1", "MODEL.heads=2",
                "MICRO_BATCH_SIZE=8", "DATA.workers=0")  # fmt: skip


def training_loops(job: Job) -> Iterator[Row]:
    """Train ViT-B/16 at batch 256 in bfloat16, eager and compiled, in our loop, timm's train.py and Lightning's."""
    model, batch, steps, warm_up = (TINY, 4, 1, 1) if job.tiny else (VIT_B16, BATCH, STEPS, WARM_UP_ROUNDS)
    shape = [f"MODEL.{key}={value}" for key, value in model.items()] + [
        "MODEL.dropout=0.0",
        f"TOTAL_BATCH_SIZE={batch}",
    ]
    names = ["ours", "timm's train.py"] if job.tiny else list(LOOPS)
    rounds = warm_up + ROUNDS
    for name in names:
        settings, loop, library = LOOPS[name]
        row = {"loop": name, "batch": batch}
        if not find_spec(library):
            yield row | {"not_run": f"needs {library}"}
        elif job.seconds_left < 2 * ENOUGH and not job.tiny:
            yield row | {"not_run": "no time was left"}
        else:
            yield row | _run_loop(job, name, model, loop, step.Job((*shape, *settings), steps, rounds), warm_up)


def _run_loop(job: Job, name: str, model: Mapping[str, Any], loop: step.Loop, work: step.Job, warm_up: int) -> Row:
    try:
        with in_processes({name: partial(step.run_quietly, loop, work)}) as variants:
            measured = [variants[name]() for _ in range(work.rounds)]
    except UserError as error:
        return {"not_run": str(error)}
    images = work.steps * work.config["TOTAL_BATCH_SIZE"]
    row = {"first_round_s": measured[0]["wall"]}
    row |= {"memory_gb": measured[-1]["memory_gb"]} if job.on_gpu else {}
    precision = PRECISIONS["bf16" if work.precision == "bfloat16" else "fp32"]
    return _rates(job, model, precision, [images / one["wall"] for one in measured[warm_up:]]) | row


def _rates(job: Job, model: Mapping[str, Any], config: Mapping[str, Any], rates: list[float]) -> Row:
    slow, middle, fast = statistics.quantiles(rates, n=4)
    mfu = middle / peak_images_per_s(model, config.get("fp16"), 1, job.device)
    return {"images_per_s": middle, "quartiles": [slow, fast], "mfu": mfu, "n": len(rates)}


def throughput(job: Job) -> Iterator[Row]:
    """Train ViT-B/16 and ViT-S/16 at batch 256: precisions, compiled blocks, with and without accumulation."""
    tiny = "bf16" if job.has_bfloat16 else "fp32"
    for model, batch, precision, compiled, accumulation in (
        [(TINY, 4, tiny, compiled, 2) for compiled in (False, True)] if job.tiny else CASES
    ):
        names = {"width": model["width"], "precision": precision, "compiled": compiled}
        names |= {"batch": batch, "accumulation": accumulation}
        yield names | _measure(job, model, {**PRECISIONS[precision], "COMPILE": compiled}, batch, accumulation)


def small_model(job: Job) -> Iterator[Row]:
    """Train ViT-Lite-7/4, bound by kernel launches: eager, compiled blocks, compiled whole, and with CUDA graphs.

    Fails if the loss or the gradient's norm of the tenth step, two micro-batches each, differs from the eager one's.
    """
    model, batches, precision = VIT_LITE, (128, 512), "bf16"
    if job.tiny:
        model, batches, precision = TINY, (4,), "fp32"
    for batch in batches:
        rows = [
            {"batch": batch, "compile": str(how)}
            | _measure(job, model, {**PRECISIONS[precision], "COMPILE": how}, batch, accumulation=2)
            for how in (False, "graphs", True, "model")[: 2 if job.tiny else 4]
        ]
        for row in rows:
            known = {"loss", "grad_norm"} & row.keys() & rows[0].keys()
            differences = [abs(row[name] / rows[0][name] - 1) for name in known]
            if max(differences, default=0) > TOLERANCE:
                row["wrong"] = f"{row['compile']} at batch {batch}: more than {TOLERANCE:.0%} from eager training"
            yield row


def amp_imagenet(job: Job) -> Iterator[Row]:
    """Train ViT-B/16 at batch 128 on images of ImageNet's shape, in every mode of mixed precision."""
    model, batch = (TINY, 4) if job.tiny else (VIT_B16, 128)
    for mode, config in list(MODES.items())[:: 3 if job.tiny else 1]:
        yield {"mode": mode} | _measure(job, model, config, batch)


def _measure(job: Job, model: Mapping[str, Any], config: Mapping[str, Any], batch: int, accumulation: int = 1) -> Row:
    """Measure training steps, if there is time and memory for them."""
    if job.seconds_left < ENOUGH:
        return {"not_run": "no time was left"}
    try:
        with open_engine(model, {**config, "gradient_accumulation": accumulation}) as engine:
            if job.on_gpu:
                torch.cuda.reset_peak_memory_stats()
            samples = job.random_batch(model, batch)
            for _ in range(FIRST_STEPS):
                loss = train_step(engine, samples)
            first = {"loss": loss.item(), "grad_norm": engine.optimizer.grad_norm.item()}
            seconds = job.time(lambda: train_step(engine, samples))
    except torch.OutOfMemoryError as error:
        return {"not_run": str(error).splitlines()[0]}
    rates = [batch * accumulation / value for value in seconds]
    return _rates(job, model, config, rates) | first | {"step_ms": 1e3 * statistics.median(seconds)} | job.peak_memory()


def amp_caltech101(job: Job) -> Iterator[Row]:
    """Train ViT-B/16 at batch 128 in every mode of mixed precision, images decoded from files as in training."""
    data, images = job.data.get("caltech"), "Caltech-101"
    if data is None or job.tiny:
        names = ["accordion", *(f"category {number}" for number in range(1, CATEGORIES))]
        size, count = (20, 16) if job.tiny else CALTECH_SIZE, -(-IMAGES // CATEGORIES) * CATEGORIES
        data, images = write_photographs(job.new_folder("images"), names, count, *size), f"generated, {size}"
    settings = [*(TINY_CALTECH if job.tiny else ()), f"DATA.root={data}"]
    steps, rounds, configs = (1, 1, dict(list(CONFIGS.items())[:2])) if job.tiny else (20, 3, CONFIGS)
    measured = compare(settings, job.new_folder("runs"), steps, rounds, configs)
    for mode in measured:
        yield {"images": images} | summarise(mode, measured) | {"steps": steps, "rounds": rounds}
