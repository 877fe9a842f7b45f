"""Every key of the config, set as a user sets it, changes what a training script does.

A row starts a script twice, with the key and without it, and looks at what was built, trained or
printed. Most starts end before the first step. The list of keys is the schema's.
"""

import io
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

from caltech101_amp import task as caltech
from caltech101_amp import train as train_caltech
from cifar10_benchmark import train as train_cifar
from common.config.schema import known_keys
from common.data.mixup import Blend
from common.engine.groups import shutdown
from common.engine.trainer import Trainer
from common.engine.upstream import gpc
from common.errors import run_command
from common.metrics.hook import MetricsHook
from common.metrics.metrics_file import read_metrics
from common.model.ema import EmaHook
from common.testing.commands import in_words
from common.testing.photographs import write_colours
from common.testing.ranks import free_port, run_ranks
from imagenet_dali import train_dali
from imagenet_dali.testing import prepare_data

# 50 training images of 3 classes: 3 steps an epoch, 12 in all.
CONFIG = """
from colossalai.amp import AMP_TYPE
TOTAL_BATCH_SIZE = 16
NUM_EPOCHS = 4
WARMUP_EPOCHS = 1
LEARNING_RATE = 0.01
MODEL = dict(image_size=16, patch_size=8, width=32, depth=2, heads=2, mlp_ratio=2.0)
LOG = dict(tensorboard=False)
"""
SCRIPTS = {"imagenet": train_dali, "cifar": train_cifar, "caltech": train_caltech}
LOGITS = torch.tensor([[2.0, -1.0, 0.5], [0.1, 0.2, -3.0]])
LABELS = torch.tensor([0, 2])
# What stands for a value that only has to differ from that without the key.
OTHER = object()


class RefusedError(Exception):
    """What an engine was asked of that was not built; the message says why."""


@dataclass
class Started:
    """A script that has run: what it gave to `Trainer.fit`, and what it printed.

    ``refused`` is the message of one that has not got that far.
    """

    output: Path
    trainer: Any = None
    train_loader: Any = None
    epochs: int = 0
    last_step: int = 0
    eval_every: int = 0
    hooks: Sequence[Any] = ()
    batch: tuple[Tensor, Any] = ()  # the first images, and their labels
    last_labels: Any = None  # of the first images of the last epoch
    eval_images: Tensor = ()
    readers: int = 0  # processes that read images
    backends: dict[str, Any] = field(default_factory=dict)
    timeout: float | None = None
    said: str = ""
    refused: str = ""

    def read(self, loader: Any, eval_loader: Any) -> None:
        """Read from both loaders, and put that of training back to its start."""
        idle = len(multiprocessing.active_children())
        self.batch = next(iter(loader))
        self.readers = len(multiprocessing.active_children()) - idle
        loader.load_state_dict({"epoch": self.epochs - 1, "samples": 0})
        _, self.last_labels = next(iter(loader))
        loader.load_state_dict({"epoch": 0, "samples": 0})
        self.eval_images, _ = next(iter(eval_loader))

    @property
    def engine(self) -> Any:
        if self.refused:
            raise RefusedError(self.refused)
        return self.trainer.engine

    @property
    def model(self) -> Any:
        return getattr(self.engine.model, "module", self.engine.model)

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self.engine.optimizer.param_groups

    @property
    def rates(self) -> list[float]:
        """The learning rate of every step of the schedule, to six places."""
        schedule = self.engine.lr_scheduler.lr_schedule
        factors = [schedule.lr_lambdas[0](step) for step in range(3 * self.epochs)]
        return [round(max(schedule.base_lrs) * factor, 6) for factor in factors]

    @property
    def images(self) -> Tensor:
        return self.batch[0]

    @property
    def pixels(self) -> list[float]:
        return self.images.flatten().tolist()

    @property
    def eval_pixels(self) -> list[float]:
        return self.eval_images.flatten().tolist()

    @property
    def draw(self) -> Any:
        return next(self.train_loader.sampler.draws(0))

    @property
    def indices(self) -> list[int]:
        return self.draw.indices.tolist()

    @property
    def loss(self) -> float:
        return round(self.engine.criterion(LOGITS, LABELS).item(), 5)

    @property
    def saved(self) -> set[int]:
        """The steps of the checkpoints."""
        return {int(path.name[5:]) for path in self.output.glob("checkpoints/step-*")}

    @property
    def metadata(self) -> dict[str, Any]:
        return json.loads((self.output / "config.json").read_text())


