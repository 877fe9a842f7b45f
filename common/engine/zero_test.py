"""`zero` equals data parallelism in mixed precision; parity_test.py has float32."""

import pytest
import torch

from common.engine.amp_test import MODES
from common.engine.engine import initialize
from common.engine.tensor_parallel.sharding import full_model_state, named_shards
from common.engine.upstream import gpc
from common.errors import UserError
from common.testing.parity_cases import build_engine, fit, launched_clipping, micro_batches
from common.testing.ranks import run_ranks

RECOMPUTED = {
    "activation_checkpoint": True,
    "init_values": 0.5,
    "drop_path": 0.3,
    "stem": "residual",
    "pool": "seq",
}
RANKS = 2  # one of which has an empty shard of sequence pooling's one row
PRECISIONS = ["TORCH bfloat16", "TORCH float16", "NAIVE bfloat16"]


def train(stage: int | None) -> dict[str, list[float]]:
    """Return losses, and norms of logits and of all weights, in each precision.

    The first has recomputed blocks.
    """
    losses = {}
    with launched_clipping(zero=stage and {"stage": stage}):
        for name in PRECISIONS:
            gpc.config["fp16"] = MODES[name]
            model, _, engine = build_engine("sgd", **RECOMPUTED if name == PRECISIONS[0] else {})
            losses[name] = fit(engine, 3)
            engine.eval()
            for _ in range(2):  # the second time, with other weights, as after averages
                with torch.no_grad():
                    losses[name].append(engine(next(micro_batches())[0]).norm().item())
                for shard in named_shards(model).values():
                    shard.data.mul_(0.5)
            losses[name] += [weight.norm().item() for _, weight in full_model_state(model)]
        if stage:
            with pytest.raises(UserError, match="^zero: give the optimizer named_shards"):
                initialize(model, torch.optim.SGD(model.parameters()))
    return losses


@pytest.fixture(scope="module")
def expected() -> dict[str, list[float]]:
    """What data parallelism computes."""
    return run_ranks(RANKS, train, None)[0]


@pytest.mark.parametrize("stage", [1, 3])
def test_mixed_precision_and_recomputed_blocks_are_those_of_data_parallelism(stage, expected):
    found = run_ranks(RANKS, train, stage)[0]
    for name, losses in found.items():
        # A logit of float16 that rounds otherwise changes their norm by about 1e-4.
        rounding = 2e-4 if "float16" in name.split() else 1e-6
        assert losses == pytest.approx(expected[name], rel=rounding), name
