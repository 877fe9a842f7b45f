"""A started run, as `start_run` returns it, and what it leaves in its folder."""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from common.checkpoint.content import CONFIG, METRICS
from common.checkpoint.hook import CheckpointHook
from common.checkpoint.save import checkpoint_path, find_best, newest_checkpoint
from common.checkpoint.weights import load_pretrained
from common.config.class_weights import class_weights
from common.config.plan import Plan
from common.data.sharing import Sharing
from common.engine.collectives import ask_first_rank
from common.engine.groups import shutdown
from common.engine.upstream import BaseHook, ParallelMode, get_accelerator, gpc
from common.errors import UserError
from common.files import ROOT, own_file, short_path
from common.launch.signals import signal_name, stop_signals
from common.locks import unlock_folder
from common.metrics.batch_hook import BatchHook
from common.metrics.evaluation import metric_value
from common.metrics.hook import MetricsHook
from common.metrics.measurement import Measurement
from common.metrics.metrics_file import Metrics, read_metrics
from common.metrics.resolution_hook import ResolutionHook
from common.model.ema import EmaHook
from common.model.flops import flops_per_image, knows_peak, peak_images_per_s
from common.process import Stopped
from common.run.bad_step import BadStepHook
from common.run.replay import Replay
from common.text import print_wrapped, two_digits


@dataclass
class Run:
    """A started run. ``is_main``: whether this process writes files and prints."""

    plan: Plan
    output: Path
    is_main: bool
    metadata: dict[str, Any]  # content of config.json
    start_from: Path | None  # the checkpoint to resume from
    measurement: Measurement | None  # what runs instead of training

    @property
    def device(self) -> torch.device:
        """This process's GPU, or the CPU."""
        return get_accelerator().get_current_device()

    @property
    def data_parallel(self) -> dict[str, Any]:
        """This process's data-parallel rank and size: ``dp_rank``, ``dp_size``.

        With tensor-parallel ranks, ``sharing`` too.
        """
        options: dict[str, Any] = dict(
            dp_rank=gpc.get_local_rank(ParallelMode.DATA), dp_size=self.plan.data_parallel
        )
        if self.plan.tensor_parallel > 1:
            options["sharing"] = tensor_sharing()
        return options

    @property
    def augmentation(self) -> dict[str, Any]:
        """The arguments of `BatchAugment`."""
        config = self.metadata["config"]
        return dict(
            seed=config["SEED"],
            mean=config["DATA"]["mean"],
            std=config["DATA"]["std"],
            three_augment=config["THREE_AUGMENT"],
            color_jitter=config["COLOR_JITTER"],
            erasing=config["ERASING"],
            erasing_mode=config["ERASING_MODE"],
            mixup=config["MIXUP"],
            cutmix=config["CUTMIX"],
            mixup_off_epochs=config["MIXUP_OFF_EPOCHS"],
            num_epochs=config["NUM_EPOCHS"],
        )

    @property
    def class_weights(self) -> torch.Tensor | None:
        """The weights of CLASS_WEIGHTS, float32 [num_classes], or None."""
        weights = class_weights(self.metadata["config"], self.metadata["data"]["class_counts"])
        if weights is None:
            return None
        return torch.tensor(weights, dtype=torch.float32, device=self.device)

    def load_init(self, model: nn.Module) -> None:
        """Load the weights of ``INIT`` into ``model``, not sharded yet, unless the run resumes."""
        source = self.metadata["config"]["INIT"]
        if not source or self.start_from is not None:
            return
        classes = self.metadata["data"]["class_names"], self.metadata["init_classes"]
        done = ask_first_rank(lambda: load_pretrained(model, source, *classes))
        # It names the checkpoint: INIT may name a run or a link.
        self.metadata["starts"][-1]["init"] = done
        # The others load after the first: it may have downloaded the file.
        if not self.is_main:
            load_pretrained(model, source, *classes)
        else:
            print_wrapped(done)

    def build_hooks(self, model: nn.Module, optimizer: Optimizer) -> list[BaseHook]:
        """Write the run's folder, now that all checks have passed, and return the hooks."""
        config = self.metadata["config"]
        sizes: list[BaseHook] = [ResolutionHook(self.plan, self.is_main)]
        if self.plan.has_batches:
            sizes.append(BatchHook(self.plan, self.metadata, self.is_main))
        if isinstance(self.measurement, Replay):
            metrics = self._build_metrics(is_main=False)
            self.measurement.attach(model, optimizer, metrics, self.metadata, self.start_from)
            return [*sizes, metrics, self.measurement]
        # A measurement leaves no record and no checkpoint.
        if self.measurement:
            return [*sizes, self.measurement]
        if self.is_main:
            write_start(self.output, self.metadata, self.start_from)
        metrics = self._build_metrics(self.is_main)
        ema = EmaHook(model, config["EMA"], config["EMA_WARMUP"]) if config["EMA"] else None
        checkpoints = CheckpointHook(
            self.output / "checkpoints",
            model,
            optimizer,
            metrics,
            metadata=self.metadata,
            every=config["CHECKPOINT_EVERY"],
            keep=config["KEEP"],
            start_from=self.start_from,
            averages=ema.averages if ema else None,
        )
        hooks = *sizes, BadStepHook(model, metrics), metrics, ema, checkpoints
        return [hook for hook in hooks if hook is not None]

    def _build_metrics(self, is_main: bool) -> MetricsHook:
        """Return the hook of the metrics, with loggers if ``is_main``."""
        config = self.metadata["config"]
        start = self.metadata["starts"][-1]["step"]
        shape = config["MODEL"]
        frozen = config["FREEZE"]
        peaks = {}
        if knows_peak(self.device):
            devices = self.plan.world_size
            peak = peak_images_per_s(shape, config["fp16"], devices, self.device, frozen)
            # The FLOP/s of the hardware, from which images of each size get their own peak.
            peak_flops = peak * flops_per_image(shape, frozen)
            for resolution in self.plan.resolutions:
                size = resolution.image_size
                peaks[size] = peak_flops / flops_per_image(shape, frozen, size)
        log = config["LOG"]
        return MetricsHook(
            self.plan,
            self.output,
            is_main=is_main,
            peak_samples_per_s=peaks,
            start=start,
            every=log["every"],
            tensorboard=log["tensorboard"],
            trackers=log["trackers"],
            best=config["BEST"],
        )

    def finish(self) -> None:
        """Leave the process group and print the output paths; the last line is the final top-1.

        After a signal, raises `Stopped`.
        """
        shutdown()  # first: no rank waits while this one prints
        unlock_folder(self.output)
        folder = self.output / "checkpoints"
        checkpoint = newest_checkpoint(folder)
        ended = self.metadata["plan"]["last_step"]
        # A batch that grew by BATCH_SIZES="noise" made the run shorter.
        planned = min(self.plan.last_step, self.plan.count_steps(self.plan.total_steps))
        # as the checkpoint's: that it is finished
        if self.is_main and not self.measurement and ended < self.plan.last_step:
            write_config(self.output, self.metadata)
        stopped = stop_signals.agreed
        stop_signals.restore()
        if stopped:
            if self.is_main:
                print(
                    f"{signal_name(stopped)}: stopped; rerun the command to resume from "
                    f"{checkpoint}",
                    flush=True,
                )
            raise Stopped(stopped)
        if self.measurement or not self.is_main:
            return
        shown = short_path(self.output)
        config = self.metadata["config"]
        if ended < planned:
            why = f"{config['PATIENCE']} evaluations without a better {config['BEST']} (PATIENCE)"
            print(f"ended        at step {ended:,} of {planned:,}: {why}")
        print(f"curves       {shown}/loss.jpeg\n             {shown}/acc.jpeg")
        print(f"checkpoint   {checkpoint and short_path(checkpoint)}")
        print(f"tensorboard  tensorboard --logdir {quote(f'{shown}/tensorboard')}")
        if any(self.output.glob("wandb/offline-run-*")):
            print(f"wandb        wandb sync {quote(f'{shown}/wandb')}/offline-run-*")
        report = short_path(ROOT / "scripts" / "report.py")
        print(f"next         python {quote(report)} {quote(shown)}")
        print("             # or evaluate.py, predict.py, export.py")
        for record in reversed(read_records(self.output, "train")):
            if record.get("noise_scale"):
                images = two_digits(record["noise_scale"])
                step = f"step {record['step']:,}"
                print(f"noise scale  {images} images at {step}, batch {self.plan.total_batch:,}")
                break
        evaluations = read_records(self.output, "eval")
        best = find_best(self.output, evaluations)
        if best and best["step"] != evaluations[-1]["step"]:
            where = f"checkpoints/{checkpoint_path(folder, best['step']).name}"
            print(f"best         {describe_best(best, config['BEST'])} ({where})")
        print(f"top1={evaluations[-1]['top1']:.4f}" if evaluations else "top1=?", flush=True)


