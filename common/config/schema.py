"""Every key a config may have, declared once: type, range, unit, default, meaning.

UPPER CASE is ours, lower case is Colossal-AI's.
"""

import operator
import re
import textwrap
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Le, Predicate
from pydantic import BeforeValidator, SerializeAsAny, WrapValidator, model_validator
from pydantic.fields import FieldInfo

from common.config.fields import (
    OF_CHOICE,
    AnySequence,
    BelowOne,
    Natural,
    NonNegative,
    Number,
    Options,
    Pair,
    Positive,
    Section,
    Triple,
    UpToOne,
    all_keys,
    flatten,
    key,
    suggest_key,
    values_of,
)
from common.config.model_keys import Model, Size, TimmModel, choose_model
from common.engine.upstream import AMP_TYPE
from common.errors import UserError
from common.optim.build import OPTIMIZERS
from common.optim.schedules import BATCH_FACTORS, SCHEDULES, STABLE, count_decay_epochs

Magnitude = Annotated[NonNegative, Le(10)]
TorchvisionRandAugment = AnySequence[tuple[Natural, Magnitude]]
TimmRandAugment = Annotated[
    str,
    Predicate(
        lambda text: bool(re.fullmatch(r"rand(-(m|n|mmax|inc)\d+|-(p|mstd)\d+(\.\d+)?)*", text))
    ),
]
CropScale = Annotated[Pair, Predicate(lambda pair: 0 < pair[0] <= pair[1] <= 1)]
CropRatio = Annotated[Pair, Predicate(lambda pair: 0 < pair[0] <= pair[1] <= 100)]
# Images are divided by it.
Deviation = Annotated[Triple, Predicate(lambda colour: min(colour) >= 1e-6)]


class Data(Section):
    root: str | None = None
    """folder of the data set; `None`: `$DATA`, else ./data, to which CIFAR-10 and Caltech-101 are
    downloaded"""

    download: bool = False
    """CIFAR-10, Caltech-101: download to `root` what is not there"""

    loader: Literal["dali", "torchvision"] = "dali"
    """decoder"""

    workers: int | None = key(None, ge=0, le=1024)
    """decoding threads or processes per rank; `None`: its cores, less 3 for DALI on a GPU"""

    order: Literal[None, "blocks", "random"] = None
    """order over shards (docs/data.md): large shuffled blocks, or image by image; `None`: blocks if
    the training shards exceed the host's memory"""

    sampling: Literal[None, "balanced"] = None
    """draw classes equally often (docs/unequal-classes.md)"""

    block: Number = key(16, ge=1e-3, le=1e4)
    """largest block, in MB"""

    window: int = key(2, ge=1, le=10**4)
    """blocks that each of the 64 streams shuffles"""

    split: Literal[None, "counted"] = None
    """hold out validation images by name, or by count as earlier versions (docs/prepare.md);
    `None`: by name, or as the resumed run"""

    labels: str | None = None
    """table of paths and labels, from `root`; needs `loader='torchvision'` (docs/prepare.md)"""

    columns: str | None = None
    """its columns, as 'path=file,label=species,split=fold'; `None`: by content"""

    crop: Literal["random_resized", "simple"] = "random_resized"
    """training crop; `simple` (DeiT III): a random square of the resized image, padded by 4
    pixels"""

    crop_scale: CropScale = key((0.08, 1.0), title="(low, high), 0 < low <= high <= 1")
    """area of a training crop, of the image's"""

    crop_ratio: CropRatio = key((3 / 4, 4 / 3), title="(low, high), 0 < low <= high <= 100")
    """width / height of a training crop"""

    repeats: int = key(1, ge=1, le=1024)
    """repeated augmentation (arXiv 1901.09335): draws of an image in a batch"""

    flip: bool = True
    """mirror half of the training images"""

    crop_padding: int = key(4, ge=0, le=1024)
    """CIFAR-10: pixels around an image before its crop"""

    randaugment: TorchvisionRandAugment | TimmRandAugment | None = key(
        None,
        title="None, (operations >= 1, magnitude from 0 to 10) or text, as 'rand-m9-mstd0.5-inc1'",
    )
    """`(n, m)`: torchvision's `RandAugment(n, 3 * m)`, m as in the paper; text: timm's, needs
    `loader='torchvision'`"""

    autoaugment: Literal[None, "cifar10"] = None
    """CIFAR-10: AutoAugment's policy"""

    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """antialiased resizing filter"""

    eval_crop: Number = key(0.875, ge=0.1, le=1)
    """share of the short side in evaluation's centre crop"""

    mean: Triple = key((0.485, 0.456, 0.406), title="(R, G, B)")
    """subtracted from R, G, B in 0 to 1"""

    std: Deviation = key((0.229, 0.224, 0.225), title="(R, G, B), each >= 1e-6")
    """then divided by"""


