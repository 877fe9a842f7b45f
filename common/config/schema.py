"""Every key a config may have: its type, default and meaning. UPPER CASE is ours, lower case is Colossal-AI's."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType

from common.colossal import AMP_TYPE
from common.config.model_arguments import CHOICES, ModelArguments

REQUIRED = object()
NUMBER = (int, float)
NONE = type(None)


@dataclass(frozen=True)
class Key:
    """One key: accepted ``types``, ``default`` (or `REQUIRED`), meaning, and optionally bounds, choices or sub-keys.

    ``keys`` lists the sub-keys of a dict; a dict without it takes any, which are checked by whoever they belong to.
    """

    types: tuple[type, ...]
    default: object
    help: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[object, ...] = ()
    keys: Mapping[str, "Key"] = field(default_factory=lambda: MappingProxyType({}))


MODEL = {
    field.name: Key(
        NUMBER if field.type is float else (field.type,),
        field.default,
        field.metadata["help"],
        choices=CHOICES.get(field.name, ()),
    )
    for field in fields(ModelArguments)
}
MODEL["num_classes"] = Key((int, NONE), None, "classes of the head; `None`: as many as the data set has")

DATA = {
    "root": Key((str, NONE), None, "the data set's folder; the environment variable `DATA` stands in for it"),
    "download": Key((bool,), False, "CIFAR-10, Caltech-101: fetch the data set into `root` if it is not there"),
    "allow_change": Key((bool,), False, "go on from a checkpoint that was trained on another data set"),
    "loader": Key((str,), "dali", "which loader decodes", choices=("dali", "torchvision")),
    "workers": Key((int, NONE), None, "decoding threads (DALI) or processes per GPU; `None`: cores / GPUs", minimum=0),
    "crop_scale": Key((tuple, list), (0.08, 1.0), "share of the image's area that a training crop takes"),
    "crop_ratio": Key((tuple, list), (3 / 4, 4 / 3), "width / height of a training crop"),
    "flip": Key((bool,), True, "mirror half of the training images"),
    "crop_padding": Key((int,), 4, "CIFAR-10: black pixels around an image before its training crop", minimum=0),
    "randaugment": Key((tuple, list, NONE), None, "torchvision: RandAugment's (operations, magnitude 0 to 10)"),
    "autoaugment": Key((str, NONE), None, "CIFAR-10: AutoAugment's policy for training", choices=(None, "cifar10")),
    "eval_crop": Key(NUMBER, 0.875, "share of the short side that evaluation's centre crop takes", 0.1, 1),
    "mean": Key((tuple, list), (0.485, 0.456, 0.406), "subtracted from R, G, B (0 to 1)"),
    "std": Key((tuple, list), (0.229, 0.224, 0.225), "then divided by"),
}

OPTIMIZER = {
    "name": Key(
        (str,), "adamw", "`lamb`: common/optim/lamb.py; the others are torch's", choices=("lamb", "adamw", "sgd")
    ),
}

LOG = {
    "every": Key((int,), 10, "optimiser steps between two lines of metrics.jsonl", minimum=1),
    "tensorboard": Key((bool,), True, "write TensorBoard event files too"),
    "trackers": Key(
        (list, tuple), [], '`"wandb"`, `"mlflow"`: offline, unless `WANDB_MODE`, `MLFLOW_TRACKING_URI` are set'
    ),
}

KEYS: dict[str, Key] = {
    "TOTAL_BATCH_SIZE": Key((int,), REQUIRED, "samples per optimiser step over all GPUs", minimum=1),
    "MICRO_BATCH_SIZE": Key((int, NONE), None, "samples per GPU and forward pass; derives the accumulation", minimum=1),
    "BATCH_SIZE": Key((int, NONE), None, "checked: `TOTAL_BATCH_SIZE // gradient_accumulation`", minimum=1),
    "GPUS": Key((int,), 1, "GPUs the recipe is written for: what `--dry-run` plans unless told", minimum=1),
    "NUM_EPOCHS": Key((int,), REQUIRED, "passes over the training data", minimum=1),
    "WARMUP_EPOCHS": Key(NUMBER, 0, "epochs of linear warm-up; less than `NUM_EPOCHS`", minimum=0),
    "MAX_STEPS": Key((int, NONE), None, "end early, after this many optimiser steps (the schedule stays)", minimum=1),
    "EVAL_EVERY": Key((int,), 1, "epochs between evaluations; the last epoch is always evaluated", minimum=1),
    "CHECKPOINT_EVERY": Key((int, str), "10 min", "optimiser steps (500) or minutes ('10 min') between checkpoints", 1),
    "KEEP": Key((int,), 2, "newest checkpoints that are kept, beside the best", minimum=1),
    "LEARNING_RATE": Key(NUMBER, REQUIRED, "peak, at the end of warm-up", minimum=0),
    "WEIGHT_DECAY": Key(NUMBER, 0.0, "decoupled for AdamW and LAMB", minimum=0),
    "LR_SCHEDULE": Key((str,), "cosine", "decay after warm-up, to 0", choices=("linear", "cosine")),
    "OPTIMIZER": Key((dict,), {}, "`name`, and the optimiser's own options (`betas`, `variant`, ...)", keys=OPTIMIZER),
    "EMA": Key(NUMBER, 0.0, "decay of the weights' moving average, which is evaluated then; 0: none", 0, 1),
    "MODEL": Key((dict,), {}, "the Vision Transformer's shape", keys=MODEL),
    "INIT": Key((str, NONE), None, "weights to start from: a run, a checkpoint, a .safetensors file, a state_dict"),
    "MIXUP": Key(NUMBER, 0.0, "alpha of Mixup's Beta distribution; 0: no Mixup", minimum=0),
    "CUTMIX": Key(NUMBER, 0.0, "alpha of CutMix's Beta distribution; beside `MIXUP`, half of the batches", minimum=0),
    "ERASING": Key(NUMBER, 0.0, "probability that a rectangle of a training image is erased", minimum=0, maximum=1),
    "LABEL_SMOOTHING": Key(NUMBER, 0.0, "share of the target spread over all classes", minimum=0, maximum=1),
    "DATA": Key((dict,), {}, "where the images are and how they are read", keys=DATA),
    "LOG": Key((dict,), {}, "what is written while training", keys=LOG),
    "MAX_SKIPPED": Key((int,), 20, "updates in a row that may be skipped for numbers that are not finite", minimum=0),
    "TIMEOUT": Key(
        NUMBER, 600, "seconds after which the processes have named one that is lost or hangs, and ended", minimum=1
    ),
    "SEED": Key((int,), 1024, "of weights, order, crops, Mixup and dropout", minimum=0),
    "TENSOR_PARALLEL_SIZE": Key((int,), 1, "GPUs that share one model; `parallel` is made from it", minimum=1),
    "TENSOR_PARALLEL_MODE": Key((str, NONE), None, "how they share it", choices=(None, "1d", "2d", "2.5d", "3d")),
    "parallel": Key((dict, NONE), None, "`dict(pipeline=1, tensor=dict(mode=..., size=...))`"),
    "fp16": Key((dict, NONE), None, "`dict(mode=AMP_TYPE.TORCH, ...)`: mixed precision; `None`: fp32"),
    "TF32": Key((bool,), False, "let float32 products round their inputs to TF32 on GPUs that have it"),
    "COMPILE": Key((bool,), False, "torch.compile the transformer's blocks; not with tensor parallelism"),
    "gradient_accumulation": Key((int, NONE), None, "micro-batches per optimiser step", minimum=1),
    "clip_grad_norm": Key(NUMBER, 0.0, "largest norm of the gradient of all weights; 0: no clipping", minimum=0),
    "torch_ddp": Key((dict,), {}, "options of torch's DistributedDataParallel"),
    "gradient_handler": Key((list, NONE), None, "Colossal-AI's gradient handlers, instead of DistributedDataParallel"),
    "cudnn_benchmark": Key((bool,), False, "let cuDNN search for its fastest kernels"),
    "cudnn_deterministic": Key((bool,), False, "restrict cuDNN to deterministic kernels"),
}

# Names a config may use without importing them, as the recipes of Colossal-AI's benchmark are printed.
PREDEFINED = {"AMP_TYPE": AMP_TYPE}


def describe_keys() -> str:
    """Return the table of all keys as Markdown."""
    rows = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    for name, key in KEYS.items():
        rows.append(_row(name, key))
        rows += [_row(f"{name}.{sub}", sub_key) for sub, sub_key in key.keys.items()]
    return "\n".join(rows)


def _row(name: str, key: Key) -> str:
    types = " or ".join("None" if kind is NONE else kind.__name__ for kind in key.types)
    if key.choices:
        types = ", ".join(f"`{choice!r}`" for choice in key.choices)
    default = "required" if key.default is REQUIRED else "" if key.default == {} else f"`{_short(key.default)}`"
    return f"| `{name}` | {types} | {default} | {key.help} |"


def _short(value: object) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(f"{item:.4g}" for item in value) + ")"
    return repr(value)
