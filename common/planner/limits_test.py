"""What no machine has is refused at once, from the plan."""

import pytest

from common.config.load import load_config
from common.config.plan import build_plan
from common.errors import UserError
from common.planner.limits import NO_MACHINE, check_limits

SETTINGS = ["TOTAL_BATCH_SIZE=1024", "gradient_accumulation=1"]


@pytest.mark.parametrize(
    ("settings", "memory", "words"),
    [
        # 4 blocks of 8 width^2 parameters; with gradients and two moments 16 bytes each
        (["MODEL.width=1000000000"], NO_MACHINE, "width=1000000000, .*: 3.2e[+]19 parameters take 512,000,00"),
        (["MODEL.depth=100000000000"], NO_MACHINE, "use a smaller model, or split it over more GPUs"),
        (["MODEL.depth=1000"], 3e9, "micro-batches of 1,024 images take at least 4.2 GB, a GPU here has 3.0"),
        (["MODEL.depth=1000", "FREEZE=body"], 3e9, None),  # keeps the activations of one block
        (["MODEL.depth=1000", "MODEL.activation_checkpoint=True"], 3e9, None),
    ],
)
def test_a_plan_is_refused_for_what_it_needs_at_least(settings, memory, words) -> None:
    config = load_config("quickstart", [*SETTINGS, *settings])
    plan = build_plan(config, 1, None)
    if words is None:
        check_limits(config, plan, memory, "a GPU here")
    else:
        with pytest.raises(UserError, match=words):
            check_limits(config, plan, memory, "a GPU here")
