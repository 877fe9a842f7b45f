"""What one GPU shows in a quarter of an hour: is it right, then how fast is it.

    python scripts/gpu.py a            # tests, in parallel; then training steps, ceilings, LAMB
    python scripts/gpu.py b            # DALI, training from JPEGs, training steps of ViT-S/16
    python scripts/gpu.py              # both, about 13 minutes
    python scripts/gpu.py c            # CIFAR-10: what a step waits for, training to the end
    python scripts/gpu.py d            # JPEGs: what limits the pipeline; matrix products
    python scripts/gpu.py piece lamb   # one piece, in this process, for as long as it takes

A piece is one question: tests of scripts/gpu_test.py chosen by name, or a function of this file.
Each runs in a process of its own with a time limit, so that one that hangs or crashes costs no
other its answer. The tests run at once, since they mostly wait for the host (starting, compiling),
and a wrong number must be known before a fast one counts. What measures speed runs alone, the most
valuable first. `--seconds` ends a call early: pieces for which no time is left are named.

In $OUT (default: outputs/gpu), rows.jsonl gets a row as soon as it is measured, with the command,
commit, versions and hardware; logs.txt all that the pieces print. The table of the rows is printed
last.

Nothing has to be installed but the packages of requirements-gpu-test.txt, torch, torchvision and
timm: the pieces find the project beside this file. Without DALI its pieces end with an error, or
are skipped. CIFAR10 names a folder of CIFAR-10's images in train/<class> and test/<class>; unset,
the data set is downloaded. GPU_WORK is a folder for data and runs
(default: /tmp/gpu). TINY=1 makes everything small: it tries this script on a CPU, where the tests
fail at once.
"""

import argparse
import gc
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count, cycle, islice
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import psutil

# The driver imports neither torch nor the project: what is wrong there ends a piece, not all. The
# pieces import them in their functions.
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
OUT = Path(os.environ.get("OUT") or ROOT / "outputs" / "gpu").resolve()
ROWS = OUT / "rows.jsonl"
WORK = Path(os.environ.get("GPU_WORK") or "/tmp/gpu")
TINY = bool(os.environ.get("TINY"))
PYTEST = ["-m", "pytest", "-W", "default", "-m", "gpu", "--tb=short", "scripts/gpu_test.py"]
# Fields of a record of metrics.jsonl that a row takes.
FIGURES = (
    "step",
    "epoch",
    "loss",
    "top1",
    "samples_per_s",
    "data_wait",
    "forward_s",
    "backward_s",
    "peak_memory_gb",
)
LEAST = 20.0  # seconds in which a piece can still answer

VIT_S16: dict[str, Any] = dict(
    image_size=224, patch_size=16, width=384, depth=12, heads=6, mlp_ratio=4.0, num_classes=1000
)
VIT_B16 = VIT_S16 | dict(width=768, heads=12)
SMALL = dict(image_size=32, patch_size=8, width=64, depth=2, heads=1, num_classes=10)
MODELS: dict[str, dict[str, Any]] = {"lite": {}, "s16": VIT_S16, "b16": VIT_B16}
BATCH = 256
if TINY:
    MODELS = dict.fromkeys(MODELS, SMALL)
    BATCH = 8


def write_row(**values: Any) -> None:
    """Add a row to the file at once, with where it is from, and print it."""
    print(json.dumps(values), flush=True)
    OUT.mkdir(parents=True, exist_ok=True)
    # Written before the next is measured: that may crash the machine.
    with ROWS.open("a") as file:
        file.write(json.dumps(values | {"run": _describe()}) + "\n")
        file.flush()
        os.fsync(file.fileno())


@cache
def _describe() -> dict[str, Any]:
    from common.provenance import describe_run

    return describe_run(sys.argv[1:])


# --- the pieces


def speed(model: str) -> None:
    """Time a training step in bfloat16 on images in memory: ours with all its hooks, and others'.

    Blocks are compiled and there is no dropout, but where it is named. ``model`` is a key of
    `MODELS`.
    """
    import testing as timed_steps

    measure = partial(measure_step, model)
    measure("ours", timed_steps.ours)
    measure("bare PyTorch", timed_steps.bare)
    measure("timm", timed_steps.timm)
    measure("ours, compiled as a whole", timed_steps.ours, "model")
    measure("ours, the recipe's dropout", timed_steps.ours, True, "MODEL.dropout=0.1")
    measure("ours, again", timed_steps.ours)  # how far a rate drifts within the piece
    measure("ours, not compiled", timed_steps.ours, False)
    measure("ours, max-autotune", timed_steps.ours, "max-autotune")


