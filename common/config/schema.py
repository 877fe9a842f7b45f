"""Every key a config may have, declared once: type, range, unit, default, meaning.

UPPER CASE is ours, lower case is Colossal-AI's.
"""

import re
import textwrap
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, model_validator
from pydantic.fields import FieldInfo

from common.colossal import AMP_TYPE
from common.config.fields import (
    NONE,
    Number,
    Pair,
    Section,
    Triple,
    extra_of,
    key,
    section_of,
    suggest_key,
    values_of,
)
from common.config.model_arguments import ModelArguments
from common.errors import UserError
from common.optim.build import OPTIMIZERS, SCHEDULES


def _hold(condition: Any) -> AfterValidator:
    """Refuse a value for which ``condition`` does not hold."""

    def check(value: Any) -> Any:
        if not condition(value):
            raise ValueError
        return value

    return AfterValidator(check)


class Options(Section):
    """Options of which only those that a config names are passed on; they are keys of some choices of ``CHOICE``."""

    CHOICE: ClassVar[str] = ""

    @model_validator(mode="after")
    def _belong(self) -> "Options":
        choice = str(getattr(self, self.CHOICE, ""))
        for name in self.model_fields_set:
            of = extra_of(type(self).model_fields[name], "of")
            if of and choice not in of:
                known = [name for name, field in type(self).model_fields.items() if choice in extra_of(field, "of")]
                raise ValueError(
                    f"{name} has no effect with {self.CHOICE}={choice}, which takes {', '.join(known) or 'none'}"
                )
        return self


class Model(ModelArguments):
    num_classes: int | None = key(None, "classes of the head; `None`: as many as the data set has", ge=1, le=10**8)


class Data(Section):
    root: str | None = key(
        None,
        "the data set's folder, or s3://, gs://, az:// or https:// and a prefix; `None`: the environment "
        "variable `DATA`",
    )
    cache: str | None = key(None, "folder on a local disk that keeps what is read of shards (data.md)")
    cache_gb: Number = key(100, "most that `cache` takes of its disk", unit="GB", ge=1e-6, le=1e6)
    download: bool = key(False, "CIFAR-10, Caltech-101: fetch the data set into `root` if it is not there")
    allow_change: bool = key(False, "resume from a checkpoint that was trained on another data set")
    loader: Literal["dali", "torchvision"] = key("dali", "which loader decodes")
    workers: int | None = key(
        None, "decoding threads (DALI) or processes of a rank; `None`: its share of the cores", ge=0, le=1024
    )
    order: Literal[None, "blocks", "random"] = key(
        None,
        "order of an epoch over shards (data.md); blocks: in large reads, shuffled within windows; random: image by "
        "image; `None`: blocks where the training shards are remote or exceed the host's memory",
    )
    block: Number = key(16, "most that is read at once in blocks", unit="MB", ge=1e-3, le=1e4)
    window: int = key(2, "blocks that each of the 64 streams of `order='blocks'` shuffles", ge=1, le=10**4)
    crop: Literal["random_resized", "simple"] = key(
        "random_resized",
        "training crop; `simple` (DeiT III): the short side resized to the image size, padded by 4 reflected pixels, "
        "and a random square",
    )
    crop_scale: Annotated[Pair, _hold(lambda pair: 0 < pair[0] <= pair[1] <= 1)] = key(
        (0.08, 1.0), "share of the image's area that a training crop takes", says="(low, high), 0 < low <= high <= 1"
    )
    crop_ratio: Annotated[Pair, _hold(lambda pair: 0 < pair[0] <= pair[1] <= 100)] = key(
        (3 / 4, 4 / 3), "width / height of a training crop", says="(low, high), 0 < low <= high <= 100"
    )
    repeats: int = key(
        1,
        "repeated augmentation (arXiv 1901.09335): "
        "draws of an image in a row, in one global batch or, where `repeats` does not divide it, two; an epoch has as "
        "many draws as without, of one in `repeats` of the images",
        ge=1,
        le=1024,
    )
    flip: bool = key(True, "mirror half of the training images")
    crop_padding: int = key(
        4, "CIFAR-10: black border around an image before its training crop", unit="pixels", ge=0, le=1024
    )
    randaugment: Annotated[tuple[int, Number], _hold(lambda pair: pair[0] >= 1 and 0 <= pair[1] <= 10)] | None = key(
        None,
        "torchvision's RandAugment: operations per image, and their largest magnitude",
        says="None or (operations >= 1, magnitude from 0 to 10)",
        strict=False,
    )
    autoaugment: Literal[None, "cifar10"] = key(None, "CIFAR-10: AutoAugment's policy for training")
    interpolation: Literal["bilinear", "bicubic"] = key(
        "bilinear", "antialiased filter that resizes images, in training, evaluation and prediction"
    )
    eval_crop: Number = key(0.875, "share of the short side that evaluation's centre crop takes", ge=0.1, le=1)
    mean: Triple = key((0.485, 0.456, 0.406), "subtracted from R, G, B (0 to 1)", says="(R, G, B)")
    std: Annotated[Triple, _hold(lambda colour: min(colour) >= 1e-6)] = key(
        (0.229, 0.224, 0.225), "then divided by", says="(R, G, B), each >= 1e-6"
    )

    @model_validator(mode="after")
    def _check(self) -> "Data":
        for name in ("crop_scale", "crop_ratio"):
            value, default = getattr(self, name), type(self).model_fields[name].default
            if self.crop == "simple" and value != default:
                raise ValueError(
                    f"{name}={value} has no effect with crop='simple': set it to its default, {default}, or crop to "
                    "'random_resized'"
                )
        return self


