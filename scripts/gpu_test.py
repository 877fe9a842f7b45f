"""What only a GPU can answer, and is right or wrong: ``python scripts/gpu.py a`` runs these tests.

Each stands alone, prints a line a result, and adds it with hardware, versions and commit to
outputs/gpu/rows.jsonl. Without a GPU all fail.
"""

import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import testing as timed_steps
import torch
import write_digits
from gpu import VIT_B16, VIT_S16, photographs, write_row
from safetensors.torch import load_file
from torch import Tensor, nn

from cifar10_benchmark.task import build_train_loader as build_cifar10
from cifar10_benchmark.train import main as train_cifar10
from common.config.load import load_config
from common.engine.tensor_parallel.layout import resolve_parallel
from common.engine.trainer import Trainer
from common.engine.upstream import AMP_TYPE, BaseHook, gpc
from common.files import ROOT
from common.hardware import cores
from common.metrics.metrics_file import read_metrics
from common.model.build import build_model
from common.model.vit import Dropout
from common.optim.build import build_optimizer
from common.planner.step_estimate import estimate_step
from common.resolutions import Resolution
from common.run.run import Run
from common.shards.prepare import prepare
from common.testing.commands import in_words
from common.testing.photographs import write_photographs
from common.testing.ranks import launched
from common.training import build_training
from imagenet_dali.task import build_train_loader, has_dali
from imagenet_dali.testing import VIEWS, pixel_differences, prepare_photographs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # compilers warn of a GPU in ways that no CPU shows
    pytest.mark.timeout(540),
]
DEVICE = torch.device("cuda", 0)  # DALI needs its number
SMALL = {
    "image_size": 64,
    "patch_size": 16,
    "width": 192,
    "depth": 4,
    "heads": 3,
    "num_classes": 10,
}
MODES: dict[str, dict[str, Any]] = {
    "float32": {"TF32": False},
    "TF32": {"TF32": True},
    "TORCH bfloat16": {"fp16": {"mode": AMP_TYPE.TORCH, "dtype": "bfloat16"}},
    "TORCH float16": {"fp16": {"mode": AMP_TYPE.TORCH, "dtype": "float16"}},
    "APEX float16": {"fp16": {"mode": AMP_TYPE.APEX, "dtype": "float16"}},
    "NAIVE bfloat16": {"fp16": {"mode": AMP_TYPE.NAIVE, "dtype": "bfloat16"}},
    "NAIVE float16": {"fp16": {"mode": AMP_TYPE.NAIVE, "dtype": "float16"}},
}
# By number format: largest error of a loss, and relative error of the last gradient's norm; some
# five times a CPU's.
TOLERANCES = {
    "float32": (1e-5, 1e-3),
    "TF32": (2e-3, 0.1),
    "float16": (2e-3, 0.1),
    "bfloat16": (1e-2, 0.2),
}
RATES = {"LEARNING_RATE": 1e-3, "WEIGHT_DECAY": 0.1, "clip_grad_norm": 1.0}
TWO = "-m torch.distributed.run --nproc_per_node 2"
BEST_LOADER = "dali" if has_dali() else "torchvision"
needs_dali = pytest.mark.skipif(not has_dali(), reason="DALI is not installed")
Record = Callable[..., None]
eager_and_compiled = pytest.mark.parametrize("compiled", [False, True])


@pytest.fixture(autouse=True)
def gpu() -> None:
    assert torch.cuda.is_available(), "torch finds no GPU"


@pytest.fixture
def record(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture) -> Record:
    """Return what adds a row of this test, and prints it."""

    def write(**row: Any) -> None:
        with capsys.disabled():
            write_row(test=request.node.name, **row)

    return write


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's data."""
    folder = tmp_path_factory.mktemp("digits")
    write_digits.main(str(folder / "images"))
    prepare(folder / "images", folder / "shards")
    return folder / "shards"


def command(digits: Path, output: Path, *settings: str, launcher: str = "") -> list[str]:
    """Return the quickstart's command."""
    script = f"imagenet_dali/train_dali.py --config quickstart --output {output}"
    words = [sys.executable, *launcher.split(), *script.split()]
    words += in_words(f"DATA.root={digits}", f"DATA.loader={BEST_LOADER}", *settings)
    return words