def measure_step(
    model: str, name: str, train: Callable[[Any], None], how: bool | str = True, *more: str
) -> None:
    """Write a row of a variant's step; ``how`` is COMPILE, ``more`` are settings."""
    import testing as timed_steps
    import torch

    from common.engine.groups import shutdown
    from common.engine.upstream import AMP_TYPE
    from common.launch.signals import stop_signals
    from common.model.flops import peak_images_per_s

    settings = [f"MODEL.{key}={value}" for key, value in MODELS[model].items()]
    settings += ["MODEL.dropout=0.0", f"TOTAL_BATCH_SIZE={BATCH}"]
    # The warm-up takes in compilation.
    steps, warm_up = (2, 1) if TINY else (30, 12)
    work = timed_steps.Work((*settings, *more), steps, warm_up, how)
    # Free what the variant before has left: graphs that hold tensors, and compiled code.
    gc.collect()
    torch.compiler.reset()
    if timed_steps.DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        train(work)
    except Exception as error:  # The next variant may run.
        write_row(piece=f"speed-{model}", variant=name, error=f"{error!r:.300}")
        return
    finally:
        stop_signals.restore()
        shutdown()
    batch = work.config["TOTAL_BATCH_SIZE"]
    images_per_s = batch / work.seconds
    bfloat16 = {"mode": AMP_TYPE.TORCH, "dtype": "bfloat16"}
    peak = peak_images_per_s(work.config["MODEL"], bfloat16, 1, torch.device(timed_steps.DEVICE))
    figures = {"ms": 1e3 * work.seconds, "images_per_s": images_per_s, "mfu": images_per_s / peak}
    if timed_steps.DEVICE == "cuda":
        figures["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    write_row(piece=f"speed-{model}", variant=name, batch=batch, **figures)


def seconds_of(call: Callable[[], object]) -> float:
    """Return the seconds of a call, the mean of several after the first."""
    import testing as timed_steps

    work = timed_steps.Work((), 2 if TINY else 30, 1 if TINY else 5)
    for _ in work:
        call()
    return work.seconds


def graphs(is_used: bool) -> list[str]:
    """Return the setting of CUDA graphs, if this version has them: some recipes use them."""
    from common.config.schema import known_keys

    return [f"GRAPHS={is_used}"] if "GRAPHS" in known_keys() else []


def lite() -> None:
    """Time what a step of ViT-Lite-7/4 at batch 512 consists of: on images in memory, and these."""
    import numpy as np
    import testing as timed_steps
    import torch

    from cifar10_benchmark.dataset import Images
    from cifar10_benchmark.task import UNIFORMS_PER_SAMPLE, Augment, MemoryReader
    from common.config.load import load_config
    from common.data.sampler import TrainSampler

    batch = BATCH if TINY else 512

    def measure(name: str, train: Callable[[Any], None], *more: str, how: bool = True) -> None:
        measure_step("lite", name, train, how, f"TOTAL_BATCH_SIZE={batch}", *more)

    eager = graphs(False)
    measure("ours", timed_steps.ours, *eager)
    measure("bare PyTorch", timed_steps.bare, *eager)
    measure("ours, the recipe's dropout", timed_steps.ours, "MODEL.dropout=0.1", *eager)
    measure("ours, not compiled", timed_steps.ours, *eager, how=False)
    if eager:
        measure("ours, graphs", timed_steps.ours, *graphs(True))
    images = np.zeros((50_000, 3, 32, 32), np.uint8)
    split = Images(images, np.zeros(len(images), np.int64))
    sampler = TrainSampler(len(images), batch, batch, seed=0, num_uniforms=UNIFORMS_PER_SAMPLE)
    data = load_config("vit_lite_vanilla")["DATA"]
    for policy in ("cifar10", None):
        augment = Augment(data["crop_padding"], data["flip"], policy)
        reader = MemoryReader(split, augment, data, torch.device(timed_steps.DEVICE))
        batches = reader.read(sampler.draws(0))
        seconds = seconds_of(partial(next, batches))
        write_row(piece="lite", variant=f"batches, autoaugment={policy}", ms=1e3 * seconds)


def dropout() -> None:
    """Time a step of ViT-S/16 with dropout, also by other random numbers of the compiler's."""
    import testing as timed_steps
    from torch._inductor import config as inductor

    measure = partial(measure_step, "s16")
    measure("ours, no dropout", timed_steps.ours)
    measure("ours, dropout", timed_steps.ours, True, "MODEL.dropout=0.1")
    with inductor.patch(fallback_random=True):  # eager's kernel
        measure("ours, dropout, eager's", timed_steps.ours, True, "MODEL.dropout=0.1")
    measure("ours, no dropout, again", timed_steps.ours)
    measure("bare PyTorch, again", timed_steps.bare)


def ceilings() -> None:
    """Time what bounds a step: copies, ViT-B/16's matrix products, attention by backend."""
    import testing as timed_steps
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    make = partial(torch.randn, device=timed_steps.DEVICE)
    # 1.1 GB of float32, far more than a GPU's cache holds.
    source = make(1 << (16 if TINY else 28))
    target = torch.empty_like(source)
    seconds = seconds_of(lambda: target.copy_(source))
    # Each byte is read and written.
    write_row(piece="ceilings", what="copy", tb_per_s=2 * source.nbytes / seconds / 1e12)
    rows = 64 if TINY else 256 * 197  # tokens of a batch
    # qkv, projection, fc1 and fc2 of ViT-B/16; then fc1's weight gradient, fc1 of ViT-S, and a
    # square that shows what the GPU reaches at best.
    shapes = [(rows, 768, 2304), (rows, 768, 768), (rows, 768, 3072), (rows, 3072, 768)]
    shapes += [(3072, rows, 768), (rows, 384, 1536), (8192, 8192, 8192)]
    for m, k, n in shapes[:2] if TINY else shapes:
        left = make(m, k, dtype=torch.bfloat16)
        right = make(k, n, dtype=torch.bfloat16)
        seconds = seconds_of(partial(torch.matmul, left, right))
        name = f"matmul {m} x {k} x {n}"
        write_row(piece="ceilings", what=name, tflops=2 * m * k * n / seconds / 1e12)
    sizes = (2, 5, 1) if TINY else (256, 197, 12)  # images, tokens, heads
    qkv = make(*sizes[:2], 3, sizes[2], 64, dtype=torch.bfloat16, requires_grad=True)

    def attend(backend: SDPBackend) -> None:
        with sdpa_kernel(backend):
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
            attended = scaled_dot_product_attention(q, k, v)
        attended.backward(attended.detach())

    backends = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION")
    for name in backends[:1] if TINY else backends:  # a CPU has the first alone
        seconds = seconds_of(partial(attend, getattr(SDPBackend, name)))
        write_row(piece="ceilings", what=name, forward_and_backward_ms=1e3 * seconds)


def lamb() -> None:
    """Time a step over the parameters of ViT-B/16 in float32, by LAMB and others."""
    import testing as timed_steps
    import torch
    from timm.optim import Lamb as TimmLamb
    from torch.optim import AdamW

    from common.config.load import load_config
    from common.model.build import build_model
    from common.optim.build import build_optimizer

    ours = partial(build_optimizer, weight_decay=0.1)
    settings = ("MODEL.width=64", "MODEL.heads=1", "MODEL.depth=2") if TINY else ()

    def measure(name: str, build: Callable[[Any], Any], recipe: str = "vit-b16") -> None:
        model = build_model(**load_config(recipe, settings)["MODEL"]).to(timed_steps.DEVICE)
        for param in model.parameters():
            param.grad = 1e-3 * torch.randn_like(param)  # of a usual size
        seconds = seconds_of(build(model).step)
        write_row(piece="lamb", variant=name, recipe=recipe, ms=1e3 * seconds)

    measure("ours", partial(ours, name="lamb"))
    measure("ours, bias correction", partial(ours, name="lamb", bias_correction=True))
    measure("timm's LAMB", lambda model: TimmLamb(model.parameters()))
    measure("AdamW, fused", lambda model: AdamW(model.parameters(), fused=True))
    for recipe in ("vit_lite_fast", "vit-b16"):
        measure("Muon", partial(ours, name="muon"), recipe)


def photographs() -> Path:
    """Return a folder of shards of 7,680 JPEGs of 500 x 400 pixels, and 512 of validation."""
    from common.hardware import cores
    from common.shards.prepare import prepare
    from common.testing.photographs import write_photographs

    shards = WORK / "shards"
    if not (shards / "manifest.json").exists():
        # A piece that was ended may have left them.
        for folder in (WORK / "images", shards):
            shutil.rmtree(folder, ignore_errors=True)
        write_photographs(WORK / "images", "abcd", 128 if TINY else 8192, 500, 400)
        # A sixteenth, 512 images, for validation.
        prepare(WORK / "images", shards, cores(), validation_share=0.0625)
    return shards


def train_by_script(name: str, kind: str, script: str, *settings: str) -> None:
    """Train by a script of the project with ``settings``; a row for each record of ``kind``.

    A row is written as soon as its record is: a run that is cut off leaves its rows.
    """
    from common.testing.commands import in_words

    output = WORK / name
    shutil.rmtree(output, ignore_errors=True)
    words = [*script.split(), "--output", str(output), *in_words(*settings)]
    started = time.monotonic()
    with subprocess.Popen([sys.executable, *words], cwd=ROOT) as process:
        seen = 0
        status = None
        while status is None:
            time.sleep(0.5)
            status = process.poll()  # before the lines are read: none is missed after the end
            lines = _lines(output / "metrics.jsonl")
            for record in map(json.loads, lines[seen:]):
                figures = {key: record[key] for key in FIGURES if key in record}
                if record["kind"] == kind:
                    write_row(piece=name, seconds=time.monotonic() - started, **figures)
            seen = len(lines)
    if status:
        write_row(piece=name, status=status)
        sys.exit(status)


def pipeline(kind: str, *more: str, models: tuple[str, ...] = ("s16", "b16")) -> None:
    """Train ViT-S/16, then ViT-B/16, from JPEGs by train_dali.py; ``kind`` is DATA.loader.

    With the recipe's LAMB, Mixup and dropout; ``more`` are settings.
    """
    shards = photographs()
    for name in models:
        steps = 4 if TINY else 60 if name == "s16" else 40
        settings = [f"MODEL.{key}={value}" for key, value in MODELS[name].items()]
        settings += ["MODEL.num_classes=None", f"DATA.root={shards}", f"DATA.loader={kind}"]
        settings += [f"TOTAL_BATCH_SIZE={BATCH}", f"MICRO_BATCH_SIZE={BATCH}", "NUM_EPOCHS=100"]
        settings += ["WARMUP_EPOCHS=1", f"MAX_STEPS={steps}", f"LOG.every={steps // 4}"]
        script = "imagenet_dali/train_dali.py --config vit-b16"
        piece = " ".join([f"pipeline-{kind}-{name}", *more])
        train_by_script(piece, "train", script, *settings, *more)


def workers() -> None:
    """Train ViT-S/16 from JPEGs with several numbers of DALI's threads, then with the default."""
    for setting in ("16", "12", "8", "None"):
        pipeline("dali", f"DATA.workers={setting}", models=("s16",))


def open_reader(apart: bool, feeds: bool = False) -> Any:
    """Return DALI's reader of the photographs, in an endless pass; a process reads if ``apart``.

    With ``feeds`` DALI takes the records and decodes none.
    """
    import testing as timed_steps
    import torch
    from nvidia.dali import fn, pipeline_def

    from common.config.load import load_config
    from imagenet_dali import imagenet_dali_dataloader, task

    data = load_config("vit-b16")["DATA"] | {"root": str(photographs())}
    device = torch.device("cuda", 0) if timed_steps.DEVICE == "cuda" else torch.device("cpu")
    options: dict[str, Any] = dict(image_size=224, device=device, seed=0)
    with mock.patch.object(imagenet_dali_dataloader, "reads_apart", return_value=apart):
        loader = task.build_train_loader(data, BATCH, BATCH, **options)
    reader: Any = loader.reader
    draws = (draw for epoch in count() for draw in loader.sampler.draws(epoch))
    reader._raw_batches = reader._read_raw(draws)
    if feeds:

        @pipeline_def
        def feed() -> Any:
            jpegs, windows = fn.external_source(reader._next_inputs, num_outputs=2, no_copy=True)
            return jpegs.shape(), windows

        reader._pipeline = feed(batch_size=BATCH, num_threads=1, device_id=device.index)
    return reader


def rates() -> None:
    """Time DALI's decoding alone: by windows or whole images, share of the engines, threads."""
    import testing as timed_steps
    import torch

    from imagenet_dali.imagenet_dali_dataloader import decode_and_resize

    reader = open_reader(apart=False)
    # Records in memory, which no file system delays.
    inputs = [(raw.jpegs, raw.windows) for raw in islice(reader._raw_batches, 2 if TINY else 12)]
    reader.close()
    on_gpu = timed_steps.DEVICE == "cuda"
    kinds = [(whole, load, 16) for whole in (False, True) for load in (0.0, 0.65, 1.0)]
    kinds += [(False, 0.65, 12), (False, 0.65, 8)]
    stream = torch.cuda.current_stream() if on_gpu else None
    device = "mixed" if on_gpu else "cpu"
    for whole, load, threads in kinds[::3] if TINY else kinds:
        options = dict(batch_size=BATCH, num_threads=threads, device_id=0 if on_gpu else None)
        source: Any = cycle(inputs)
        decoder: Any = decode_and_resize(source, "bilinear", device, whole, load, **options)
        seconds = seconds_of(partial(decoder.run, stream))
        variant = dict(whole=whole, load=load, threads=threads)
        write_row(piece="dali-rates", **variant, images_per_s=BATCH / seconds)


def feed() -> None:
    """Time reading, and handing the records to DALI: CPU time of the trainer's process, too."""
    calls = 2 if TINY else 30
    for apart in (False, True):
        reader = open_reader(apart, feeds=True)
        for _ in range(3):
            reader._run()
        started = time.perf_counter()
        cpu = time.process_time()
        for _ in range(calls):
            reader._run()
        cpu_ms = 1e3 * (time.process_time() - cpu) / calls
        rate = BATCH * calls / (time.perf_counter() - started)
        write_row(piece="dali-feed", apart=apart, images_per_s=rate, cpu_ms=cpu_ms)
        reader.close()


@dataclass
class Load:
    """Reading and feeding ten batches a second, while ``is_on``."""

    is_on: Any  # an Event, of threads or processes
    fed: Any  # a Value, the batches so far
    switch_interval: float = 5e-3  # Python's default

    @contextmanager
    def running(self) -> Iterator[None]:
        sys.setswitchinterval(self.switch_interval)
        self.is_on.set()
        yield
        self.is_on.clear()
        time.sleep(0.2)  # for the last batch

    def run(self, apart: bool, begun: Any) -> None:
        reader = open_reader(apart, feeds=True)
        reader._run()
        begun.set()
        while True:
            self.is_on.wait()
            started = time.perf_counter()
            reader._run()
            self.fed.value += 1
            time.sleep(max(0.0, started + 0.1 - time.perf_counter()))


def start_loads() -> dict[str, Load]:
    """Return loads: none, in threads, for one of which a process reads, and in a process."""
    photographs()
    context = multiprocessing.get_context("spawn")
    kinds: dict[str, Any] = {
        "a thread": threading.Thread,
        "a thread and the reader's process": threading.Thread,
        "a process": context.Process,
    }
    loads = {"nothing": Load(context.Event(), context.Value("i", 0))}
    for name, start in kinds.items():
        loads[name] = load = Load(context.Event(), context.Value("i", 0))
        begun = context.Event()
        start(target=load.run, args=("reader" in name, begun), daemon=True).start()
        begun.wait()
    loads["a thread, switch interval 0.5 ms"] = replace(loads["a thread"], switch_interval=5e-4)
    return loads


def lock() -> None:
    """Time 700 small operations beside reading and feeding, in interleaved rounds."""
    import testing as timed_steps
    import torch

    loads = start_loads()
    operand = torch.zeros(64, device=timed_steps.DEVICE)
    torch.set_num_threads(1)
    times = {name: [] for name in loads}
    fed = dict.fromkeys(loads, 0)
    for _ in range(1 if TINY else 6):
        for name, load in loads.items():
            before = load.fed.value
            with load.running():
                end = time.perf_counter() + (0.1 if TINY else 0.8)
                while (started := time.perf_counter()) < end:
                    for _ in range(700):
                        torch.add(operand, 1.0)
                    times[name].append(time.perf_counter() - started)
            fed[name] += load.fed.value - before
    for name, seconds in times.items():
        write_row(piece="dali-lock", beside=name, ms=1e3 * fmean(seconds), batches=fed[name])


def lock_s16() -> None:
    """Time a training step of ViT-S/16, with the recipe's dropout and LAMB, beside the same."""
    import testing as timed_steps

    recipe = "MODEL.dropout=0.1", "OPTIMIZER.name='lamb'"
    for name, load in start_loads().items():
        with load.running():
            measure_step("s16", f"beside {name}", timed_steps.ours, not TINY, *recipe)


def cifar(name: str, recipe: str, *more: str) -> None:
    """Train on CIFAR-10 by ``recipe`` to its end, in bfloat16; a row an evaluation."""
    from common.testing.photographs import write_photographs

    folder = WORK / "cifar10"  # may have been unpacked before
    source = os.environ.get("CIFAR10")
    settings = ["fp16.mode=AMP_TYPE.TORCH", "fp16.dtype='bfloat16'", *graphs(True), *more]
    if TINY:
        settings += ["MAX_STEPS=40", "EVAL_EVERY=20", "TOTAL_BATCH_SIZE=8", "MODEL.depth=1"]
        folder = WORK / "tiny"
        for split in ("train", "test"):
            if not (folder / split).exists():
                write_photographs(folder / split, "abcdefghij", 160, 32, 32)
    elif source and Path(source).is_dir():
        folder = Path(source)
    elif source is None:
        settings.append("DATA.download=True")  # has no effect on a folder of images
    script = f"cifar10_benchmark/train.py --config {recipe}"
    train_by_script(name, "eval", script, f"DATA.root={folder}", *settings)


def profile() -> None:
    """Profile steps of ViT-Lite-7/4 on CIFAR-10; a row of the GPU's kernels and copies."""
    steps = 5
    cifar("profile", f"vit_lite_vanilla --profile {steps}")
    path = WORK / "profile" / "profile" / "trace.json"
    busy = end = 0.0  # microseconds
    spans = []
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            spans.append((event["ts"], event["ts"] + event["dur"]))
    spans.sort()
    for start, stop in spans:
        busy += max(0, stop - max(start, end))  # several streams may run at once
        end = max(end, stop)
    total = end - spans[0][0] if spans else 0
    figures = dict(kernels=len(spans) / steps, ms=total / steps / 1e3, busy_ms=busy / steps / 1e3)
    write_row(piece="profile", steps=steps, **figures)


@dataclass(frozen=True)
class Piece:
    """``limit`` in seconds; ``run`` is a function of this file, or what ``pytest -k`` selects."""

    limit: int
    run: Callable[[], None] | str


PIECES = {
    "quickstart-eager": Piece(120, "quickstart and False and torchvision"),
    "quickstart-compiled": Piece(150, "quickstart and True and torchvision"),
    "numerics-eager": Piece(120, "numerics and False"),
    "numerics-compiled-adamw": Piece(170, "numerics and True and adamw"),
    "numerics-compiled-lamb": Piece(170, "numerics and True and lamb"),
    "muon": Piece(90, "muon and not recorded"),
    "waits": Piece(120, "wait"),
    "resume": Piece(160, "resume and bfloat16"),
    "memory": Piece(120, "memory"),
    "two-processes": Piece(150, "two_processes"),
    "commands": Piece(120, "dry_run"),
    "tools": Piece(200, "tools"),
    "speed-b16": Piece(150, partial(speed, "b16")),
    "speed-s16": Piece(130, partial(speed, "s16")),
    "speed-lite": Piece(85, partial(speed, "lite")),  # in no call: the one for a CPU
    "lite": Piece(75, lite),
    "profile": Piece(50, profile),
    "graphs": Piece(60, "recorded or cuda_graph"),
    "dropout-masks": Piece(60, "compiled_dropout"),
    "dropout": Piece(90, dropout),
    "ceilings": Piece(40, ceilings),
    "lamb": Piece(50, lamb),
    "dali-pixels": Piece(60, "dali_pixels"),
    "dali": Piece(140, "dali_rate or (quickstart and dali)"),
    "pipeline-dali": Piece(110, partial(pipeline, "dali")),
    "dali-rates": Piece(60, rates),
    "dali-feed": Piece(20, feed),
    "dali-lock": Piece(50, lock),
    "dali-lock-s16": Piece(90, lock_s16),
    "dali-workers": Piece(90, workers),
    "pipeline-torchvision": Piece(110, partial(pipeline, "torchvision")),
    "cifar-fast": Piece(150, partial(cifar, "cifar-fast", "vit_lite_fast")),
    # about eleven minutes without graphs
    "cifar": Piece(900, partial(cifar, "cifar", "vit_lite_vanilla", "EVAL_EVERY=10")),
}
# The groups of pieces that run at once, one group after another, and seconds for all.
A: list[list[str]] = [list(PIECES)[: list(PIECES).index("speed-b16")]]
A += [["speed-b16"], ["ceilings"], ["lamb"]]
B = [["dali-pixels"], ["dali"], ["pipeline-dali"], ["speed-s16"], ["pipeline-torchvision"]]
# The second quarter of an hour asks nothing that the first has answered (docs/performance.md).
C = [["lite"], ["profile"], ["graphs", "dropout-masks"], ["cifar-fast"], ["dropout"], ["cifar"]]
D = [["dali-rates"], ["dali-feed"], ["dali-lock"], ["dali-workers"], ["dali-pixels"]]
D += [["ceilings"], ["dali-lock-s16"]]
CALLS = {"a": (A, 400.0), "b": (B, 430.0), "c": (C, 425.0), "d": (D, 325.0)}


# --- the driver


def run_call(groups: list[list[str]], seconds: float) -> None:
    """Run the pieces of a call, and print their rows."""
    end = time.monotonic() + seconds
    OUT.mkdir(parents=True, exist_ok=True)
    WORK.mkdir(parents=True, exist_ok=True)
    rows_before = len(_lines(ROWS))
    for names in groups:
        if end - time.monotonic() < LEAST:
            print(f"left out for lack of time: {', '.join(names)}", flush=True)
            continue
        with ThreadPoolExecutor(len(names)) as pool:
            list(pool.map(partial(_run_piece, at_once=len(names), end=end), names))
    for line in _lines(ROWS)[rows_before:]:
        values = json.loads(line)
        del values["run"]
        numbers = {key: f"{value:.4g}" for key, value in values.items() if type(value) is float}
        print(" ".join(f"{key}={value}" for key, value in (values | numbers).items())[:220])
    sys.stdout.flush()


def _run_piece(name: str, at_once: int, end: float) -> None:
    """Run a piece, which shares the cores with ``at_once - 1`` others, in its own process.

    Prints how it ended, with what it said last or of its faults; adds its log to the file.
    """
    command = [sys.executable, __file__, "piece", name]
    environ = os.environ | {"PYTHONUNBUFFERED": "1", "OUT": str(OUT)}
    # Pieces that run at once share the cores.
    environ["TORCHINDUCTOR_COMPILE_THREADS"] = "4" if at_once > 1 else str(os.cpu_count())
    # What the tests start finds the project by it, where that is not installed.
    environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{environ.get('PYTHONPATH', '')}"
    started = time.monotonic()
    path = WORK / f"{name}.log"
    with path.open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=environ)
        try:
            process.wait(min(PIECES[name].limit, end - started))
            ended = f"exit status {process.returncode}"
        except subprocess.TimeoutExpired:
            _kill(process)
            ended = "killed"
    ended += f" after {time.monotonic() - started:.0f} s"
    text = path.read_text(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    said = [f"{name}: {ended}: {(lines or ['nothing said'])[-1][:150]}"]
    if process.returncode != 0:
        telling = [line for line in lines if line.startswith("E  ") or "rror" in line]
        said += [f"    {line[:220]}" for line in (telling or lines)[-6:]]
    print("\n".join(said), flush=True)  # at once: other threads print too
    with (OUT / "logs.txt").open("a") as file:
        # The beginning and the end: a piece that repeats an error prints without limit.
        file.write(f"===== {name}: {ended}\n{text[:30_000]}\n{text[30_000:][-60_000:]}\n")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a piece with all that it has started: torchrun's ranks are in sessions of their own."""
    parent = psutil.Process(process.pid)
    for child in [*parent.children(recursive=True), parent]:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=[*CALLS, "piece"], help="default: a, then b")
    parser.add_argument("name", nargs="?", choices=PIECES, help="of a piece")
    parser.add_argument("--seconds", type=float, help="at most, for a call (default: 325 to 430)")
    args = parser.parse_args()
    if args.what == "piece":
        run = PIECES[args.name].run
        if isinstance(run, str):  # pytest takes this process
            os.execv(sys.executable, [sys.executable, *PYTEST, "-k", run])
        run()
        return
    for call in [args.what] if args.what else "ab":
        groups, seconds = CALLS[call]
        run_call(groups, args.seconds or seconds)


if __name__ == "__main__":
    main()
