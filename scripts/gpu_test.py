"""What only a GPU can answer, and is right or wrong: ``python scripts/gpu.py a`` runs these tests.

Each stands alone, prints a line a result, and adds it with hardware, versions and commit to
outputs/gpu/rows.jsonl. Without a GPU all fail.
"""

import re
import subprocess
import sys
from collections.abc import Callable
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
SMALL = dict(image_size=64, patch_size=16, width=192, depth=4, heads=3, num_classes=10)
MODES: dict[str, dict[str, Any]] = {"float32": {"TF32": False}, "TF32": {"TF32": True}}
for name in ("TORCH bfloat16", "TORCH float16", "APEX float16", "NAIVE bfloat16", "NAIVE float16"):
    MODES[name] = {"fp16": {"mode": AMP_TYPE[name.split()[0]], "dtype": name.split()[1]}}
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
    loader = f"DATA.loader={'dali' if has_dali() else 'torchvision'}"
    words = in_words(f"DATA.root={digits}", loader, *settings)
    return [sys.executable, *launcher.split(), *script.split(), *words]


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
            of_step = [loss.item() for *_, loss in engine.train_step(repeat(batch))]
            losses.append(of_step[-1])
        return losses, engine.optimizer


@eager_and_compiled
@pytest.mark.parametrize("loader", ["torchvision", pytest.param("dali", marks=needs_dali)])
def test_quickstart(loader, compiled, digits, tmp_path, record):
    said = run(command(digits, tmp_path / "run", f"DATA.loader={loader}", f"COMPILE={compiled}"))
    top1 = float(said.rpartition("top1=")[2])
    record(top1=top1)
    assert top1 > 0.96


@eager_and_compiled
@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_numerics(optimizer, compiled, record):
    """Five steps in every precision against a plain loop in float64; LAMB recomputes blocks."""
    random = torch.Generator().manual_seed(1)
    images, labels = (
        torch.randn(5, 32, 3, 64, 64, generator=random),
        torch.randint(10, (5, 32), generator=random),
    )
    torch.manual_seed(0)
    network, expected, norm, wrong = build_model(**SMALL).double(), [], 0.0, []
    step = build_optimizer(
        network, optimizer, learning_rate=RATES["LEARNING_RATE"], weight_decay=RATES["WEIGHT_DECAY"]
    )
    for batch, target in zip(images.double(), labels, strict=True):
        step.zero_grad()
        loss = nn.functional.cross_entropy(network(batch), target)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(network.parameters(), 1.0).item()
        step.step()
        expected.append(loss.item())
    batches = list(zip(images.to(DEVICE), labels.to(DEVICE), strict=True))
    for mode, precision in MODES.items():
        # a rate at which nothing is dropped here, with which compiled blocks still draw
        rate = 1e-7 if compiled else 0.0
        model = SMALL | {"activation_checkpoint": optimizer == "lamb", "drop_path": rate}
        config = {
            "MODEL": model,
            "OPTIMIZER": {"name": optimizer},
            "COMPILE": compiled,
            **precision,
        }
        losses, stepped = train_steps(batches, config)
        of_norm = abs(stepped.grad_norm.item() / norm - 1)
        of_loss = (torch.tensor(losses) - torch.tensor(expected)).abs().max().item()
        record(mode=mode, loss_error=of_loss, norm_error=of_norm, skipped=stepped.skipped)
        most, relative = TOLERANCES[mode.split()[-1]]
        wrong += [mode] * (of_loss > most or of_norm > relative or stepped.skipped > 0)
    assert not wrong


def test_muon(record):
    """An update, whose matrices a GPU orthogonalizes in bfloat16, against the CPU's in float32."""
    updates = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        model = build_model(**SMALL)
        gradients = [torch.randn_like(parameter) for parameter in model.parameters()]
        before = nn.utils.parameters_to_vector(model.parameters())
        model.to(device)
        optimizer = build_optimizer(model, "muon", weight_decay=0.1)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient.to(device)
        optimizer.step()
        updates.append(nn.utils.parameters_to_vector(model.parameters()).cpu() - before)
    error = ((updates[1] - updates[0]).norm() / updates[0].norm()).item()
    record(relative_error=error)
    assert error < 0.03


