"""What happened in a step of a run: ``--replay``."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from common.checkpoint.content import CONFIG, METRICS, ConfigFile, find_fault, read_metadata
from common.checkpoint.hook import load_checkpoint
from common.checkpoint.resume import AUTO, choose_checkpoint
from common.checkpoint.save import list_checkpoints
from common.config.plan import Plan
from common.data.sharing import ALONE
from common.engine.collectives import gather
from common.engine.groups import generator_states, set_generator_states
from common.engine.tensor_parallel.sharding import gather_full, named_shards
from common.engine.trainer import Trainer
from common.engine.upstream import ParallelMode, gpc
from common.errors import UserError
from common.files import Values
from common.metrics.hook import MetricsHook
from common.metrics.loggers import PROGRESS_BAR, Guarded, ProgressBar
from common.metrics.measurement import Measurement
from common.metrics.metrics_file import Metrics, finite, read_metrics
from common.text import counted, format_table, list_some, print_wrapped

SHOWN = 5  # rows of a table
COMPARED = "loss", "grad_norm", "lr", "skipped", "noise_scale"  # fields of a train record


def find_replay_start(output: Path, step: int, resume: str) -> Path | None:
    """Return the checkpoint from which the run in ``output`` takes ``step`` again.

    ``resume`` names it, or it is the nearest one before. None means step 0.
    """
    if not (output / CONFIG).is_file():
        raise UserError(f"--replay {step}: {output} holds no run; name it by --output DIR")
    if resume != AUTO:
        return choose_checkpoint(resume, output / "checkpoints")
    starts = [
        start for start in read_metadata(output, ConfigFile)["starts"] if start["step"] < step
    ]
    origins = [Path(start["from"]) for start in reversed(starts) if start.get("from")]
    for path in [*list_checkpoints(output / "checkpoints"), *origins]:
        if int(path.name.removeprefix("step-")) < step and find_fault(path) is None:
            return path
    for origin in origins:
        if not origin.is_relative_to(output):
            raise UserError(
                f"--replay {step}: the run branched off from {origin}, which is no longer there"
            )
    return None


class MicroBatch(NamedTuple):
    """What a micro-batch of the step gave on this rank."""

    output: Tensor  # [B, num_classes]
    label: Any  # int64 [B], or the arguments of `MixupLoss`
    loss: float

    def image_loss(self, criterion: Any, row: int) -> float:
        """Return the loss of one image."""
        output = self.output[row : row + 1]
        if not isinstance(self.label, Mapping):
            return criterion(output, self.label[row : row + 1]).item()
        parts = {
            name: value[row : row + 1] if value.dim() else value
            for name, value in self.label.items()
        }
        return criterion(output, **parts).item()


class Recorder:
    """Yield the batches of ``loader``; keep those of the step."""

    def __init__(self, loader: Any):
        self.loader = loader
        self.batches: list[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            if self.batches is not None:
                self.batches.append(batch)
            yield batch


class Comparison:
    """A logger that compares each record with the one of the same step in a run's folder."""

    def __init__(self, folder: Path, compared: list[tuple[Metrics, Metrics]]):
        self.compared = compared
        records = read_metrics(folder) if (folder / METRICS).exists() else []
        self.records = {record["step"]: record for record in records if record["kind"] == "train"}

    def __call__(self, record: Metrics) -> None:
        then = self.records.get(record["step"])
        if then:
            self.compared.append((_compared(then), _compared(record)))

    def close(self) -> None:
        """Do nothing."""


def _compared(record: Metrics) -> Metrics:
    return finite({name: record[name] for name in ("step", *COMPARED) if name in record})