Betas = AnySequence[tuple[BelowOne, BelowOne]]
# The upper limit may be infinite, which is written float("inf").
Limit = Annotated[float, Predicate(lambda value: value >= 0)]
Limits = Annotated[AnySequence[tuple[Limit, Limit]], Predicate(lambda pair: pair[0] <= pair[1])]
TensorMode = Literal[None, "1d", "2d", "2.5d", "3d"]


class Optimizer(Options):
    CHOICE = "name"
    TAKES: ClassVar = {name: entry.defaults for name, entry in OPTIMIZERS.items()}
    name: Literal[*OPTIMIZERS] = "adamw"  # pyright: ignore[reportInvalidTypeForm]
    """`lamb`, `muon`: common/optim/; the others are torch's"""

    decay_all: bool = True
    """`False`: no weight decay on biases, norms, class token, registers, position embedding"""

    layer_decay: Number = key(1.0, gt=0, le=1)
    """factor of the learning rate per layer from the head down"""

    # these belong to some optimizers; their defaults are in `OPTIMIZERS`
    betas: Betas = key(None, title="(beta1, beta2), each >= 0 and < 1")
    """decay of the moments"""

    eps: Positive = OF_CHOICE
    """added to the root of the second moment"""

    variant: Literal["colossalai", "apex", "deepspeed", "timm"] = OF_CHOICE
    """LAMB implementation to match; sets `eps` and the four options below"""

    bias_correction: bool = OF_CHOICE
    """divide the moments by 1 - beta^step"""

    max_grad_norm: Limit = key(None, title="number > 0", gt=0)
    """clip the gradient's norm; infinite: never"""

    always_adapt: bool = OF_CHOICE
    """trust ratio also for tensors without weight decay"""

    trust_range: Limits = key(None, title="(low, high), 0 <= low <= high")
    """least and greatest trust ratio"""

    momentum: BelowOne = OF_CHOICE
    """momentum"""

    adamw_lr_scale: Positive = OF_CHOICE
    """factor of the learning rate of what AdamW updates"""

    bfloat16: bool = OF_CHOICE
    """orthogonalize in bfloat16 on CPUs with AMX or AVX512_BF16, as on GPUs"""

    filters: bool = OF_CHOICE
    """orthogonalize the filters of convolutions and patch embedding too, as matrices
    [outputs, rest]"""

    dampening: UpToOne = OF_CHOICE
    """dampening of momentum"""

    nesterov: bool = OF_CHOICE
    """Nesterov momentum"""

    @model_validator(mode="after")
    def _check(self) -> "Optimizer":
        # `model_dump` leaves out what is not set, but readers need the default's name as well.
        self.model_fields_set.add("name")
        return self


class Log(Section):
    every: Natural = 10
    """optimizer steps per line of metrics.jsonl"""

    tensorboard: bool = True
    """write TensorBoard event files"""

    noise_scale: bool | None = None
    """measure the gradient noise scale (docs/noise-scale.md); `None`: if a step has several
    micro-batches or data-parallel GPUs, except with 2d, 2.5d, 3d"""

    trackers: AnySequence[list[str]] = key([])
    """`wandb`: offline unless `WANDB_MODE` is set, as project vit-large-batch unless
    `WANDB_PROJECT` is set"""