def write_label_table(images: Path, table: Path) -> None:
    """Write a table with labels of two classes, and others of five."""
    rows = ["path,label,other"]
    for path in images.rglob("*.jpg"):
        number = int(path.stem)
        rows.append(f"{path.relative_to(images)},{number % 2},{number % 5}")
    table.write_text("\n".join(rows))


class Scripts:
    """Start training scripts on tiny data sets, each with the same settings once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports: Iterator[int] = iter(())  # of the starts of two processes
        self.started: dict[tuple[Any, ...], Started] = {}
        (folder / "tiny.py").write_text(CONFIG)
        self.roots = {"imagenet": prepare_data(folder)}
        self.roots["cifar"] = folder / "cifar"
        for split in ("train", "test"):
            write_colours(folder / "cifar" / split, 60, height=16, width=16)
        self.roots["caltech"] = folder / "caltech"
        categories = folder / "caltech" / caltech.FOLDER
        write_colours(categories, 60, height=16, width=16)
        (categories / "r").rename(categories / "accordion")
        write_colours(folder / "thirty", 30, height=20, width=24)
        (folder / "empty").mkdir()
        write_label_table(folder / "images", folder / "labels.csv")

    def start(self, row: "Row", *settings: str, task: str = "") -> Started:
        """Run a script's main with ``settings``, as a user does, for the steps of the row."""
        task = task or row.task
        key = task, row.steps, row.ranks, *settings
        if key not in self.started:
            owner = "all"
            if row.ranks == 1:
                owner = os.environ.get("RANK", "0")
            output = self.folder / f"run{len(self.started)}-{owner}"
            if row.ranks == 2:
                os.environ["MASTER_PORT"] = str(next(self.ports))
            self.started[key] = self._run(task, row.steps, settings, output)
        return self.started[key]

    def _run(self, task: str, steps: int, settings: Sequence[str], output: Path) -> Started:
        flags = []
        named = [f"DATA.root={self.roots[task]}"]
        if task != "cifar":
            named.append("DATA.workers=0")
        for setting in settings:
            if setting.startswith("--"):
                flags.append(setting)
            else:
                named.append(setting.replace("@", f"{self.folder}/"))
        words = ["--config", str(self.folder / "tiny.py")]
        if not any(setting.startswith("OUTPUT=") for setting in settings):
            words += ["--output", str(output)]
        words += in_words(*named)
        started = Started(output)

        def fit(trainer: Any, loader: Any, epochs: int, last_step: int, *more: Any) -> None:
            started.trainer = trainer
            started.train_loader = loader
            started.epochs = epochs
            started.last_step = last_step
            eval_loader, started.eval_every, started.hooks = more
            started.read(loader, eval_loader)
            started.timeout = gpc.watcher and gpc.watcher.timeout
            cudnn = torch.backends.cudnn
            started.backends = {
                "products": torch.get_float32_matmul_precision(),
                "benchmark": cudnn.benchmark,
                "deterministic": cudnn.deterministic,
            }
            real_fit(trainer, loader, epochs, min(steps, last_step), *more)

        real_fit = Trainer.fit
        printed = io.StringIO()
        mistakes = io.StringIO()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Trainer, "fit", fit)
            with redirect_stdout(printed), redirect_stderr(mistakes):
                try:
                    run_command(SCRIPTS[task].main, [*words, *flags])
                except SystemExit:
                    started.refused = mistakes.getvalue().removeprefix("error: ")
                finally:
                    shutdown()
        started.said = " ".join(printed.getvalue().split())
        return started


class Row(NamedTuple):
    """A key, its value as it is typed, and what `look` then sees."""

    key: str
    value: str
    look: Callable[[Started], Any]
    expected: Any
    also: Sequence[str] = ()  # further settings and flags, with and without the key
    task: str = "imagenet"
    steps: int = 0  # that are trained
    ranks: int = 1


def attribute(path: str) -> Callable[[Started], Any]:
    """Return what reads ``path``, as "engine.optimizer.max_norm", of a started script."""

    def look(run: Started) -> Any:
        value: Any = run
        for name in path.split("."):
            value = value[int(name)] if name.isdigit() else getattr(value, name)
        return value

    return look


def option(name: str) -> Callable[[Started], Any]:
    """Return what reads an option of the optimizer's first group of parameters."""
    return lambda run: run.groups[0][name]


def count(kind: str) -> Callable[[Started], int]:
    """Return what counts the model's layers whose class has this name."""

    def look(run: Started) -> int:
        names = [type(layer).__name__ for layer in run.model.modules()]
        return names.count(kind)

    return look


