"""What no machine has is refused at once, from the plan."""

import pytest

from common.config.load import load_config
from common.config.plan import build_plan
from common.errors import UserError
from common.planner.limits import check_limits

SETTINGS = ["TOTAL_BATCH_SIZE=1024", "gradient_accumulation=1"]


@pytest.mark.parametrize(
    ("settings", "memory", "words"),
    [
        # 4 blocks of 8 width^2 parameters; with gradients and two moments 16 bytes each
        (
            ["MODEL.width=65536"],
            1e9,
            "'width': 65536, .*: .*e[+]11 parameters take .* use a smaller model, or split it",
        ),
        (["MODEL.image_size=1024"], 12e9, "micro-batches of 1,024 images take at least 12.9 GB, a GPU here has 12.0"),
        (["MODEL.image_size=1024"], 13e9, None),
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
