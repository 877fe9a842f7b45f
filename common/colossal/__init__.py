"""Colossal-AI's API for scripts of a user's own: ``from common import colossal as colossalai``.

docs/from-colossalai-examples.md lists the names. Our own rooms import from `common.engine`.
"""

import common.engine  # before any import of torch, which it prepares
from common.colossal import hooks
from common.colossal.launch import (
    get_default_parser,
    launch,
    launch_from_openmpi,
    launch_from_slurm,
    launch_from_torch,
)
from common.engine.engine import Engine, initialize
from common.engine.groups import shutdown
from common.engine.tensor_parallel.sharding import named_shards
from common.engine.trainer import Trainer
from common.engine.upstream import (
    AMP_TYPE,
    Accuracy,
    BaseHook,
    CosineAnnealingWarmupLR,
    LinearWarmupLR,
    MultiTimer,
    ParallelMode,
    disable_existing_loggers,
    get_accelerator,
    get_dataloader,
    get_dist_logger,
    gpc,
)
from common.engine.upstream import UpstreamLamb as Lamb
from common.engine.zero import shard_model