def shape(name: str) -> Callable[[Started], Any]:
    """Return what reads the shape of a parameter, () where the model has none of that name."""

    def look(run: Started) -> tuple[int, ...]:
        parameters = dict(run.model.named_parameters())
        if name not in parameters:
            return ()
        return tuple(parameters[name].shape)

    return look


def steps_at(rate: float) -> Callable[[Started], int]:
    """Return what counts the steps with this learning rate."""
    return lambda run: run.rates.count(rate)


def writes(name: str) -> Callable[[Started], bool]:
    """Return whether a script has written this file or folder in its output."""
    return lambda run: (run.output / name).exists()


def backend(name: str) -> Callable[[Started], Any]:
    """Return what reads a setting of PyTorch's backends."""
    return lambda run: run.backends[name]


def length(path: str) -> Callable[[Started], int]:
    """Return what reads the length of what `attribute` finds."""
    read = attribute(path)
    return lambda run: len(read(run))


def says(text: str) -> Callable[[Started], bool]:
    """Return whether a script has printed ``text``."""
    return lambda run: text in run.said


def refuses(text: str) -> Callable[[Started], bool]:
    """Return whether a script has ended with this message."""
    return lambda run: text in run.refused


def averages(name: str) -> Callable[[Started], list[Any]]:
    """Return what reads an option of each average of the weights."""

    def look(run: Started) -> list[Any]:
        hooks = [hook for hook in run.hooks if isinstance(hook, EmaHook)]
        return [getattr(hook, name) for hook in hooks]

    return look


def trained(run: Started) -> set[str]:
    return {name for name, weight in run.model.named_parameters() if weight.requires_grad}


def trains_positions(run: Started) -> bool:
    return "pos_embed" in trained(run)


def image_size(run: Started) -> int:
    return run.images.shape[-1]


def highest_rate(run: Started) -> float:
    return max(run.rates)


def last_rate(run: Started) -> float:
    return run.rates[-1]


def first_step_at_the_rate(run: Started) -> int:
    return run.rates.index(0.01)


def rate_of_the_step(run: Started) -> float:
    return round(run.trainer.learning_rate, 6)


def optimizer_class(run: Started) -> str:
    return type(run.engine.optimizer.optim).__name__


def model_class(run: Started) -> str:
    return type(run.model).__name__


def head_weights(run: Started) -> list[list[float]]:
    return run.model.head.weight.tolist()


def has_trained_biases(run: Started) -> bool:
    """Return whether a bias has another value than at first, which is 0."""
    return run.model.norm.bias.any().item()


def decays(run: Started) -> list[float]:
    return [group["weight_decay"] for group in run.groups]


def blends_last_epoch(run: Started) -> bool:
    return isinstance(run.last_labels, dict)


def has_zeros(run: Started) -> bool:
    return 0.0 in run.pixels


def replay_interval(run: Started) -> int:
    return getattr(run.engine.repeated_pass, "every", 0)


def is_compiled(run: Started) -> bool:
    return run.model.blocks[0]._compiled_call_impl is not None


def is_sharded(run: Started) -> bool:
    return isinstance(run.model, FSDPModule)


def draws_spans(run: Started) -> bool:
    return run.draw.spans is not None


def has_several_blocks(run: Started) -> bool:
    return len(run.train_loader.sampler.block_bounds) > 2


def different_images(run: Started) -> int:
    return len(set(run.indices))


def fingerprint(run: Started) -> str:
    return run.metadata["data"]["fingerprint"]


def least_rate(run: Started) -> float:
    return round(min(group["initial_lr"] for group in run.groups), 6)


def dropouts(run: Started) -> set[float]:
    return {layer.p for layer in run.model.modules() if isinstance(layer, nn.Dropout)}


def drop_rates(run: Started) -> list[float]:
    return [block.drop_path.rate for block in run.model.blocks if hasattr(block.drop_path, "rate")]


def blend(run: Started) -> Any:
    """Return how the first batch is blended, None where it is not."""
    _, labels = run.batch
    if not isinstance(labels, dict):
        return None
    augment = run.train_loader.loader.augment
    return Blend(augment.mixup, augment.cutmix)


def best_by(metric: str) -> Callable[[Started], bool]:
    """Return whether checkpoints/best was chosen by ``metric`` of the only evaluation."""

    def look(run: Started) -> bool:
        path = run.output / "checkpoints" / "best" / "trainer.json"
        state = json.loads(path.read_text())
        evaluation = read_metrics(run.output)[-1]
        return state["best_top1"] == evaluation.get(metric)

    return look