class TensorParallel(Options):
    size: Natural = 1
    """GPUs that share one model"""

    mode: TensorMode = None
    """how they share it"""

    depth: Natural = 1
    """2.5d: squares that make up the size"""


# Colossal-AI takes a dict too.
Pipeline = Annotated[
    int, BeforeValidator(lambda stages: stages.get("size") if isinstance(stages, dict) else stages)
]


class Parallel(Options):
    pipeline: Pipeline = key(1, ge=1)
    """1: pipelines are not supported"""

    tensor: TensorParallel = TensorParallel()
    """made from `TENSOR_PARALLEL_SIZE` and `_MODE`"""


# As config.json spells it too.
Mode = Annotated[
    AMP_TYPE,
    BeforeValidator(lambda mode: {str(known): known for known in AMP_TYPE}.get(str(mode), mode)),
]


class Fp16(Options):
    CHOICE = "mode"
    TAKES: ClassVar = {"AMP_TYPE.APEX": {"opt_level": "O1"}}
    mode: Mode | None = key(None, title="AMP_TYPE.APEX, AMP_TYPE.TORCH, AMP_TYPE.NAIVE or None")
    """TORCH: autocast; NAIVE: layers in half precision; APEX: by `opt_level`"""

    dtype: Literal["float16", "bfloat16"] | None = None
    """compute dtype; `None`: bfloat16 if the device has it, else float16 on GPUs, float32 on
    CPUs"""

    opt_level: Literal["O0", "O1", "O2", "O3"] = OF_CHOICE
    """O0: float32; O1: TORCH; O2: NAIVE; O3: no float32 weights"""

    # The scale's defaults are torch.amp.GradScaler's.
    init_scale: Positive = 2.0**16
    """first loss scale in float16"""

    growth_factor: Number = key(2.0, gt=1)
    """raises the loss scale"""

    backoff_factor: Number = key(0.5, gt=0, lt=1)
    """lowers the loss scale after an overflow"""

    growth_interval: Natural = 2000
    """steps without an overflow before a raise"""

    enabled: bool = True
    """scale the loss in float16"""

    @model_validator(mode="after")
    def _needs_mode(self) -> "Fp16":
        named = self.model_fields_set - {"mode"}
        if self.mode is None and named:
            raise ValueError(
                f"{min(named)} has no effect with mode=None: set mode to one of AMP_TYPE"
            )
        return self


# These are arguments of torch.nn.parallel.DistributedDataParallel.
class TorchDdp(Options):
    bucket_cap_mb: Number = key(25, gt=0, le=2**20)
    """MiB per bucket of gradients"""

    # torch's default, False, holds each gradient twice.
    gradient_as_bucket_view: bool = True
    """keep gradients in the buckets"""

    broadcast_buffers: bool = True
    """copy rank 0's buffers before each forward pass"""

    find_unused_parameters: bool = False
    """allow parameters that get no gradient"""

    static_graph: bool = False
    """the graph is the same in every step"""


class Zero(Section):
    stage: Literal[1, 3]
    """1: shard the optimizer's state; 3: parameters and gradients too"""


EpochsAndImages = AnySequence[tuple[Natural, Natural]]
EpochsAndPixels = AnySequence[tuple[Natural, Size]]
EpochsPixelsAndBatch = AnySequence[tuple[Natural, Size, Natural]]
# One digit has to be other than 0: "0 min" would save after every step.
MINUTES = r"(?=.*[1-9])\d{1,9}(\.\d{1,9})? ?min(utes?)?"
STEPS_OR_MINUTES = Annotated[
    int | str,
    Predicate(
        lambda every: every >= 1 if isinstance(every, int) else bool(re.fullmatch(MINUTES, every))
    ),
]


