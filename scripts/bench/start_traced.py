"""Run imagenet_dali/train_dali.py up to its first optimizer step, and print when its stages ended, for start.py.

A line of JSON: by stage, [seconds since 1970, seconds of this process's CPU time].
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

STAGES = {  # the last call of each in train_dali.main
    "start_run": "config, data checks, launch",
    "build_lr_scheduler": "model, optimizer, schedule",
    "build_eval_loader": "loaders, importing DALI",
    "initialize": "engine",
    "Trainer": "hooks, importing TensorBoard",
}
ends: dict[str, tuple[float, float]] = {}


def main(argv: list[str]) -> None:
    end("interpreter")
    import torch  # noqa: F401

    end("importing torch")
    import common.colossal  # noqa: F401

    end("importing Colossal-AI")
    from common.metrics.hook import MetricsHook
    from imagenet_dali import train_dali

    end("importing the rest")
    for name, stage in STAGES.items():
        setattr(train_dali, name, ending(stage, getattr(train_dali, name)))
    MetricsHook.after_train_iter = stop_after_step
    train_dali.main(argv)


def end(stage: str) -> None:
    ends[stage] = (time.time(), time.process_time())


def ending(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        result = function(*args, **options)
        end(stage)
        return result

    return call


def stop_after_step(hook: Any, trainer: Any, *_: Any) -> None:
    if trainer.update_done:
        end("first step")
        print(json.dumps(ends), flush=True)
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