def small_peak(run: Started) -> bool:
    """Return whether MFU is taken of more images/s for images of 8 pixels than for others.

    They have 2 tokens instead of 5.
    """
    (peaks,) = [hook.peak_samples_per_s for hook in run.hooks if isinstance(hook, MetricsHook)]
    return peaks.get(8, 0) > 2 * peaks[16]


def train_records(run: Started) -> list[int]:
    """Return the steps at which training was recorded."""
    steps = []
    for record in read_metrics(run.output):
        if record["kind"] == "train":
            steps.append(record["step"])
    return steps


SHARED = "TENSOR_PARALLEL_SIZE=2"
MODE = "TENSOR_PARALLEL_MODE=1d"
FOLDER = "DATA.root=@images", "DATA.loader=torchvision"
NOISE = ("BATCH_SIZES=noise", "TOTAL_BATCH_SIZE=32")
LAMB = ("OPTIMIZER.name=lamb",)
MUON = ("OPTIMIZER.name=muon",)
SGD = ("OPTIMIZER.name=sgd",)
HALF = "fp16.mode=AMP_TYPE.TORCH", "fp16.dtype=float16"
RESNET = ("MODEL=dict(timm='resnet10t', image_size=32)",)
INIT = ("INIT=@run",)
ON_8 = "--dry-run", "GPUS=8", "MODEL.heads=4"

# Losses of `LOGITS`.
ONE_HOT = F.one_hot(LABELS).float()
SMOOTHED = F.cross_entropy(LOGITS, LABELS, label_smoothing=0.1).item()
BCE = F.binary_cross_entropy_with_logits(LOGITS, ONE_HOT).item()
OF_THE_SECOND = F.cross_entropy(LOGITS[1:], LABELS[1:]).item()

# Rows on what a train.py passes on, which are tried with all three.
OF_EVERY_SCRIPT = [
    Row("NUM_EPOCHS", "5", attribute("epochs"), 5),
    Row("MAX_STEPS", "7", attribute("last_step"), 7),
    Row("EVAL_EVERY", "3", attribute("eval_every"), 3),
    Row("LEARNING_RATE", "0.5", highest_rate, 0.5),
    Row("WEIGHT_DECAY", "0.3", option("weight_decay"), 0.3),
    Row("WARMUP_EPOCHS", "2", first_step_at_the_rate, 5),
    Row("WARMUP_LR", "0.002", attribute("rates.0"), 0.002),
    Row("LR_SCHEDULE", "linear", attribute("rates.0"), 0.0025),
    Row("DECAY", "0.25", steps_at(0.01), 7, ["LR_SCHEDULE=wsd"]),
    Row("MIN_LR", "0.001", last_rate, 0.001, ["COOLDOWN_EPOCHS=1"]),
    Row("COOLDOWN_EPOCHS", "1", steps_at(0.001), 3, ["MIN_LR=0.001"]),
    Row("OPTIMIZER.name", "sgd", optimizer_class, "FusedSGD"),
    Row("OPTIMIZER.betas", "(0.5, 0.6)", option("betas"), (0.5, 0.6)),
    Row("MODEL.depth", "3", length("model.blocks"), 3),
    Row("SEED", "7", attribute("indices"), OTHER),
    Row("SEED", "7", head_weights, OTHER),
    Row("FREEZE", "body", trained, {"head.weight", "head.bias"}, INIT),
    Row("INIT", "@run", has_trained_biases, True),
    Row("IMAGE_SIZES", "[(2, 8)]", image_size, 8),
    Row("BATCH_SIZES", "[(2, 8)]", length("images"), 8),
    # half as many steps of 4 images as of 2, as many as the data set has
    Row("SMALLEST_BATCH", "4", attribute("last_step"), OTHER, [*NOISE, "MICRO_BATCH_SIZE=1"]),
    Row("TOTAL_BATCH_SIZE", "8", length("images"), 8),
    Row("MICRO_BATCH_SIZE", "4", length("images"), 4),
    Row("MIXUP", "0.5", blend, Blend(0.5, 0.0)),
    Row(
        "LABEL_SMOOTHING",
        "0.1",
        attribute("loss"),
        round(SMOOTHED, 5),
    ),
    Row(
        "BCE_THRESHOLD",
        "0.2",
        attribute("loss"),
        round(BCE, 5),
    ),
    Row(
        "BCE_SUM",
        "True",
        attribute("loss"),
        # 3 classes
        round(3 * BCE, 5),
        ["BCE_THRESHOLD=0.2"],
    ),
    Row(
        "CLASS_WEIGHTS",
        "[0, 1, 2]",
        attribute("loss"),
        # of two images, the first of which has no weight
        round(OF_THE_SECOND, 5),
    ),
]