BETAS = Annotated[Pair, _hold(lambda pair: all(0 <= beta < 1 for beta in pair))]
# The upper limit may be infinite, which is written float("inf").
Limit = Annotated[float, _hold(lambda value: value >= 0)]
LIMITS = Annotated[tuple[Limit, Limit], _hold(lambda pair: pair[0] <= pair[1])]


def _of(option: str) -> tuple[str, ...]:
    """Return the optimizers that take an option."""
    return tuple(name for name, entry in OPTIMIZERS.items() if option in entry.options)


class Optimizer(Options):
    CHOICE = "name"
    name: Literal[*OPTIMIZERS] = key(  # pyright: ignore[reportInvalidTypeForm]
        "adamw", "`lamb`: common/optim/lamb.py; the others are torch's"
    )
    decay_all: bool = key(
        True, "`False`: no weight decay on biases, norms, class token, registers and position embedding"
    )
    layer_decay: Number = key(
        1.0, "factor of the learning rate per layer from the head down, as timm's `layer_decay`; 1: none", gt=0, le=1
    )
    betas: BETAS = key(
        (0.9, 0.999),
        "decay of the moments",
        says="(beta1, beta2), each >= 0 and < 1",
        of=_of("betas"),
        strict=False,
    )
    eps: Number = key(
        None, "added to the root of the second moment; `adamw` 1e-8, `lamb` by variant", of=_of("eps"), gt=0
    )
    variant: Literal["colossalai", "apex", "deepspeed", "timm"] = key(
        "colossalai",
        "LAMB implementation to match; sets defaults for the four options below and `eps`",
        of=_of("variant"),
    )
    bias_correction: bool = key(None, "divide the moments by 1 - beta^step", of=_of("bias_correction"))
    max_grad_norm: Limit = key(
        None,
        "clip the gradient's norm inside the optimizer; infinite: never",
        of=_of("max_grad_norm"),
        says="number > 0",
        gt=0,
    )
    always_adapt: bool = key(None, "trust ratio for tensors without weight decay too", of=_of("always_adapt"))
    trust_range: LIMITS = key(
        None,
        "least and greatest trust ratio",
        of=_of("trust_range"),
        says="(low, high), 0 <= low <= high",
        strict=False,
    )
    momentum: Number = key(0.9, "0: none", of=_of("momentum"), ge=0, lt=1)
    dampening: Number = key(0.0, "of momentum", of=_of("dampening"), ge=0, le=1)
    nesterov: bool = key(False, "Nesterov momentum", of=_of("nesterov"))

    @model_validator(mode="after")
    def _check(self) -> "Optimizer":
        if self.nesterov and (not self.momentum or self.dampening):
            raise ValueError("nesterov=True needs momentum above 0 and dampening 0")
        self.model_fields_set.add("name")
        return self