class Replay(Measurement):
    """Train a run again up to step ``total_steps``, and describe that step on rank 0.

    The run's folder is only read. ``folder`` gets what ``--replay-to`` asks for.
    """

    def __init__(self, output: Path, step: int, is_main: bool, folder: str | None):
        super().__init__(output, step, is_main)
        self.priority = 10  # after the metrics of the step
        self.target = Path(folder) if folder else None
        if self.target and self.target.exists() and any(self.target.iterdir()):
            raise UserError(f"--replay-to {folder} is not empty: choose another folder")
        self.announcement = f"replaying step {step:,} of {output}, to which nothing is written"
        self.weights: dict[str, Tensor] = {}  # before the step
        self.gradients: dict[str, float] = {}  # norms before clipping
        self.results: list[MicroBatch] = []
        self.compared: list[tuple[Metrics, Metrics]] = []  # records: then, now

    def limit(self, plan: Plan) -> Plan:
        """Return ``plan`` with the step as its last."""
        if self.total_steps > plan.last_step:
            raise UserError(f"--replay {self.total_steps}: the run has {plan.last_step:,} steps")
        self.plan = replace(plan, last_step=self.total_steps)
        return self.plan

    def attach(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        metrics: MetricsHook,
        metadata: Values,
        start_from: Path | None,
    ) -> None:
        """Take what is trained, and compare the records of ``metrics`` with the run's."""
        self.model = model
        self.optimizer = optimizer
        self.metrics = metrics
        self.metadata = metadata
        self.start_from = start_from
        if self.is_main:
            start = metadata["starts"][-1]["step"]
            end = self.total_steps
            images = metrics.count_images(start, end)
            loggers = {
                PROGRESS_BAR: lambda: ProgressBar(self.folder, start, end, images=images),
                "record": lambda: Comparison(self.folder, self.compared),
            }
            metrics.loggers = {name: Guarded(name, build) for name, build in loggers.items()}

    def before_train(self, trainer: Trainer) -> None:
        trainer.engine.train_without_graphs("--replay")  # with the same bits
        config = self.metadata["config"]
        then = read_metadata(self.folder)
        self.is_same_work = (
            then["starts"][0]["gpus"] == self.plan.world_size
            and then["config"]["parallel"] == config["parallel"]
        )
        if self.start_from:
            ranks = {"gpus": self.plan.world_size, "parallel": config["parallel"]}
            parts = self.model, self.optimizer, None, self.metrics
            _, self.is_same_work = load_checkpoint(self.start_from, trainer, ranks, *parts)
        # An evaluation that was due at the checkpoint changes no weight.
        trainer.evaluated_step = trainer.step
        self.loader = trainer.train_dataloader.loader  # that of `WholeSteps`
        trainer.train_dataloader = self.recorder = Recorder(trainer.train_dataloader)

    def before_train_iter(self, trainer: Trainer) -> None:
        if trainer.step != self.total_steps - 1 or self.weights:
            return
        self.random = generator_states()
        self.position = self.loader.state_dict()
        parameters = named_shards(self.model)
        self.weights = {name: local.detach().clone() for name, local in parameters.items()}
        self.recorder.batches = []
        optimizer = trainer.engine.optimizer
        clip = optimizer.clip_gradients

        def measure_and_clip() -> None:
            gradients = {name: local.grad for name, local in parameters.items()}
            self.gradients = self._norms(gradients)
            clip()

        optimizer.clip_gradients = measure_and_clip

    def after_train_iter(self, trainer: Trainer, output: Tensor, label: Any, loss: Tensor) -> None:
        trainer.evaluated_step = trainer.step  # no evaluation is due
        if not self.weights:
            return
        self.results.append(MicroBatch(output.detach(), label, loss.item()))
        if trainer.step == self.total_steps:
            self._describe(trainer)

    def after_train(self, trainer: Trainer) -> None:
        if self.is_main:
            self._print()

    def _describe(self, trainer: Trainer) -> None:
        """Collect on rank 0 what the step did; every rank calls it."""
        engine = trainer.engine
        changes = {
            name: local.detach() - self.weights[name]
            for name, local in named_shards(self.model).items()
        }
        updates = self._norms(changes)
        weights = self._norms(self.weights)
        losses, images = [], []
        # Ranks of a tensor-parallel group have the same images.
        is_first = gpc.get_local_rank(ParallelMode.TENSOR) == 0
        own: tuple[list[float], list[Any]] = [], []
        if is_first:
            own = [part.loss for part in self.results], self._list_images(engine.criterion)
        for rank_losses, rank_images in gather(own):
            losses += rank_losses
            images += rank_images
        if self.target and is_first:
            self._write_images(own[1])
        self.step = {
            "step": trainer.step,
            "loss": fmean(losses),
            "grad_norm": engine.optimizer.grad_norm.item(),
            "clip_grad_norm": engine.optimizer.max_norm,
            "lr": trainer.learning_rate,
            "tensors": [
                {
                    "name": name,
                    "gradient": norm,
                    "update": updates[name],
                    "weight": weights[name],
                }
                for name, norm in self.gradients.items()
            ],
            "activations": self._measure_activations(engine),
            "images": images,
        }

    def _norms(self, tensors: Mapping[str, Tensor | None]) -> dict[str, float]:
        """Return the norms of full tensors, by name; {} on ranks without them."""
        parameters = named_shards(self.model)
        norms = {}
        for name, local in tensors.items():
            if local is not None:  # frozen
                full = gather_full(parameters[name], local)
                if full is not None:
                    norms[name] = full.float().norm().item()
        return norms

    def _list_images(self, criterion: Any) -> list[dict[str, Any]]:
        """Return this rank's images of the step, with their loss and random numbers."""
        names = self.metadata["data"]["class_names"]
        # All rows, of which this rank may have decoded some.
        sampler = replace(self.loader.sampler, sharing=ALONE)
        draws = sampler.draws(self.position["epoch"], self.position["samples"])
        images = []
        assert self.recorder.batches
        parts = zip(self.results, self.recorder.batches, draws, strict=False)
        for number, (part, (batch, _), draw) in enumerate(parts):
            is_blended = isinstance(part.label, Mapping)  # by Mixup or CutMix
            labels = part.label["target"] if is_blended else part.label
            for row, index in enumerate(draw.indices.tolist()):
                label = int(labels[row])
                images.append(
                    {
                        "image": self.loader.name_image(index),
                        "class": names[label] if label >= 0 else None,  # None: cannot be read
                        "loss": part.image_loss(criterion, row),
                        "is_finite": bool(batch[row].isfinite().all()),  # as the model saw it
                        "rank": gpc.get_local_rank(ParallelMode.DATA),
                        "micro_batch": number,
                        "row": row,
                        "blended_with": len(labels) - 1 - row if is_blended else None,  # its row
                        "random": draw.uniforms[row].tolist(),
                    }
                )
        return images

    def _write_images(self, images: Sequence[Values]) -> None:
        """Write this rank's ``images`` as the model saw them, in the order of their losses."""
        data = self.metadata["config"]["DATA"]
        std, mean = (torch.tensor(data[key])[:, None, None] for key in ("std", "mean"))
        assert self.target
        assert self.recorder.batches
        self.target.mkdir(parents=True, exist_ok=True)
        rows = chain.from_iterable(batch.cpu() for batch, _ in self.recorder.batches)
        for image, row_CYX in zip(images, rows, strict=True):
            pixels_CYX = (row_CYX * std + mean).nan_to_num().clamp(0, 1) * 255
            name = (
                f"loss{image['loss']:09.4f}-rank{image['rank']}-micro{image['micro_batch']}-"
                f"row{image['row']:04}-{Path(image['image']).stem}.png"
            )
            pixels_YXC = pixels_CYX.round().byte().permute(1, 2, 0)
            Image.fromarray(pixels_YXC.numpy()).save(self.target / name)

    def _measure_activations(self, engine: Any) -> dict[str, float]:
        """Return the largest absolute output of each layer in the forward passes of the step.

        They are repeated from the weights and random numbers before it, without a compiler. It is
        NaN where an output is.
        """
        largest: dict[str, Tensor] = {}

        def note(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            peaks = [tensor.float().abs().max() for tensor in tensors if tensor.numel()]
            peak = torch.stack([*peaks, torch.zeros_like(peaks[0])]).max()
            largest[name] = peak.maximum(largest.get(name, peak))

        for name, layer in self.model.named_modules():
            if not any(layer.children()):
                layer.register_forward_hook(partial(note, name))
        for name, local in named_shards(self.model).items():
            local.detach().copy_(self.weights[name])
        set_generator_states(self.random)
        assert self.recorder.batches
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            for batch in self.recorder.batches:
                inputs, _ = engine._load_batch(iter([batch]))
                engine.schedule._call_engine(engine, inputs)
        peaks = torch.stack([*largest.values()])
        peaks_RL = torch.tensor(gather(peaks.tolist()))  # of each rank
        return dict(zip(largest, peaks_RL.amax(0).tolist(), strict=True))

    def _print(self) -> None:
        """Print the step, and write it where ``--replay-to`` says."""
        step = self.step
        images = step["images"]
        print(describe_step(step))
        print_wrapped(f"metrics.jsonl: {self._compare()}")
        print(f"\nthe largest losses of {len(images):,} images:")
        images.sort(key=lambda image: _rank(image["loss"]), reverse=True)
        for image in images[:SHOWN]:
            where = f"rank {image['rank']}, micro-batch {image['micro_batch']}, row {image['row']}"
            print_wrapped(f"{image['loss']:8.4g}  {image['image']} ({image['class']}; {where})", 10)
        print("\nthe largest gradients (norms):")
        rows = sorted(step["tensors"], key=lambda row: _rank(row["gradient"]), reverse=True)
        _print_rows(rows, "gradient", "update", "weight", "name")
        print("\nthe largest activations:")
        print_wrapped(describe_activations(step))
        rows = [{"largest": peak, "name": name} for name, peak in step["activations"].items()]
        rows.sort(key=lambda row: _rank(row["largest"]), reverse=True)
        _print_rows(rows, "largest", "name")
        if self.target:
            self.target.mkdir(parents=True, exist_ok=True)
            file = self.target / "step.json"
            file.write_text(json.dumps(step, indent=1) + "\n")
            print(f"\nwritten      {file}, images as the model saw them")

    def _compare(self) -> str:
        """Return whether the records on the way are those of the run."""
        steps = [then["step"] for then, _ in self.compared]
        if not steps:
            return "it has no record of these steps to compare with; LOG.every=1 writes them all"
        why = "" if self.is_same_work else " (on other processes: close, not equal to the bit)"
        for then, now in self.compared:
            for name, value in then.items():
                if value != now[name]:
                    return (
                        f"differs from step {then['step']:,} on: {name} was {value}, is "
                        f"{now[name]}{why}"
                    )
        return f"equal to the bit at {counted(len(steps), 'record')}, {steps[0]:,} to {steps[-1]:,}"


def describe_step(step: Values) -> str:
    """Return the lines on the loss, the gradient and what the update did."""
    norm, most = step["grad_norm"], step["clip_grad_norm"]
    clipped = f", clipped to {most:g}" if most and norm > most else ""
    lines = [
        f"step {step['step']:,}: loss {step['loss']:.6g}, gradient norm {norm:.6g}{clipped}, "
        f"learning rate {step['lr']:.6g}"
    ]
    bad = [row["name"] for row in step["tensors"] if not math.isfinite(row["gradient"])]
    if not math.isfinite(norm):
        # The backward pass goes from the last layer to the first.
        from_head = list_some(bad[::-1], most=2) or "none"
        lines.append(
            f"the update was skipped: gradients of {len(bad)} of {len(step['tensors'])} tensors "
            f"are not finite, from the head back: {from_head}"
        )
    return "\n".join(lines)


def describe_activations(step: Values) -> str:
    """Return which layers have an output that is not finite, in the order of the forward pass."""
    layers = step["activations"]
    bad = [name for name, peak in layers.items() if not math.isfinite(peak)]
    if not bad:
        return "all are finite"
    given = [image["image"] for image in step["images"] if not image["is_finite"]]
    inputs = f"images that are not finite: {list_some(given)}" if given else "all images are finite"
    return (
        f"{inputs}; layers whose output is not: {len(bad)} of {len(layers)}, from the input on: "
        f"{list_some(bad, most=2)}"
    )


def _rank(value: float) -> float:
    """Return a key that sorts what is not finite last."""
    return value if math.isfinite(value) else math.inf


def _print_rows(rows: Sequence[Values], *columns: str) -> None:
    shown = [
        {
            name.replace("_", "-"): f"{row[name]:.4g}"
            if isinstance(row[name], float)
            else row[name]
            for name in columns
        }
        for row in rows[:SHOWN]
    ]
    print(format_table(shown))