TRAINING = [
    Row("IMAGE_SIZES", "[(2, 8)]", small_peak, True),
    # the first of 6 steps of warm-up
    Row(
        "BATCH_LR",
        "none",
        rate_of_the_step,
        round(0.01 / 6, 6),
        ["BATCH_SIZES=[(1, 8)]"],
        steps=1,
    ),
    Row(
        "NOISE_FACTOR",
        "1e9",
        says(": batches of 16 from step "),
        True,
        [*NOISE, "SMALLEST_BATCH=8", "MICRO_BATCH_SIZE=2"],
        steps=13,
    ),
    Row("BATCH_SIZE", "5", refuses("BATCH_SIZE=5 is not TOTAL_BATCH_SIZE // grad"), True),
    Row("GPUS", "2", says("2 GPUs = 2 data parallel"), True, ["--dry-run"]),
    Row(
        "CHECKPOINT_EVERY",
        "2",
        attribute("saved"),
        {2, 4, 5},
        ["KEEP=9", "MAX_STEPS=5", "EVAL_EVERY=3"],
        steps=5,
    ),
    Row(
        "KEEP",
        "1",
        attribute("saved"),
        {4},
        ["CHECKPOINT_EVERY=1", "MAX_STEPS=4", "EVAL_EVERY=3"],
        steps=4,
    ),
    # Random weights choose one class: its top-1 is not the mean of the F1.
    Row("BEST", "macro_f1", best_by("macro_f1"), True, ["LEARNING_RATE=1e-30"], steps=3),
    Row(
        "PATIENCE",
        "1",
        says("ended at step 6 of 12: 1 evaluations without"),
        True,
        # Nothing changes.
        ["LEARNING_RATE=1e-30"],
        steps=12,
    ),
    Row(
        "OPTIMIZER.decay_all",
        "False",
        decays,
        [0.3, 0.0],
        ["WEIGHT_DECAY=0.3"],
    ),
    Row(
        "OPTIMIZER.layer_decay",
        "0.5",
        # of the patches, below two blocks and what follows them
        least_rate,
        0.01 / 2**3,
        INIT,
    ),
    Row("OPTIMIZER.eps", "1e-3", option("eps"), 1e-3),
    Row("OPTIMIZER.variant", "deepspeed", option("trust_range"), (0.01, 10.0), LAMB),
    Row("OPTIMIZER.bias_correction", "True", option("bias_correction"), True, LAMB),
    Row("OPTIMIZER.max_grad_norm", "2.5", option("max_grad_norm"), 2.5, LAMB),
    Row("OPTIMIZER.always_adapt", "False", option("always_adapt"), False, LAMB),
    Row("OPTIMIZER.trust_range", "(0.5, 2.0)", option("trust_range"), (0.5, 2.0), LAMB),
    Row("OPTIMIZER.momentum", "0.5", option("momentum"), 0.5, SGD),
    Row("OPTIMIZER.dampening", "0.5", option("dampening"), 0.5, SGD),
    Row("OPTIMIZER.nesterov", "True", option("nesterov"), True, SGD),
    Row(
        "OPTIMIZER.adamw_lr_scale",
        "0.1",
        attribute("engine.optimizer.optim.adamw_lr_scale"),
        0.1,
        MUON,
    ),
    Row("OPTIMIZER.bfloat16", "True", attribute("engine.optimizer.optim.bfloat16"), True, MUON),
    # Two blocks have four matrices each.
    Row("OPTIMIZER.filters", "True", length("engine.optimizer.optim.matrices"), 9, MUON),
    Row("EMA", "0.5", averages("decay"), [0.5]),
    Row("EMA_WARMUP", "False", averages("warmup"), [False], ["EMA=0.5"]),
    Row(
        "OUTPUT",
        "@mine",
        says("mine/loss.jpeg"),
        True,
    ),
    Row("CUTMIX", "0.5", blend, Blend(0.0, 0.5)),
    Row(
        "MIXUP_OFF_EPOCHS",
        "1",
        blends_last_epoch,
        False,
        ["MIXUP=0.5"],
    ),
    Row("THREE_AUGMENT", "True", attribute("pixels"), OTHER),
    Row("COLOR_JITTER", "0.5", attribute("pixels"), OTHER),
    Row("ERASING", "1.0", has_zeros, True),
    Row("ERASING_MODE", "pixel", has_zeros, False, ["ERASING=1.0"]),
    Row("MAX_SKIPPED", "3", attribute("engine.optimizer.max_skipped"), 3),
    Row("REPLAY_EVERY", "3", replay_interval, 3),
    Row(
        "MAX_REPLAY_FAULTS",
        "7",
        attribute("engine.repeated_pass.tolerated"),
        7,
        ["REPLAY_EVERY=3"],
    ),
    Row("gradient_accumulation", "4", attribute("engine.optimizer.accumulation"), 4),
    Row("clip_grad_norm", "0.7", attribute("engine.optimizer.max_norm"), 0.7),
    Row("SEED", "7", attribute("pixels"), OTHER, ["ERASING=1.0"]),
    Row("LOG.every", "5", train_records, [5, 10, 12], steps=12),
    Row("LOG.tensorboard", "True", writes("tensorboard"), True),
    Row(
        "LOG.noise_scale",
        "False",
        attribute("engine.noise_scale"),
        None,
        ["gradient_accumulation=2"],
    ),
    Row("LOG.trackers", "['wandb']", writes("wandb_id"), True),
    Row("fp16.mode", "AMP_TYPE.NAIVE", attribute("engine.precision.cast.name"), "LAYERS", HALF[1:]),
    Row("fp16.dtype", "float16", attribute("engine.precision.dtype"), torch.float16, HALF[:1]),
    Row(
        "fp16.opt_level",
        "O2",
        attribute("engine.precision.cast.name"),
        "LAYERS",
        ["fp16.mode=AMP_TYPE.APEX", "fp16.dtype=float16"],
    ),
    Row("fp16.init_scale", "8.0", attribute("engine.precision.scaler._init_scale"), 8.0, HALF),
    Row(
        "fp16.growth_factor", "3.0", attribute("engine.precision.scaler._growth_factor"), 3.0, HALF
    ),
    Row(
        "fp16.backoff_factor",
        "0.1",
        attribute("engine.precision.scaler._backoff_factor"),
        0.1,
        HALF,
    ),
    Row(
        "fp16.growth_interval",
        "7",
        attribute("engine.precision.scaler._growth_interval"),
        7,
        HALF,
    ),
    Row("fp16.enabled", "False", attribute("engine.precision.scaler"), None, HALF),
    Row("TF32", "False", backend("products"), "highest"),
    Row("cudnn_benchmark", "True", backend("benchmark"), True),
    Row("cudnn_deterministic", "True", backend("deterministic"), True),
    Row(
        "COMPILE",
        "True",
        is_compiled,
        True,
    ),
    Row("GRAPHS", "True", says("without CUDA graphs: no GPU"), True),
]

