"""A saved model's config.json as timm and the Hugging Face Hub have it."""

import math
from typing import Any

from common.checkpoint.saved_run import SavedRun
from common.config.model_arguments import timm_arguments, timm_name
from common.task import find_task

ANY_PLAIN_VIT = "vit_base_patch16_224"  # the arguments override its every shape


def describe_for_timm(run: SavedRun) -> dict[str, Any]:
    """Return what ``timm.create_model("local-dir:...")`` needs to know: architecture, shape, preprocessing, classes.

    The layout is that of timm/models/_hub.py, `save_config_for_hf`.
    """
    arguments = timm_arguments(**run.config["MODEL"])
    size, data = arguments["img_size"], run.config["DATA"]
    short_side = find_task(run.task).build_eval_crop(data, size).short_side
    return {
        "architecture": timm_name(**run.config["MODEL"]) or ANY_PLAIN_VIT,
        "num_classes": arguments["num_classes"],
        "num_features": arguments["embed_dim"],
        "global_pool": arguments["global_pool"],
        "label_names": run.class_names,
        "model_args": {name: value for name, value in arguments.items() if not name.endswith("_rate")},
        "pretrained_cfg": {
            "num_classes": arguments["num_classes"],
            "input_size": [3, size, size],
            "fixed_input_size": True,
            "interpolation": data["interpolation"],
            "crop_pct": crop_share(size, short_side),
            "crop_mode": "center",
            "mean": list(data["mean"]),
            "std": list(data["std"]),
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }


def crop_share(size: int, short_side: int) -> float:
    """Return the ``crop_pct`` from which timm works out ``short_side``, as ``floor(size / crop_pct)``."""
    share = size / short_side
    return share if math.floor(size / share) == short_side else math.nextafter(share, 0)