def run(words: list[str]) -> str:
    """Run a command; return what it prints."""
    return subprocess.check_output(words, cwd=ROOT, text=True)


def train_steps(
    batches: list[tuple[Tensor, Tensor]], config: dict[str, Any]
) -> tuple[list[float], Any]:
    """Train with ``config`` in this process, every micro-batch of a step with the same samples.

    Returns the losses and the optimizer.
    """
    with launched(**RATES | config):
        torch.manual_seed(0)
        engine = build_training(gpc.config, nn.CrossEntropyLoss()).engine
        engine.train()
        losses = []
        for batch in batches:
            torch.cuda.reset_peak_memory_stats()
            of_micro_batches = [loss.item() for *_, loss in engine.train_step(repeat(batch))]
            losses.append(of_micro_batches[-1])
        return losses, engine.optimizer


def on_device(images: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the batches of images [step, B, 3, Y, X] and labels [step, B]."""
    return list(zip(images.to(DEVICE), labels.to(DEVICE), strict=True))


def largest_difference(batches: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    differences = []
    for one, two in zip(batches, expected, strict=True):
        differences.append((one - two).abs().max().item())
    return max(differences)


@eager_and_compiled
@pytest.mark.parametrize("loader", ["torchvision", pytest.param("dali", marks=needs_dali)])
def test_quickstart(loader, compiled, digits, tmp_path, record):
    settings = f"DATA.loader={loader}", f"COMPILE={compiled}"
    said = run(command(digits, tmp_path / "run", *settings))
    _, _, top1_text = said.rpartition("top1=")
    top1 = float(top1_text)
    record(top1=top1)
    assert top1 > 0.96


def train_plainly(name: str, images: Tensor, labels: Tensor) -> tuple[list[float], float]:
    """Train by a plain loop in float64; return the losses, and the norm of the last gradient."""
    torch.manual_seed(0)
    model = build_model(**SMALL).double()
    optimizer = build_optimizer(
        model,
        name,
        learning_rate=RATES["LEARNING_RATE"],
        weight_decay=RATES["WEIGHT_DECAY"],
    )
    losses = []
    norm = 0.0
    for batch, target in zip(images.double(), labels, strict=True):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch), target)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), RATES["clip_grad_norm"]).item()
        optimizer.step()
        losses.append(loss.item())
    return losses, norm


@eager_and_compiled
@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_numerics(optimizer, compiled, record):
    """Five steps in every precision against a plain loop in float64; LAMB recomputes blocks."""
    random = torch.Generator().manual_seed(1)
    images = torch.randn(5, 32, 3, 64, 64, generator=random)
    labels = torch.randint(10, (5, 32), generator=random)
    expected_losses, expected_norm = train_plainly(optimizer, images, labels)
    batches = on_device(images, labels)
    config = {
        "MODEL": SMALL
        | {
            "activation_checkpoint": optimizer == "lamb",
            # a rate at which nothing is dropped here, with which compiled blocks still draw
            "drop_path": 1e-7 if compiled else 0.0,
        },
        "OPTIMIZER": {"name": optimizer},
        "COMPILE": compiled,
    }
    wrong = []
    for mode, precision in MODES.items():
        losses, stepped = train_steps(batches, config | precision)
        loss_error = (torch.tensor(losses) - torch.tensor(expected_losses)).abs().max().item()
        norm_error = abs(stepped.grad_norm.item() / expected_norm - 1)
        record(
            mode=mode,
            loss_error=loss_error,
            norm_error=norm_error,
            skipped=stepped.skipped,
        )
        number_format = mode.split()[-1]
        most, relative = TOLERANCES[number_format]
        if loss_error > most or norm_error > relative or stepped.skipped > 0:
            wrong.append(mode)
    assert not wrong


def muon_update(device: torch.device) -> Tensor:
    """Return what a step with random gradients adds to the parameters, as a vector on the CPU."""
    torch.manual_seed(0)
    model = build_model(**SMALL)
    gradients = [torch.randn_like(parameter) for parameter in model.parameters()]
    before = nn.utils.parameters_to_vector(model.parameters())
    model.to(device)
    optimizer = build_optimizer(model, "muon", weight_decay=0.1)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient.to(device)
    optimizer.step()
    after = nn.utils.parameters_to_vector(model.parameters())
    return after.cpu() - before


def test_muon(record):
    """An update, whose matrices a GPU orthogonalizes in bfloat16, against the CPU's in float32."""
    expected = muon_update(torch.device("cpu"))
    update = muon_update(DEVICE)
    error = ((update - expected).norm() / expected.norm()).item()
    record(relative_error=error)
    assert error < 0.03


class ForbidWaiting(BaseHook):
    """Forbid the host to wait for the device but in the first steps and the last, logged one."""

    steps = 0

    def before_train_iter(self, trainer: Trainer) -> None:
        mode = "default"
        if 3 <= trainer.step < 17:
            mode = "error"
        torch.cuda.set_sync_debug_mode(mode)

    def after_train_iter(self, trainer: Trainer, *_: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")
        if trainer.step > 3:
            self.steps += 1


@pytest.mark.parametrize(
    "amp",
    [
        "None",
        "dict(mode=AMP_TYPE.TORCH)",
        "dict(mode=AMP_TYPE.TORCH,dtype='float16')",
    ],
)
def test_the_host_does_not_wait(amp, tmp_path, monkeypatch, record):
    """CIFAR-10's training with its augmentation; a line that waits raises there."""
    for split in ("train", "test"):
        folder = tmp_path / "data" / split
        write_photographs(folder, ("cat", "dog"), count=160, width=32, height=32)
    hook = ForbidWaiting(priority=100)
    plain_hooks = Run.build_hooks

    def build_hooks(self: Run, *args: Any) -> list[BaseHook]:
        return [*plain_hooks(self, *args), hook]

    monkeypatch.setattr(Run, "build_hooks", build_hooks)
    settings = [
        f"fp16={amp}",
        "TOTAL_BATCH_SIZE=16",
        "MAX_STEPS=18",
        "IMAGE_SIZES=[(1, 24)]",
        "LOG.every=1000",
        f"DATA.root={tmp_path}/data",
    ]
    output = str(tmp_path / "run")
    words = ["--config", "vit_lite_vanilla", "--output", output]
    train_cifar10([*words, *in_words(*settings)])
    record(steps_without_waiting=hook.steps)
    assert hook.steps > 10


def test_a_cuda_graph_augments_as_a_cpu_does(tmp_path, record):
    """CIFAR-10's batches of two sizes, with AutoAugment."""
    for split in ("train", "test"):
        write_photographs(tmp_path / split, ("cat", "dog"), count=640, width=32, height=32)
    data = load_config("vit_lite_vanilla", [f"DATA.root={tmp_path}"])["DATA"]
    resolutions = [Resolution(1, 24, 64, 1), Resolution(2, 32, 64, 1)]

    def read(device: torch.device, graphs: bool) -> list[Tensor]:
        loader = build_cifar10(
            data,
            64,
            64,
            seed=0,
            image_size=32,
            device=device,
            resolutions=resolutions,
            graphs=graphs,
        )
        batches = []
        for _ in range(2):
            batches += [images.cpu() for images, _ in loader]
        return batches

    expected = read(torch.device("cpu"), graphs=False)
    plain = read(DEVICE, graphs=False)
    recorded = read(DEVICE, graphs=True)
    difference = largest_difference(plain, expected)
    record(
        plain=difference,
        recorded=largest_difference(recorded, expected),
    )
    assert all(map(torch.equal, plain, recorded))
    # Resizing and normalising may round otherwise than on a CPU.
    assert difference < 0.02


def test_compiled_dropout(record):
    """The rate, the backward pass's mask, and the independence of neighbours in a byte."""
    layer = torch.compile(Dropout(0.1))
    x = torch.ones(1 << 24, device=DEVICE, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    dropped = (y == 0).double()
    groups = dropped.view(-1, 8)
    spread = (0.1 * 0.9 / len(groups)) ** 0.5
    rates = groups.mean(0) - 0.1
    neighbours = torch.corrcoef(groups.T) - torch.eye(8, device=DEVICE)
    record(
        rate=dropped.mean().item(),
        correlation=neighbours.abs().max().item(),
    )
    assert torch.equal(x.grad, y)
    assert rates.abs().max() < 5 * spread
    assert neighbours.abs().max() < 5 / len(groups) ** 0.5


def read_checkpoint(folder: Path) -> Tensor:
    """Return the weights and the optimizer's state as a vector."""
    parts = []
    for file in sorted(folder.glob("[mo]*.safetensors")):  # model and optimizer
        for tensor in load_file(file).values():
            parts.append(tensor.flatten().double())
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_resume_is_exact(dtype, digits, tmp_path, record):
    """Twenty steps, the same again, and eight that are saved and resumed, also by CUDA graphs."""
    amp = f"fp16.dtype={dtype!r}"
    if dtype == "float32":
        amp = "fp16=None"
    starts = [
        ("once", 20),
        ("again", 20),
        ("resumed", 8),
        ("resumed", 20),
        ("recorded", 8),
        ("recorded", 20),
    ]
    for name, end in starts:
        settings = [
            f"MAX_STEPS={end}",
            "MODEL.dropout=0.1",
            "IMAGE_SIZES=[(1, 16)]",
            amp,
            f"GRAPHS={name == 'recorded'}",
        ]
        run(command(digits, tmp_path / name, *settings))
    last = "checkpoints/step-00000020"
    once = read_checkpoint(tmp_path / "once" / last)
    differences = {}
    for name in ("once", "again", "resumed", "recorded"):
        state = read_checkpoint(tmp_path / name / last)
        differences[name] = (state - once).norm().item()
    record(**differences)
    # All are 0 where the kernels are deterministic.
    assert max(differences.values()) <= 10 * differences["again"]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("mode", ["float32", "TORCH bfloat16", "TORCH float16"])
def test_recorded_steps_have_the_bits_of_plain_steps(mode, optimizer, record):
    """Ten steps, of which seven replay CUDA graphs, with dropout and two micro-batches."""
    images = torch.randn(10, 32, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(320).view(10, 32) % 10
    batches = on_device(images, labels)
    config = {
        "MODEL": SMALL | {"dropout": 0.1, "drop_path": 0.1},
        "OPTIMIZER": {"name": optimizer},
        "gradient_accumulation": 2,
        "LOG": {"noise_scale": True},
        **MODES[mode],
    }

    def weights_and_losses(graphs: bool) -> Tensor:
        losses, stepped = train_steps(batches, config | {"GRAPHS": graphs})
        weights = nn.utils.parameters_to_vector(stepped.parameters).cpu()
        return torch.cat([weights, torch.tensor(losses)])

    plain = weights_and_losses(graphs=False)
    again = (weights_and_losses(graphs=False) - plain).norm().item()
    recorded = (weights_and_losses(graphs=True) - plain).norm().item()
    record(mode=mode, again=again, recorded=recorded)
    assert recorded <= 10 * again  # both are 0 where the kernels are deterministic


@pytest.mark.parametrize(
    ("model", "batch", "mode", "optimizer", "accumulation"),
    [
        (VIT_S16, 256, "float32", "adamw", 1),
        (VIT_B16, 128, "TORCH float16", "adamw", 1),
        (VIT_B16, 256, "TORCH bfloat16", "lamb", 2),
        (VIT_B16 | {"activation_checkpoint": True}, 256, "TORCH bfloat16", "lamb", 1),
    ],
)
def test_memory(model, batch, mode, optimizer, accumulation, record):
    """The peak that --dry-run predicts, against that of a training step."""
    parts = {
        "OPTIMIZER": {"name": optimizer},
        "gradient_accumulation": accumulation,
        **MODES[mode],
    }
    config = load_config("vit_s16_vanilla")
    config |= {
        "fp16": None,
        "clip_grad_norm": 1.0,
        "parallel": resolve_parallel(None, 1),
        **parts,
    }
    config["MODEL"] |= {"dropout": 0.0} | model
    estimate = estimate_step(config, 1, batch, accumulation, DEVICE.type)
    predicted = estimate.peak
    images = torch.randn(batch, 3, 224, 224, device=DEVICE)
    labels = torch.zeros(batch, dtype=torch.long, device=DEVICE)
    two_steps = [(images, labels), (images, labels)]
    train_steps(two_steps, parts | {"MODEL": model})
    taken = torch.cuda.max_memory_allocated()
    record(
        mode=mode,
        batch=batch,
        predicted_gb=predicted / 1e9,
        measured_gb=taken / 1e9,
    )
    assert predicted == pytest.approx(taken, rel=0.1)


def read_losses(output: Path) -> Tensor:
    return torch.tensor([line["loss"] for line in read_metrics(output)])


@eager_and_compiled
def test_two_processes_on_one_gpu(compiled, digits, tmp_path, record):
    """They train as one does, over gloo."""
    settings = [
        "MAX_STEPS=20",
        "MIXUP=0.0",
        "fp16=None",
        "TF32=False",
        "LOG.every=1",
        f"COMPILE={compiled}",
    ]
    one = tmp_path / "one"
    two = tmp_path / "two"
    run(command(digits, one, *settings))
    run([*command(digits, two, *settings, launcher=TWO), "--backend", "gloo"])
    difference = (read_losses(one) - read_losses(two)).abs().max().item()
    record(loss_difference=difference)
    assert difference < 1e-3


@pytest.fixture(scope="module")
def pixels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_photographs(tmp_path_factory.mktemp("pixels"))


@pytest.fixture
def decode(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Return what lets DALI decode windows of images, or whole ones."""
    from imagenet_dali import imagenet_dali_dataloader

    imagenet_dali_dataloader.decodes_windows("cuda")  # loads DALI's nvJPEG

    def decode(windows: bool) -> None:
        monkeypatch.setattr(imagenet_dali_dataloader, "decodes_windows", lambda _: windows)

    return decode


@needs_dali
@pytest.mark.parametrize("windows", [True, False])
def test_dali_pixels(windows, pixels, decode, record):
    """Against the CPU's reader, in grey levels; without fancy upsampling 5 before the resize."""
    decode(windows)
    worst = 0.0
    for interpolation, crop, randaugment, size in VIEWS:
        settings = dict(interpolation=interpolation, crop=crop, randaugment=randaugment)
        means, largest = pixel_differences(pixels, DEVICE, size, **settings)
        difference = means.max().item()
        if randaugment:
            difference = means.median().item()
        record(
            view=f"{interpolation} {crop} {randaugment} {size}",
            levels=difference,
            largest=largest.max().item(),
        )
        worst = max(worst, difference)
    assert worst < 0.6  # 0.01 of normalised pixels


@needs_dali
@pytest.mark.parametrize("windows", [True, False])
def test_dali_rate(windows, decode, record):
    decode(windows)
    data = load_config("vit-b16")["DATA"]
    data |= {"root": str(photographs()), "loader": "dali"}
    loader = build_train_loader(data, 256, 256, seed=0, image_size=224, device=DEVICE)
    work = timed_steps.Work((), 1, 1)
    count = 0
    for _ in work:
        count = sum(len(batch) for batch, _ in loader)
    record(images_per_s=count / work.seconds, cores=cores())


def test_dry_run_and_profile(digits, tmp_path, record):
    """The plan of this GPU, and a profile with its kernels."""
    words = command(digits, tmp_path / "run")
    plan = run([*words, "--dry-run"]).splitlines()
    planned = [line for line in plan if "per GPU" in line]
    run([*words, "--profile", "5"])
    tables = (tmp_path / "run" / "profile" / "operators.txt").read_text()
    on_gpu = re.search(r"Self CUDA time total: (\d\S+)", tables)
    record(planned=planned, gpu_time=on_gpu and on_gpu[1])
    assert planned
    assert on_gpu
    assert not on_gpu[1].startswith("0.000")


def test_tools(digits, tmp_path, record):
    """What other commands make of a run of this GPU."""
    folder = str(tmp_path / "run")
    images = str(digits.parent / "images")
    printed = run(command(digits, tmp_path / "run", "MAX_STEPS=40", "COMPILE=False"))
    top1 = printed.splitlines()[-1]
    run([*command(digits, tmp_path / "rates"), "--find-lr", "20"])
    run([*command(digits, tmp_path / "batches", "MICRO_BATCH_SIZE=16"), "--find-batch", "20"])
    run([sys.executable, "scripts/export.py", folder, "--to", "timm"])
    run([sys.executable, "scripts/predict.py", folder, images])
    evaluated = run([sys.executable, "scripts/evaluate.py", folder])
    record(top1=top1)
    assert top1.removeprefix("top1=") in evaluated