MODEL = [
    Row(
        "MODEL.timm",
        "resnet10t",
        model_class,
        "ResNet",
        ["MODEL=dict(image_size=32)"],
    ),
    Row("MODEL.image_size", "32", image_size, 32),
    Row("MODEL.patch_size", "4", shape("pos_embed"), (1, 17, 32)),
    Row("MODEL.width", "64", shape("pos_embed"), (1, 5, 64)),
    Row("MODEL.heads", "4", attribute("model.blocks.0.attn.head_width"), 8),
    Row("MODEL.mlp_ratio", "3.0", shape("blocks.0.mlp.fc1.weight"), (96, 32)),
    Row("MODEL.mlp", "swiglu", shape("blocks.0.mlp.fc2.weight"), (32, 32)),
    Row("MODEL.norm", "rmsnorm", count("RMSNorm"), 5),
    Row("MODEL.num_classes", "5", shape("head.weight"), (5, 32)),
    Row("MODEL.dropout", "0.25", dropouts, {0.25}),
    Row("MODEL.drop_path", "0.25", drop_rates, [0.0, 0.25]),
    Row("MODEL.stem", "conv", count("Conv2d"), 4),
    Row("MODEL.stem", "residual", count("Conv2d"), 4 + 2 * 3),
    Row("MODEL.pool", "avg", shape("fc_norm.weight"), (32,)),
    Row("MODEL.position", "sincos2d", trains_positions, False),
    Row("MODEL.no_embed_class", "True", shape("pos_embed"), (1, 4, 32)),
    Row("MODEL.reg_tokens", "3", shape("reg_token"), (1, 3, 32)),
    Row("MODEL.init_values", "0.1", count("LayerScale"), 4),
    Row("MODEL.activation_checkpoint", "True", attribute("model.activation_checkpoint"), True),
    Row("MODEL.pretrained", "True", refuses("hf-hub:timm/resnet10t"), True, RESNET),
    Row("MODEL.sync_bn", "True", refuses("SyncBatchNorm needs GPUs"), True, RESNET),
]

