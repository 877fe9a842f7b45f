"""Colossal-AI 0.5.0, repaired. All other code imports its names from here, never from
`colossalai`.
"""

# ruff: noqa: E402
from common.hardware import prepare_torch

prepare_torch()

from common.colossal.amp import MixedPrecision, build_mixed_precision, compute_dtype, name_dtype
from common.colossal.context import (
    allow_fake_launches,
    fake_launch,
    generator_states,
    get_default_parser,
    join_groups,
    launch,
    launch_from_openmpi,
    launch_from_slurm,
    launch_from_torch,
    reduce_without_waiting,
    set_generator_states,
    shutdown,
)
from common.colossal.engine import Engine, Predictor, check_compile, explain_compiler, initialize
from common.colossal.hooks import repair_hooks
from common.colossal.lost_ranks import doing, naming_lost_ranks, progress
from common.colossal.tensor_parallel.layout import (
    check_tensor_parallel,
    describe_tensor_parallel,
    resolve_parallel,
)
from common.colossal.tensor_parallel.sharding import (
    canonical_state,
    cut_piece,
    gather_whole,
    held_state,
    kept_buffers,
    load_canonical_state,
    named_shards,
    whole_shape,
)
from common.colossal.trainer import Trainer
from common.colossal.upstream import (
    AMP_TYPE,
    Accuracy,
    BaseHook,
    CosineAnnealingWarmupLR,
    Lamb,
    LinearWarmupLR,
    MultiTimer,
    ParallelMode,
    all_reduce,
    disable_existing_loggers,
    get_accelerator,
    get_dataloader,
    get_dist_logger,
    gpc,
)
from common.colossal.zero import check_zero, shard_model

repair_hooks()