class Log(Section):
    every: int = key(10, "steps between two lines of metrics.jsonl", unit="optimizer steps", ge=1)
    tensorboard: bool = key(True, "write TensorBoard event files too")
    trackers: Annotated[list[str], BeforeValidator(lambda names: _to_list(names))] = key(
        [], "additional loggers: `wandb`, offline unless `WANDB_MODE` is set"
    )


def _to_list(names: Any) -> Any:
    return list(names) if isinstance(names, tuple) else names


class Tensor(Options):
    size: int = key(1, "GPUs that share one model", ge=1)
    mode: Literal[None, "1d", "2d", "2.5d", "3d"] = key(None, "how they share it")
    depth: int = key(1, "2.5d: squares that make up the size", ge=1)


class Parallel(Options):
    pipeline: Annotated[int, BeforeValidator(lambda stages: _stages(stages))] = key(
        1, "pipeline parallelism is not supported: 1", ge=1
    )
    tensor: Tensor = key(Tensor(), "tensor parallelism; made from `TENSOR_PARALLEL_SIZE` and `_MODE`")


def _stages(pipeline: Any) -> Any:
    return pipeline.get("size", 1) if isinstance(pipeline, dict) else pipeline


def _member(mode: Any) -> Any:
    """Take AMP_TYPE.TORCH as --set and config.json spell it."""
    member = re.fullmatch(r"AMP_TYPE\.(\w+)", mode) if isinstance(mode, str) else None
    return AMP_TYPE.__members__.get(member[1], mode) if member else mode


SCALED = ("AMP_TYPE.TORCH", "AMP_TYPE.NAIVE", "AMP_TYPE.APEX")


class Fp16(Options):
    CHOICE = "mode"
    mode: Annotated[AMP_TYPE, BeforeValidator(_member)] | None = key(
        None,
        "TORCH: autocast; NAIVE: layers in half precision; APEX: by `opt_level`; `None`: full precision",
        says="AMP_TYPE.TORCH, AMP_TYPE.NAIVE, AMP_TYPE.APEX or None",
    )
    dtype: Annotated[Literal["float16", "bfloat16"], BeforeValidator(lambda kind: _dtype_name(kind))] | None = key(
        None,
        "compute dtype; `None`: bfloat16 where the device has it, else float16 on GPUs, float32 on CPUs",
        says="'float16', 'bfloat16' or None",
        of=SCALED,
    )
    opt_level: Literal["O0", "O1", "O2", "O3"] = key(
        "O1", "O0: full precision; O1: as TORCH; O2: as NAIVE; O3: without float32 weights", of=("AMP_TYPE.APEX",)
    )
    init_scale: Number = key(2.0**16, "first scale of the loss, in float16", of=SCALED, gt=0)
    growth_factor: Number = key(2.0, "raises the scale of the loss", of=SCALED, gt=1)
    backoff_factor: Number = key(0.5, "lowers the scale of the loss after an overflow", of=SCALED, gt=0, lt=1)
    growth_interval: int = key(2000, "between two raises without an overflow", unit="optimizer steps", of=SCALED, ge=1)
    enabled: bool = key(True, "scale the loss in float16", of=SCALED)