DATA = [
    # Three are held out, by file name.
    Row(
        "DATA.root",
        "@thirty",
        attribute("train_loader.sampler.num_samples"),
        27,
        ["DATA.loader=torchvision"],
    ),
    Row("DATA.download", "True", refuses("no network"), True, ["DATA.root=@empty"], "cifar"),
    Row("DATA.loader", "torchvision", attribute("refused"), "", ["DATA.root=@images"]),
    Row("DATA.workers", "1", attribute("readers"), 1, ["DATA.loader=torchvision"]),
    Row("DATA.order", "blocks", draws_spans, True),
    Row(
        "DATA.block",
        "0.002",
        has_several_blocks,
        True,
        ["DATA.order=blocks"],
    ),
    Row(
        "DATA.window",
        "1",
        attribute("indices"),
        OTHER,
        ["DATA.order=blocks", "DATA.block=0.002"],
    ),
    Row("DATA.sampling", "balanced", attribute("indices"), OTHER),
    Row("DATA.split", "counted", fingerprint, OTHER, FOLDER),
    Row("DATA.labels", "../labels.csv", shape("head.weight"), (2, 32), FOLDER),
    Row(
        "DATA.columns",
        "path=path,label=other",
        shape("head.weight"),
        (5, 32),
        [*FOLDER, "DATA.labels=../labels.csv"],
    ),
    Row("DATA.crop", "simple", attribute("pixels"), OTHER),
    Row("DATA.crop_scale", "(0.1, 0.2)", attribute("pixels"), OTHER),
    Row("DATA.crop_ratio", "(1, 1)", attribute("pixels"), OTHER),
    Row("DATA.repeats", "2", different_images, 8),
    Row("DATA.flip", "False", attribute("pixels"), OTHER),
    Row("DATA.crop_padding", "1", attribute("pixels"), OTHER, task="cifar"),
    Row("DATA.randaugment", "(2, 9)", attribute("pixels"), OTHER),
    Row("DATA.autoaugment", "cifar10", attribute("pixels"), OTHER, task="cifar"),
    Row("DATA.interpolation", "bicubic", attribute("pixels"), OTHER),
    Row("DATA.interpolation", "bicubic", attribute("eval_pixels"), OTHER),
    Row("DATA.eval_crop", "0.5", attribute("eval_pixels"), OTHER),
    Row("DATA.mean", "(0, 0, 0)", attribute("pixels"), OTHER),
    Row("DATA.mean", "(0, 0, 0)", attribute("eval_pixels"), OTHER),
    Row("DATA.std", "(1, 1, 1)", attribute("pixels"), OTHER),
    Row("DATA.std", "(1, 1, 1)", attribute("eval_pixels"), OTHER),
]

QKV = shape("blocks.0.attn.qkv.weight")
PARALLEL = [
    Row("TENSOR_PARALLEL_SIZE", "2", QKV, (32, 48), [MODE], ranks=2),
    Row("TENSOR_PARALLEL_MODE", "1d", QKV, (32, 48), [SHARED], ranks=2),
    Row("parallel.tensor.size", "2", QKV, (32, 48), ["parallel.tensor.mode=1d"], ranks=2),
    Row("parallel.tensor.mode", "1d", QKV, (32, 48), ["parallel.tensor.size=2"], ranks=2),
    Row(
        "parallel.tensor.depth",
        "2",
        says("8 GPUs = 1 data parallel x 8 tensor parallel"),
        True,
        [*ON_8, "parallel.tensor.mode=2.5d", "parallel.tensor.size=8"],
    ),
    Row("parallel.pipeline", "2", refuses("pipeline parallelism is not supported"), True),
    Row("zero.stage", "3", is_sharded, True, ranks=2),
    Row(
        "torch_ddp.bucket_cap_mb",
        "3",
        attribute("engine.model.bucket_bytes_cap"),
        3 << 20,
        ranks=2,
    ),
    Row(
        "torch_ddp.gradient_as_bucket_view",
        "False",
        attribute("engine.model.gradient_as_bucket_view"),
        False,
        ranks=2,
    ),
    Row(
        "torch_ddp.broadcast_buffers",
        "False",
        attribute("engine.model.broadcast_buffers"),
        False,
        ranks=2,
    ),
    Row(
        "torch_ddp.find_unused_parameters",
        "True",
        attribute("engine.model.find_unused_parameters"),
        True,
        ranks=2,
    ),
    Row("torch_ddp.static_graph", "True", attribute("engine.model.static_graph"), True, ranks=2),
    Row("TIMEOUT", "77", attribute("timeout"), 77, ranks=2),
]
ROWS = [*OF_EVERY_SCRIPT, *TRAINING, *MODEL, *DATA, *PARALLEL]
OF_ONE = [row for row in ROWS if row.ranks == 1]
OF_TWO = [row for row in ROWS if row.ranks == 2]

