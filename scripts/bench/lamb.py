"""Compare a step of our LAMB with Colossal-AI's, timm's, and PyTorch's AdamW, on the 152 tensors of ViT-B/16 in fp32.

python scripts/bench/lamb.py [--rounds 9] [--threads 1 2]

All optimizers step the same tensors in one process, each with its own state, one step per round. On a GPU a round is 20
steps, timed by CUDA events; `cpu` is the time to launch the kernels. timm's LAMB clips the norm of all gradients and
corrects the moments, as `ours, as timm` does.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping

import torch
from timm.optim import Lamb as TimmLamb
from torch import Tensor
from torch.optim import AdamW, Optimizer

from common.colossal.upstream import colossalai
from common.errors import run_command
from common.hardware import cores
from common.model.vit import build_model
from common.optim.lamb import Lamb
from common.tools.benchmark import run_benchmark
from common.tools.harness import Row, interleave, timed
from common.tools.result_rows import summarise

VIT_B16 = dict(image_size=224, patch_size=16, width=768, depth=12, heads=12, num_classes=1000)
TINY = VIT_B16 | dict(width=16, heads=2, num_classes=10)
OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = {
    "ours": Lamb,
    "ours, as timm": lambda params, **options: Lamb(params, variant="timm", **options),
    "colossalai": colossalai.nn.optimizer.Lamb,
    "timm": TimmLamb,
    "AdamW, one by one": lambda params, **options: AdamW(params, foreach=False, fused=False, **options),
    "AdamW, foreach": lambda params, **options: AdamW(params, foreach=True, **options),
    "AdamW, fused": lambda params, **options: AdamW(params, fused=True, **options),
}
STEPS_ON_GPU = 20


def main(argv: list[str]) -> None:
    threads = dict(type=int, nargs="+", default=sorted({1, min(2, cores())}), help="CPU threads (default: 1, then 2)")
    run_benchmark("lamb", measure, argv, __doc__, rounds=9, threads=threads)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield rows for the CPU, one per number of threads, and for the GPU."""
    rounds, model = (2, TINY) if args.tiny else (args.rounds, VIT_B16)
    params = random_parameters(model, torch.device("cpu"))
    for threads in args.threads:
        torch.set_num_threads(threads)
        yield from summarise(compare(params, rounds, timed), "ours", part=f"CPU, threads: {threads}")
    if torch.cuda.is_available():
        measured = compare(random_parameters(model, torch.device("cuda")), rounds, timed_on_gpu)
        yield from summarise(measured, "ours", STEPS_ON_GPU, part="GPU")


def random_parameters(model: Mapping[str, int], device: torch.device) -> list[Tensor]:
    """Return the parameters of a ViT, with gradients of realistic magnitude."""
    params = list(build_model(**model).to(device).parameters())
    for param in params:
        param.grad = 1e-3 * torch.randn_like(param)
    return params


def compare(params: list[Tensor], rounds: int, measure: Callable[[Callable[[], object]], Row]) -> dict[str, list[Row]]:
    """Return every optimizer's measurements, without the first step, which creates its state."""
    optimizers = {name: build(params, lr=1e-6, weight_decay=0.1) for name, build in OPTIMIZERS.items()}
    variants = {name: lambda step=optimizer.step: measure(step) for name, optimizer in optimizers.items()}
    return {name: rows[1:] for name, rows in interleave(variants, rounds + 1).items()}


def timed_on_gpu(step: Callable[[], object]) -> Row:
    """Return the GPU's seconds of `STEPS_ON_GPU` steps as ``wall``, and this process's to launch them as ``cpu``."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    used = time.process_time()
    start.record()
    for _ in range(STEPS_ON_GPU):
        step()
    end.record()
    used = time.process_time() - used
    torch.cuda.synchronize()
    return {"wall": start.elapsed_time(end) / 1e3, "cpu": used}


if __name__ == "__main__":
    run_command(main)