class ForbidWaiting(BaseHook):
    """Forbid the host to wait for the device but in the first steps and the last, logged one."""

    steps = 0

    def before_train_iter(self, trainer: Trainer) -> None:
        torch.cuda.set_sync_debug_mode("error" if 3 <= trainer.step < 17 else "default")

    def after_train_iter(self, trainer: Trainer, *_: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")
        self.steps += trainer.step > 3


@pytest.mark.parametrize(
    "amp", ["None", "dict(mode=AMP_TYPE.TORCH)", "dict(mode=AMP_TYPE.TORCH,dtype='float16')"]
)
def test_the_host_does_not_wait(amp, tmp_path, monkeypatch, record):
    """CIFAR-10's training with its augmentation; a line that waits raises there."""
    for split in ("train", "test"):
        write_photographs(tmp_path / "data" / split, ("cat", "dog"), 160, 32, 32)
    hook, build_hooks = ForbidWaiting(priority=100), Run.build_hooks
    monkeypatch.setattr(Run, "build_hooks", lambda self, *args: [*build_hooks(self, *args), hook])
    settings = [
        f"fp16={amp}",
        "TOTAL_BATCH_SIZE=16",
        "MAX_STEPS=18",
        "IMAGE_SIZES=[(1, 24)]",
        "LOG.every=1000",
        f"DATA.root={tmp_path}/data",
    ]
    train_cifar10(
        ["--config", "vit_lite_vanilla", "--output", str(tmp_path / "run"), *in_words(*settings)]
    )
    record(steps_without_waiting=hook.steps)
    assert hook.steps > 10


def test_a_cuda_graph_augments_as_a_cpu_does(tmp_path, record):
    """CIFAR-10's batches of two sizes, with AutoAugment."""
    for split in ("train", "test"):
        write_photographs(tmp_path / split, ("cat", "dog"), 640, 32, 32)
    data = load_config("vit_lite_vanilla", [f"DATA.root={tmp_path}"])["DATA"]
    resolutions = [Resolution(1, 24, 64, 1), Resolution(2, 32, 64, 1)]

    def read(device: torch.device, graphs: bool) -> list[Tensor]:
        place = dict(image_size=32, device=device, resolutions=resolutions)
        loader = build_cifar10(data, 64, 64, seed=0, graphs=graphs, **place)
        return [images.cpu() for _ in range(2) for images, _ in loader]

    expected = read(torch.device("cpu"), False)
    plain = read(DEVICE, False)
    recorded = read(DEVICE, True)
    differences = [
        max((one - two).abs().max().item() for one, two in zip(batches, expected, strict=True))
        for batches in (plain, recorded)
    ]
    record(plain=differences[0], recorded=differences[1])
    assert all(map(torch.equal, plain, recorded))
    # Resizing and normalising may round otherwise than on a CPU.
    assert differences[0] < 0.02


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
    record(rate=dropped.mean().item(), correlation=neighbours.abs().max().item())
    assert torch.equal(x.grad, y)
    assert rates.abs().max() < 5 * spread
    assert neighbours.abs().max() < 5 / len(groups) ** 0.5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_resume_is_exact(dtype, digits, tmp_path, record):
    """Twenty steps, the same again, and eight that are saved and resumed, also by CUDA graphs."""
    amp, left = ["fp16=None"] if dtype == "float32" else [f"fp16.dtype={dtype!r}"], {}
    starts = [("once", 20), ("again", 20), ("resumed", 8), ("resumed", 20)]
    for name, end in (*starts, ("recorded", 8), ("recorded", 20)):
        settings = f"MAX_STEPS={end}", "MODEL.dropout=0.1", "IMAGE_SIZES=[(1, 16)]", *amp
        run(command(digits, tmp_path / name, *settings, f"GRAPHS={name == 'recorded'}"))
    for name in ("once", "again", "resumed", "recorded"):
        files = (tmp_path / name / "checkpoints" / "step-00000020").glob(
            "[mo]*.safetensors"
        )  # model and optimizer
        left[name] = torch.cat(
            [x.flatten().double() for file in sorted(files) for x in load_file(file).values()]
        )
    differences = {name: (left[name] - left["once"]).norm().item() for name in left}
    record(**differences)
    # All are 0 where the kernels are deterministic.
    assert max(differences.values()) <= 10 * differences["again"]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("mode", ["float32", "TORCH bfloat16", "TORCH float16"])
def test_recorded_steps_have_the_bits_of_plain_steps(mode, optimizer, record):
    """Ten steps, of which seven replay CUDA graphs, with dropout and two micro-batches."""
    images = torch.randn(10, 32, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(320).view(10, 32) % 10
    batches = list(zip(images.to(DEVICE), labels.to(DEVICE), strict=True))
    config = {
        "MODEL": SMALL | {"dropout": 0.1, "drop_path": 0.1},
        "OPTIMIZER": {"name": optimizer},
        "gradient_accumulation": 2,
        "LOG": {"noise_scale": True},
        **MODES[mode],
    }
    left = {}
    for name, graphs in (("plain", False), ("again", False), ("recorded", True)):
        losses, stepped = train_steps(batches, config | {"GRAPHS": graphs})
        weights = nn.utils.parameters_to_vector(stepped.parameters).cpu()
        left[name] = torch.cat([weights, torch.tensor(losses)])
    again, recorded = ((left[name] - left["plain"]).norm().item() for name in ("again", "recorded"))
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
    config = load_config("vit_s16_vanilla") | {"fp16": None, "clip_grad_norm": 1.0, **parts}
    config |= {"parallel": resolve_parallel(None, 1)}
    config["MODEL"] |= {"dropout": 0.0} | model
    predicted = estimate_step(config, 1, batch, accumulation, DEVICE.type).peak
    data = (
        torch.randn(batch, 3, 224, 224, device=DEVICE),
        torch.zeros(batch, dtype=torch.long, device=DEVICE),
    )
    train_steps([data, data], parts | {"MODEL": model})
    taken = torch.cuda.max_memory_allocated()
    record(mode=mode, batch=batch, predicted_gb=predicted / 1e9, measured_gb=taken / 1e9)
    assert predicted == pytest.approx(taken, rel=0.1)


@eager_and_compiled
def test_two_processes_on_one_gpu(compiled, digits, tmp_path, record):
    """They train as one does, over gloo."""
    settings = (
        "MAX_STEPS=20",
        "MIXUP=0.0",
        "fp16=None",
        "TF32=False",
        "LOG.every=1",
        f"COMPILE={compiled}",
    )
    run(command(digits, tmp_path / "one", *settings))
    run([*command(digits, tmp_path / "two", *settings, launcher=TWO), "--backend", "gloo"])
    one, two = (
        torch.tensor([line["loss"] for line in read_metrics(tmp_path / name)])
        for name in ("one", "two")
    )
    difference = (one - two).abs().max().item()
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
    return lambda windows: monkeypatch.setattr(
        imagenet_dali_dataloader, "decodes_windows", lambda _: windows
    )


@needs_dali
@pytest.mark.parametrize("windows", [True, False])
def test_dali_pixels(windows, pixels, decode, record):
    """Against the CPU's reader, in grey levels; without fancy upsampling 5 before the resize."""
    decode(windows)
    worst = 0.0
    for interpolation, crop, randaugment, size in VIEWS:
        settings = dict(interpolation=interpolation, crop=crop, randaugment=randaugment)
        means, largest = pixel_differences(pixels, DEVICE, size, **settings)
        difference = (means.median() if randaugment else means.max()).item()
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
    data = load_config("vit-b16")["DATA"] | {"root": str(photographs()), "loader": "dali"}
    loader, work = (
        build_train_loader(data, 256, 256, seed=0, image_size=224, device=DEVICE),
        timed_steps.Work((), 1, 1),
    )
    for _ in work:
        count = sum(len(batch) for batch, _ in loader)
    record(images_per_s=count / work.seconds, cores=cores())


def test_dry_run_and_profile(digits, tmp_path, record):
    """The plan of this GPU, and a profile with its kernels."""
    words = command(digits, tmp_path / "run")
    planned = [line for line in run([*words, "--dry-run"]).splitlines() if "per GPU" in line]
    run([*words, "--profile", "5"])
    tables = (tmp_path / "run" / "profile" / "operators.txt").read_text()
    on_gpu = re.search(r"Self CUDA time total: (\d\S+)", tables)
    record(planned=planned, gpu_time=on_gpu and on_gpu[1])
    assert planned
    assert on_gpu
    assert not on_gpu[1].startswith("0.000")


def test_tools(digits, tmp_path, record):
    """What other commands make of a run of this GPU."""
    folder = tmp_path / "run"
    top1 = run(command(digits, folder, "MAX_STEPS=40", "COMPILE=False")).splitlines()[-1]
    run([*command(digits, tmp_path / "rates"), "--find-lr", "20"])
    run([*command(digits, tmp_path / "batches", "MICRO_BATCH_SIZE=16"), "--find-batch", "20"])
    for words in (f"export.py {folder} --to timm", f"predict.py {folder} {digits.parent}/images"):
        run([sys.executable, *f"scripts/{words}".split()])
    evaluated = run([sys.executable, "scripts/evaluate.py", str(folder)])
    record(top1=top1)
    assert top1.removeprefix("top1=") in evaluated