WANDB = """
from types import SimpleNamespace
Settings = SimpleNamespace
def init(**_):
    return SimpleNamespace(id="1", log=lambda *_, **__: None, finish=lambda: None)
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("keys")

    def fail(*_: object, **__: object) -> None:
        raise OSError("no network")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(caltech, "CATEGORIES", 3)
        patch.setattr(caltech, "IMAGES", 60)
        patch.setattr("torchvision.datasets.utils.download_url", fail)
        patch.setattr("timm.models.load_model_config_from_hf", fail)
        patch.setattr("common.engine.compiler._missing", lambda _: "")
        patch.setattr("common.errors.PATIENCE", 0.0)
        patch.setattr("common.optim.muon.is_fast", lambda _: True)
        patch.setattr("common.run.run.knows_peak", lambda _: True)  # as on a GPU
        (folder / "modules").mkdir()
        (folder / "modules" / "wandb.py").write_text(WANDB)
        patch.syspath_prepend(folder / "modules")
        scripts = Scripts(folder)
        first = Row("", "", attribute("refused"), "", steps=1)
        scripts.start(first).output.rename(folder / "run")
        yield scripts


def look(scripts: Scripts, row: Row, task: str = "") -> tuple[Any, Any]:
    """Return what is seen with the key, and without; a message where the script ended with it."""

    def seen_with(*settings: str) -> Any:
        started = scripts.start(row, *row.also, *settings, task=task)
        try:
            return row.look(started)
        except RefusedError as refused:
            return str(refused)

    with_key = seen_with(f"{row.key}={row.value}")
    without = seen_with()
    return with_key, without


def check(row: Row, seen: tuple[Any, Any]) -> None:
    with_key, without = seen
    if row.expected is OTHER:
        assert with_key != without
    else:
        assert with_key == row.expected
        assert without != row.expected


@pytest.mark.parametrize("row", OF_ONE, ids=lambda row: row.key)
def test_a_key_changes_what_a_script_does(row, scripts):
    check(row, look(scripts, row))


def test_the_same_settings_show_the_same(scripts):
    """So what differs in the rows above is the key's doing."""
    row = Row("KEEP", "2", lambda run: (run.indices, run.pixels, run.eval_pixels), None)
    seen, again = look(scripts, row)
    assert seen == again


@pytest.mark.slow  # layering_test compares their text with that of train_dali
@pytest.mark.parametrize("task", ["cifar", "caltech"])
def test_the_other_scripts_read_the_same_keys(task, scripts):
    for row in OF_EVERY_SCRIPT:
        check(row, look(scripts, row, task))


@pytest.fixture(scope="module")
def of_two(scripts: Scripts) -> dict[str, tuple[Any, Any]]:
    """What the first of two processes sees in each row."""
    # One for each start, which could not tell a process that is late from one of the next start.
    ports: set[int] = set()
    while len(ports) < 2 * len(OF_TWO):
        ports.add(free_port())
    scripts.ports = iter(ports)
    first, _ = run_ranks(2, lambda: [look(scripts, row) for row in OF_TWO])
    return {row.key: seen for row, seen in zip(OF_TWO, first, strict=True)}


@pytest.mark.parametrize("row", OF_TWO, ids=lambda row: row.key)
def test_a_key_changes_what_two_processes_do(row, of_two):
    check(row, of_two[row.key])


def test_every_key_has_a_row():
    keys = known_keys()
    sections = {key.rpartition(".")[0] for key in keys}
    assert {row.key for row in ROWS} == keys.keys() - sections