class Config(Section):
    TOTAL_BATCH_SIZE: Natural | None = None
    """samples per optimizer step over all GPUs; `None`: from `MICRO_BATCH_SIZE`"""

    MICRO_BATCH_SIZE: Natural | None = None
    """samples per forward pass on a GPU, or on the GPUs that share one model"""

    BATCH_SIZE: Natural | None = None
    """`TOTAL_BATCH_SIZE // gradient_accumulation`, for scripts that read it; a stated value is only
    checked"""

    GPUS: int = key(1, ge=1, le=10**6)
    """GPUs the recipe is written for: `--dry-run`'s default"""

    NUM_EPOCHS: Natural
    """passes over the training data"""

    WARMUP_EPOCHS: NonNegative = 0
    """epochs of linear warm-up; less than `NUM_EPOCHS`"""

    MAX_STEPS: Natural | None = None
    """stop early after these optimizer steps, with the same schedule"""

    IMAGE_SIZES: list[EpochsAndPixels | EpochsPixelsAndBatch] = key(
        [], title="list of (epochs, pixels) or (epochs, pixels, images), integers >= 1"
    )
    """side of the training images in the first epochs, and their micro-batch if another; then
    `MODEL.image_size` (docs/recipes.md)"""

    BATCH_SIZES: list[EpochsAndImages] | Literal["noise"] = key(
        [], title="list of (epochs, images), integers >= 1, or 'noise'"
    )
    """batches of the first epochs, over all GPUs; `TOTAL_BATCH_SIZE` afterwards; 'noise': from
    `SMALLEST_BATCH` by doubling, as the noise scale grows. Then epochs, and with them learning
    rate, warm-up, decay and evaluation, go by images; what counts steps counts updates of any size
    (docs/noise-scale.md)"""

    BATCH_LR: Literal[*BATCH_FACTORS] = "sqrt"  # pyright: ignore[reportInvalidTypeForm]
    """factor on the learning rate of another batch than `TOTAL_BATCH_SIZE`, by their ratio"""

    SMALLEST_BATCH: Natural | None = None
    """first batch of `BATCH_SIZES='noise'`; `None`: `TOTAL_BATCH_SIZE / 16`"""

    NOISE_FACTOR: Positive = 1.0
    """`BATCH_SIZES='noise'`: at the end of an epoch the batch doubles if the noise scale times this
    is at least the doubled batch"""

    EVAL_EVERY: Natural = 1
    """epochs between evaluations; the last is always evaluated"""

    CHECKPOINT_EVERY: STEPS_OR_MINUTES = key(
        "10 min", title="optimizer steps, as 500, or minutes, as '10 min'"
    )
    """interval between checkpoints"""

    KEEP: Natural = 2
    """newest checkpoints to keep, beside the best"""

    BEST: Literal["top1", "loss", "mean_recall", "macro_f1", "auroc"] = "top1"
    """metric of `checkpoints/best`; ties go to the lower loss; `mean_recall`, `macro_f1`: means
    over classes; `auroc`: for two classes"""

    PATIENCE: Natural | None = None
    """finish after this many evaluations without a new best"""

    LEARNING_RATE: Positive
    """peak, at the end of warm-up"""

    WEIGHT_DECAY: NonNegative = 0.0
    """decoupled, except for `sgd`"""

    LR_SCHEDULE: Literal[*SCHEDULES] = "cosine"  # pyright: ignore[reportInvalidTypeForm]
    """decay to `MIN_LR` after warm-up; `timm`: one cosine over all steps, whose beginning warm-up
    replaces; `wsd`: the peak, then a linear decay; `wsd_sqrt`: then 1 - sqrt
    (docs/large-batches.md)"""

    DECAY: Positive = 0.2
    """of `wsd`, `wsd_sqrt`: a share of `NUM_EPOCHS` if below 1, else epochs"""

    MIN_LR: NonNegative = 0.0
    """learning rate at the end of the decay"""

    WARMUP_LR: NonNegative | None = None
    """learning rate of the first step; `None`: one step's share of the peak, 0 with `timm`"""

    COOLDOWN_EPOCHS: NonNegative = 0
    """epochs at `MIN_LR` at the end"""

    OPTIMIZER: Optimizer = Optimizer()
    """the optimizer and its options"""

    EMA: BelowOne = 0.0
    """decay of the weights' moving average, which is evaluated; 0: none"""

    EMA_WARMUP: bool = True
    """limit the decay to (1 + step) / (10 + step)"""

    # SerializeAsAny: pydantic would write a `TimmModel` with the keys of `Model` only.
    MODEL: Annotated[SerializeAsAny[Model], WrapValidator(choose_model)] = Model()
    """the model's shape, or with `timm` a timm model"""

    OUTPUT: str | None = None
    """folder of the run; `--output` takes precedence; `None`: outputs/<name of the config>"""

    INIT: str | None = None
    """weights to start from: a run, checkpoint, file, timm's name or hf-hub:USER/NAME"""

    FREEZE: Literal[None, "body"] = None
    """`body`: train the head alone (linear probing)"""

    MIXUP: Number = key(0.0, ge=0, le=1000)
    """alpha of Mixup; 0: none"""

    CUTMIX: Number = key(0.0, ge=0, le=1000)
    """alpha of CutMix; with `MIXUP`, half of the batches"""

    MIXUP_OFF_EPOCHS: int = key(0, ge=0)
    """epochs without Mixup and CutMix at the end"""

    THREE_AUGMENT: bool = False
    """3-Augment (DeiT III): an image is made grey, solarised or blurred"""

    COLOR_JITTER: UpToOne = 0.0
    """range of brightness, contrast, saturation around 1; 0: none"""

    ERASING: UpToOne = 0.0
    """probability of erasing a rectangle of a training image"""

    ERASING_MODE: Literal["const", "pixel"] = "const"
    """fill: the mean, or normal noise"""

    LABEL_SMOOTHING: BelowOne = 0.0
    """share of the target spread over all classes"""

    BCE_THRESHOLD: BelowOne | Literal["soft"] | None = None
    """binary cross-entropy on classes above this share of the label, or with 'soft' on the shares;
    `None`: cross-entropy"""

    BCE_SUM: bool = False
    """sum it over the classes instead of averaging"""

    CLASS_WEIGHTS: Literal[None, "balanced", "effective"] | list[NonNegative] = None
    """class weights in the training loss (docs/unequal-classes.md); a list: in the order of
    labels"""

    DATA: Data = Data()
    """location and reading of the images"""

    LOG: Log = Log()
    """what is written while training"""

    MAX_SKIPPED: int = key(20, ge=0)
    """non-finite updates skipped in a row before the run stops"""

    REPLAY_EVERY: int = key(0, ge=0)
    """steps between two whose first micro-batch and update are computed twice and compared to the
    bit (docs/reliability.md); 0: none"""

    MAX_REPLAY_FAULTS: int = key(0, ge=0)
    """comparisons of `REPLAY_EVERY` that may differ before the run ends"""

    TIMEOUT: Number = key(600, ge=1, le=10**7)
    """seconds without progress after which the run ends; must exceed the time to write a
    checkpoint"""

    # Colossal-AI's default.
    SEED: int = key(1024, ge=0, le=2**63 - 1)
    """seed for initialisation, sampling, augmentation, dropout"""

    TENSOR_PARALLEL_SIZE: Natural = 1
    """GPUs that share one model; sets `parallel`"""

    TENSOR_PARALLEL_MODE: TensorMode = None
    """how they share it"""

    parallel: Parallel | None = None
    """Colossal-AI's form of the two keys above"""

    zero: Zero | None = None
    """ZeRO over data-parallel GPUs (docs/parallel-modes.md)"""

    fp16: Fp16 | None = None
    """mixed precision; `None`: float32"""

    TF32: bool = True
    """round inputs of float32 products to TF32 on GPUs that have it"""

    COMPILE: bool | Literal["model", "max-autotune"] | None = key(
        None, title="True, False, None, 'model' or 'max-autotune'"
    )
    """torch.compile of the blocks ('max-autotune': with the fastest of several kernels) or the
    model; `None`: True on GPUs without tensor parallelism"""

    GRAPHS: bool = False
    """replay the training step as CUDA graphs, on one GPU"""

    gradient_accumulation: Natural | None = None
    """micro-batches per optimizer step"""

    clip_grad_norm: NonNegative = 0.0
    """largest norm of the whole gradient; 0: no clipping"""

    torch_ddp: TorchDdp = TorchDdp()
    """options of torch's DistributedDataParallel"""

    cudnn_benchmark: bool = False
    """let cuDNN search for its fastest kernels"""

    cudnn_deterministic: bool = False
    """restrict cuDNN to deterministic kernels"""

    @model_validator(mode="after")
    def _check(self) -> "Config":
        if self.TOTAL_BATCH_SIZE is None and self.MICRO_BATCH_SIZE is None:
            raise ValueError(
                "TOTAL_BATCH_SIZE is missing: "
                f"{type(self).model_fields['TOTAL_BATCH_SIZE'].description}"
            )
        if self.WARMUP_EPOCHS + self.COOLDOWN_EPOCHS >= self.NUM_EPOCHS:
            raise ValueError(
                f"WARMUP_EPOCHS={self.WARMUP_EPOCHS} and COOLDOWN_EPOCHS={self.COOLDOWN_EPOCHS} "
                f"leave nothing of NUM_EPOCHS={self.NUM_EPOCHS} between them: add --set "
                f"WARMUP_EPOCHS={self.NUM_EPOCHS / 10:g} --set COOLDOWN_EPOCHS=0"
            )
        decay = count_decay_epochs(self.LR_SCHEDULE, self.DECAY, self.NUM_EPOCHS)
        if decay > self.NUM_EPOCHS - self.WARMUP_EPOCHS - self.COOLDOWN_EPOCHS:
            raise ValueError(
                f"DECAY={self.DECAY:g} is {decay:g} epochs, more than WARMUP_EPOCHS="
                f"{self.WARMUP_EPOCHS:g} and COOLDOWN_EPOCHS={self.COOLDOWN_EPOCHS:g} leave of "
                f"NUM_EPOCHS={self.NUM_EPOCHS}: lower one of them"
            )
        for name in ("IMAGE_SIZES", "BATCH_SIZES"):
            stated = getattr(self, name)
            epochs = 0 if stated == "noise" else sum(epochs for epochs, *_ in stated)
            if epochs > self.NUM_EPOCHS:
                raise ValueError(
                    f"{name} has {epochs} epochs, more than NUM_EPOCHS={self.NUM_EPOCHS}: raise "
                    f"that, or give it fewer, as with --set {name}=[]"
                )
        rule = self.CLASS_WEIGHTS
        if isinstance(rule, str) and self.DATA.sampling:
            raise ValueError(
                f"CLASS_WEIGHTS={rule!r} and DATA.sampling={self.DATA.sampling!r} make up for "
                "unequal classes twice: leave one out"
            )
        # A threshold makes every target 0 or 1 again.
        if self.LABEL_SMOOTHING and self.BCE_THRESHOLD not in (None, "soft"):
            raise ValueError(
                f"BCE_THRESHOLD={self.BCE_THRESHOLD} undoes LABEL_SMOOTHING: set one of them"
            )
        return self

    def check_conflicts(self) -> None:
        """Raise `UserError` for what `NO_EFFECT` or `LIMITS` has, with the remedy."""
        defaults = {name: field.default for name, field in known_keys().items()}
        values = defaults | flatten(self.model_dump())
        wrong = [
            (name, "has no effect with", others)
            for name, others in NO_EFFECT.items()
            if others.items() <= values.items()
        ]
        if self.LR_SCHEDULE not in STABLE:
            wrong.append(("DECAY", "has no effect with", ["LR_SCHEDULE"]))
        if self.BATCH_SIZES != "noise":
            wrong += [
                (name, "has no effect with", ["BATCH_SIZES"])
                for name in ("SMALLEST_BATCH", "NOISE_FACTOR")
            ]
        wrong += [
            (name, "is too large for", [limit])
            for name, exceeds, limit in LIMITS
            if exceeds(values[name] or 0, values[limit])
        ]
        for name, reason, others in wrong:
            # A key that is stated at its default has no effect to complain of: recipes state some.
            if values[name] != defaults[name]:
                shown = " and ".join(f"{other}={values[other]!r}" for other in others)
                raise UserError(
                    f"{name}={values[name]!r} {reason} {shown}: leave it out, or add "
                    f"--set {name}={defaults[name]}"
                )