def tensor_sharing() -> Sharing:
    """Return this rank's part in the decoding of its tensor-parallel group."""
    mode = ParallelMode.TENSOR
    return Sharing(
        gpc.get_local_rank(mode),
        gpc.get_world_size(mode),
        gpc.get_group(mode),
        gpc.get_cpu_group(mode),
    )


def read_records(output: Path, kind: str) -> list[Metrics]:
    """Return a run's records of a kind; none where they cannot be read, of which loggers warned."""
    with suppress(UserError):
        return [record for record in read_metrics(output) if record["kind"] == kind]
    return []


def describe_best(best: Metrics, metric: str) -> str:
    """Return its ``metric``, the config's BEST, and its step."""
    return f"{metric} {metric_value(best, metric):.4f} at step {best['step']}"


def write_config(output: Path, metadata: dict[str, Any]) -> None:
    """Write config.json at once: a reader, or a crash, finds the old one or the new."""
    partial = output / ".config.partial"
    # default=str: AMP_TYPE becomes the text that the schema reads back.
    own_file(partial).write_text(json.dumps(metadata, indent=2, default=str) + "\n")
    partial.replace(output / CONFIG)


def write_start(output: Path, metadata: dict[str, Any], start_from: Path | None) -> None:
    """Write config.json, and metrics.jsonl up to the checkpoint ``start_from``."""
    try:
        write_config(output, metadata)
        # records after the checkpoint are of steps that are taken again
        metrics = b"" if start_from is None else (start_from / METRICS).read_bytes()
        # a disk that was full may have taken part of the last line
        whole = metrics.rfind(b"\n") + 1
        own_file(output / METRICS).write_bytes(metrics[:whole])
    except OSError as error:
        raise UserError(
            f"--output {output}: cannot be written ({error.strerror}); choose another"
        ) from error