def _dtype_name(kind: Any) -> Any:
    name = str(kind)  # torch.float16 too
    return name.removeprefix("torch.") if name.startswith("torch.") else kind


class TorchDdp(Options):
    bucket_cap_mb: Number = key(25, "size of the buckets in which gradients are averaged", unit="MiB", gt=0, le=2**20)
    gradient_as_bucket_view: bool = key(True, "keep gradients in the buckets")
    broadcast_buffers: bool = key(True, "rank 0's buffers for all ranks, before each forward pass")
    find_unused_parameters: bool = key(False, "allow parameters that get no gradient")
    static_graph: bool = key(False, "the graph is the same in every step")


class GradientHandler(Section):
    type: Literal["DataParallelGradientHandler"] = key(..., "its name in Colossal-AI")


class Zero(Section):
    stage: Literal[1, 3] = key(..., "1: shard the optimizer's state; 3: parameters and gradients too")


MINUTES = r"(?=.*[1-9])\d{1,9}(\.\d{1,9})? ?min(utes?)?"
STEPS_OR_MINUTES = Annotated[
    int | str, _hold(lambda every: every >= 1 if isinstance(every, int) else re.fullmatch(MINUTES, every))
]


class Config(Section):
    TOTAL_BATCH_SIZE: int | None = key(
        None,
        "samples per optimizer step over all GPUs; `None`: `MICRO_BATCH_SIZE` x `gradient_accumulation` x processes",
        unit="images",
        ge=1,
    )
    MICRO_BATCH_SIZE: int | None = key(
        None, "samples per GPU and forward pass; derives the accumulation", unit="images", ge=1
    )
    BATCH_SIZE: int | None = key(
        None,
        "checked: `TOTAL_BATCH_SIZE // gradient_accumulation`; without the first, see `BATCH_SIZE` in "
        "[from-colossalai-examples.md](from-colossalai-examples.md)",
        unit="images",
        ge=1,
    )
    GPUS: int = key(1, "GPUs the recipe is written for; default GPU count for `--dry-run`", ge=1, le=10**6)
    NUM_EPOCHS: int = key(..., "passes over the training data", unit="epochs", ge=1)
    WARMUP_EPOCHS: Number = key(0, "linear warm-up; less than `NUM_EPOCHS`", unit="epochs", ge=0)
    MAX_STEPS: int | None = key(None, "stop early; the schedule is unchanged", unit="optimizer steps", ge=1)
    EVAL_EVERY: int = key(1, "epochs between evaluations; the last epoch is always evaluated", unit="epochs", ge=1)
    CHECKPOINT_EVERY: STEPS_OR_MINUTES = key(
        "10 min", "interval between checkpoints", says="optimizer steps, as 500, or minutes, as '10 min'"
    )
    KEEP: int = key(2, "newest checkpoints that are kept, beside the best", ge=1)
    LEARNING_RATE: Number = key(..., "peak, at the end of warm-up", gt=0)
    WEIGHT_DECAY: Number = key(0.0, "decoupled for AdamW and LAMB", ge=0)
    LR_SCHEDULE: Literal[*SCHEDULES] = key(  # pyright: ignore[reportInvalidTypeForm]
        "cosine", "decay after warm-up, to 0"
    )
    OPTIMIZER: Optimizer = key(Optimizer(), "the optimizer, and its own options")
    EMA: Number = key(0.0, "decay of the weights' moving average, which is then evaluated; 0: none", ge=0, lt=1)
    MODEL: Model = key(Model(), "the Vision Transformer's shape")
    OUTPUT: str | None = key(
        None, "folder of the run, unless `--output` names one; `None`: outputs/<name of the config>"
    )
    INIT: str | None = key(
        None,
        "weights to start from: a run, a checkpoint, a .safetensors file, a state_dict, a model of timm's by name, or "
        "hf-hub:USER/NAME; set MODEL.heads too for a file that does not contain it",
    )
    FREEZE: Literal[None, "body"] = key(
        None, "`body`: train the head alone, on the features of `INIT`'s weights (linear probing)"
    )
    MIXUP: Number = key(0.0, "alpha of Mixup's Beta distribution; 0: no Mixup", ge=0, le=1000)
    CUTMIX: Number = key(0.0, "alpha of CutMix's Beta distribution; beside `MIXUP`, half of the batches", ge=0, le=1000)
    THREE_AUGMENT: bool = key(False, "3-Augment (DeiT III): an image is made grey, solarised or blurred")
    COLOR_JITTER: Number = key(
        0.0, "range of the factors of brightness, contrast and saturation around 1; 0: none", ge=0, le=1
    )
    ERASING: Number = key(0.0, "probability that a rectangle of a training image is erased", ge=0, le=1)
    LABEL_SMOOTHING: Number = key(0.0, "share of the target spread over all classes", ge=0, lt=1)
    BCE_THRESHOLD: Number | None = key(
        None,
        "binary cross-entropy over the classes: those with more than this share of the label (after Mixup, CutMix) are "
        "on; DeiT III: 0; `None`: cross-entropy",
        ge=0,
        lt=1,
    )
    DATA: Data = key(Data(), "where the images are and how they are read")
    LOG: Log = key(Log(), "what is written while training")
    MAX_SKIPPED: int = key(20, "updates in a row that may be skipped for numbers that are not finite", ge=0)
    TIMEOUT: Number = key(
        600, "after which a rank that is lost or hangs is named and the run ends", unit="seconds", ge=1, le=10**7
    )
    SEED: int = key(1024, "seed for initialisation, sampling, augmentation, dropout", ge=0)
    TENSOR_PARALLEL_SIZE: int = key(1, "GPUs that share one model; `parallel` is made from it", ge=1)
    TENSOR_PARALLEL_MODE: Literal[None, "1d", "2d", "2.5d", "3d"] = key(None, "how they share it")
    parallel: Parallel | None = key(None, "Colossal-AI's form of the two keys above")
    zero: Zero | None = key(
        None,
        "ZeRO over the data-parallel GPUs, with or without 1d tensor parallelism ([parallel-modes.md]"
        "(parallel-modes.md)); `None`: every data-parallel GPU holds the whole state",
    )
    fp16: Fp16 | None = key(None, "mixed precision; `None`: float32")
    TF32: bool = key(True, "let float32 products round their inputs to TF32 on GPUs that have it")
    COMPILE: bool | Literal["model", "graphs"] | None = key(
        None,
        "torch.compile: True: the transformer's blocks; 'model': the whole model; 'graphs': that, replayed as CUDA "
        "graphs, for small models; `None`: True on GPUs without tensor parallelism",
        says="True, False, None, 'model' or 'graphs'",
    )
    gradient_accumulation: int | None = key(None, "micro-batches per optimizer step", ge=1)
    clip_grad_norm: Number = key(0.0, "largest norm of the gradient of all weights; 0: no clipping", ge=0)
    torch_ddp: TorchDdp = key(TorchDdp(), "options of torch's DistributedDataParallel")
    gradient_handler: Annotated[list[GradientHandler], _hold(bool)] | None = key(
        None,
        "Colossal-AI's gradient handlers, instead of DistributedDataParallel",
        says="None or [dict(type='DataParallelGradientHandler')]",
    )
    cudnn_benchmark: bool = key(False, "let cuDNN search for its fastest kernels")
    cudnn_deterministic: bool = key(False, "restrict cuDNN to deterministic kernels")

    @model_validator(mode="after")
    def _check(self) -> "Config":
        if self.TOTAL_BATCH_SIZE is None and self.MICRO_BATCH_SIZE is None:
            raise ValueError(f"TOTAL_BATCH_SIZE is missing: {type(self).model_fields['TOTAL_BATCH_SIZE'].description}")
        if self.WARMUP_EPOCHS >= self.NUM_EPOCHS:
            raise ValueError(
                f"WARMUP_EPOCHS={self.WARMUP_EPOCHS} leaves no epoch after warm-up: it must be less than "
                f"NUM_EPOCHS={self.NUM_EPOCHS}"
            )
        if self.FREEZE and self.OPTIMIZER.layer_decay != 1:
            raise ValueError(
                f"FREEZE={self.FREEZE!r} trains the head alone, on which OPTIMIZER.layer_decay="
                f"{self.OPTIMIZER.layer_decay} has no effect: set OPTIMIZER.layer_decay=1 or FREEZE=None"
            )
        if self.BCE_THRESHOLD is not None and self.LABEL_SMOOTHING:
            raise ValueError(
                f"BCE_THRESHOLD={self.BCE_THRESHOLD} undoes LABEL_SMOOTHING={self.LABEL_SMOOTHING}: set "
                "LABEL_SMOOTHING=0 or BCE_THRESHOLD=None"
            )
        return self