# Keys that change nothing while others have these values.
NO_EFFECT = {
    "BATCH_LR": {"BATCH_SIZES": []},
    "BCE_SUM": {"BCE_THRESHOLD": None},
    "EMA_WARMUP": {"EMA": 0},
    "ERASING_MODE": {"ERASING": 0},
    "MIXUP_OFF_EPOCHS": {"MIXUP": 0, "CUTMIX": 0},
    "WARMUP_LR": {"WARMUP_EPOCHS": 0},
    # It lowers the rates of the blocks, which are not trained.
    "OPTIMIZER.layer_decay": {"FREEZE": "body"},
    # Classes are balanced by drawing single images.
    "DATA.sampling": {"DATA.order": "blocks"},
    # A `simple` crop has one size.
    "DATA.crop_scale": {"DATA.crop": "simple"},
    "DATA.crop_ratio": {"DATA.crop": "simple"},
}
# A key, the comparison in which it is too large, and the key that it is compared with.
LIMITS = (
    ("MIN_LR", operator.gt, "LEARNING_RATE"),
    ("WARMUP_LR", operator.gt, "LEARNING_RATE"),
    # Nothing would be blended.
    ("MIXUP_OFF_EPOCHS", operator.ge, "NUM_EPOCHS"),
)


def known_keys() -> dict[str, FieldInfo]:
    """Return every key by its dotted name; the last ones are of timm's models only."""
    keys = all_keys(Config)
    # MODEL has one of two schemas. `Config` declares the ViT's only.
    return keys | {
        f"MODEL.{name}": field
        for name, field in TimmModel.model_fields.items()
        if name not in Model.model_fields
    }


