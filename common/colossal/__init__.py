"""Colossal-AI 0.5.0, repaired. All other code imports its names from here, never from `colossalai`."""

from common.colossal.amp import MixedPrecision, build_mixed_precision, compute_dtype, name_dtype
from common.colossal.compiled import check_compile
from common.colossal.context import launch, repair_context, shutdown
from common.colossal.engine import Engine, initialize
from common.colossal.fake_launch import allow_fake_launches, fake_launch, reduce_without_waiting
from common.colossal.generators import generator_states, set_generator_states
from common.colossal.inference import Predictor
from common.colossal.launchers import get_default_parser, launch_from_openmpi, launch_from_slurm, launch_from_torch
from common.colossal.lost_ranks import doing, naming_lost_ranks, progress
from common.colossal.tensor_parallel.check import check_tensor_parallel, describe_tensor_parallel, resolve_parallel
from common.colossal.tensor_parallel.gradients import build_norm_reducer
from common.colossal.tensor_parallel.sharding import (
    canonical_state,
    cut_piece,
    gather_whole,
    load_canonical_state,
    named_shards,
    whole_shape,
)
from common.colossal.trainer import Trainer
from common.colossal.upstream import AMP_TYPE, BaseHook, LinearWarmupLR, ParallelMode, gpc
from common.colossal.zero import check_zero, shard_model

repair_context()