def all_keys(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every key under its dotted name, those inside a dict after it."""
    for name, field in section.model_fields.items():
        yield prefix + name, field
        if inside := section_of(field):
            yield from all_keys(inside, f"{prefix}{name}.")


def find_key(name: str) -> FieldInfo:
    """Return the key of a dotted name; raise `UserError` with the nearest for an unknown one."""
    keys = dict(all_keys())
    if name not in keys:
        raise UserError(f"{name}: unknown key{suggest_key(name, keys)}")
    return keys[name]


def plain_values(section: Section) -> dict[str, Any]:
    """Return a section as a dict of plain values; of `Options` only those that were named."""
    names = section.model_fields_set if isinstance(section, Options) else set(type(section).model_fields)
    return {name: _plain(getattr(section, name)) for name in type(section).model_fields if name in names}


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return plain_values(value)
    return [_plain(item) for item in value] if isinstance(value, list) else value


def keys_as_markdown() -> str:
    """Return the table of all keys that docs/config.md holds."""
    rows = ["| key | values | default | meaning |", "| --- | --- | --- | --- |"]
    rows += [
        f"| `{key}` | {'dict' if section_of(field) else values_of(field)} | {_default(field)} | {_meaning(field)} |"
        for key, field in all_keys()
    ]
    return "\n".join(rows)


def describe_keys(name: str = "", width: int = 80) -> str:
    """Return what the key ``name`` means, and those inside it, or a line on each key, wrapped at ``width`` columns."""
    if not name:
        return "\n".join(_wrap(f"{key:<27} {_meaning(field)}", width, 28) for key, field in all_keys())
    find_key(name)
    shown = [(key, field) for key, field in all_keys() if key == name or key.startswith(f"{name}.")]
    return "\n".join(
        _wrap(line, width, indent)
        for key, field in shown
        for line, indent in (
            (f"{key}: {_meaning(field)}", 4),
            (f"    values   {values_of(field)}", 13),
            (f"    default  {_default(field)}", 13),
        )
    )


def _wrap(markdown: str, width: int, indent: int) -> str:
    text = re.sub(r"\[([^]]+)\]\([^)]+\)", r"docs/\1", markdown).replace("`", "")
    return textwrap.fill(text, width, subsequent_indent=" " * indent, break_on_hyphens=False)


def _meaning(field: FieldInfo) -> str:
    of = extra_of(field, "of")
    of = [] if set(of) == set(SCALED) else [name.removeprefix("AMP_TYPE.") for name in of]
    return f"{', '.join(of)}: {field.description}" if of else field.description  # pyright: ignore[reportReturnType]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if isinstance(field.default, Section) or field.default == []:
        return ""
    if field.default is None and extra_of(field, "of") and NONE not in get_args(field.annotation):
        return "by variant"
    text = field.default
    if isinstance(text, tuple):
        return "`(" + ", ".join(f"{item:.4g}" for item in text) + ")`"
    return f"`{text!r}`"