def find_key(name: str) -> FieldInfo:
    """Return the key of a dotted name; raise `UserError` with the nearest for an unknown one."""
    keys = known_keys()
    if name not in keys:
        raise UserError(f"{name}: unknown key{suggest_key(name, keys)}")
    return keys[name]


def keys_as_markdown() -> str:
    """Return the table of all keys that docs/config.md holds."""
    rows = ["| key | values | default | meaning |", "| --- | --- | --- | --- |"]
    rows += [
        f"| `{name}` | {values_of(field)} | {_default(field)} | "
        f"{' '.join(str(field.description).split())} |"
        for name, field in known_keys().items()
    ]
    return "\n".join(rows)


def describe_keys(name: str, width: int) -> str:
    """Return a paragraph on the key ``name`` and each inside it, or without it on all, wrapped."""
    if name:
        find_key(name)
    lines = [
        f"{key}: {field.description}; values: {values_of(field)}; default: "
        f"{_default(field) or 'a dict'}"
        for key, field in known_keys().items()
        if not name or key == name or key.startswith(f"{name}.")
    ]
    return "\n".join(
        textwrap.fill(line.replace("`", ""), width, subsequent_indent="    ") for line in lines
    )


def _default(field: FieldInfo) -> str:
    """Return the default as documentation shows it; "" for a dict's."""
    if field.is_required():
        return "required"
    if isinstance(field.default, Section):
        return ""
    by_choice: Any = field.json_schema_extra  # of `Options`
    return by_choice["default"] if by_choice else f"`{field.default!r}`"
