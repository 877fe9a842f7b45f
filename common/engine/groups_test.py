"""Process groups; importing Colossal-AI quickly, quietly, and leaving nothing behind."""

import json
import os
import random

import numpy as np
import pytest
import torch
from colossalai.accelerator import api
from colossalai.legacy.global_variables import tensor_parallel_env

from common.engine import upstream
from common.engine.groups import join_groups, shutdown
from common.engine.upstream import ParallelMode, check_version, gpc
from common.errors import UserError
from common.testing.commands import run_python
from common.testing.parity_cases import CASES
from common.testing.ranks import launched, run_ranks


def groups(config: dict) -> tuple:
    """Return the tensor-parallel settings of a launch, and its two groups of this rank."""
    with launched(**config):
        modes = (ParallelMode.DATA, ParallelMode.TENSOR)
        return tensor_parallel_env.save(), *map(gpc.get_ranks_in_group, modes)


def groups_of_two_launches() -> list[tuple]:
    """Launch in 1d, then as a single process, for which upstream would keep the size of 2."""
    # Building upstream's classifier of many classes sets it.
    tensor_parallel_env.vocab_parallel = True
    together = groups({"parallel": {"tensor": {"mode": "1d", "size": 2}}})
    del os.environ["RANK"], os.environ["WORLD_SIZE"]
    return [together, groups({})]


def test_groups_and_relaunch():
    fresh = type(tensor_parallel_env)().save()
    for rank, (together, single) in enumerate(run_ranks(2, groups_of_two_launches)):
        assert (together[0]["mode"], *together[1:]) == ("1d", [rank], [0, 1])
        assert single == (fresh, [0], [0])


def launch_order(config: dict, value: str | None) -> str | None:
    """Return the variable of NCCL after a launch that found ``value`` in it."""
    os.environ.pop("NCCL_LAUNCH_ORDER_IMPLICIT", None)
    if value:
        os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] = value
    with launched(**config):
        return os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT")


@pytest.mark.parametrize(
    ("case", "before", "after"),
    [("dp2", None, None), ("1d-2", None, "1"), ("2d-4", None, "1"), ("2d-4", "0", "0")],
)
def test_nccl_keeps_the_hosts_order_of_several_groups_collectives(case, before, after):
    ranks, config = CASES[case]
    assert run_ranks(ranks, launch_order, config, before) == [after] * ranks


def test_a_launch_finds_the_device_and_seeds_the_generators(monkeypatch):
    monkeypatch.setattr(api, "_ACCELERATOR", "stale")
    join_groups({}, 0, 1, "", 0, "gloo", seed=7, verbose=False)
    drawn = random.random(), np.random.rand(), torch.rand(1)
    shutdown()
    torch.manual_seed(7)
    assert drawn == (random.Random(7).random(), np.random.RandomState(7).rand(), torch.rand(1))
    assert api.get_accelerator().name == "cpu"
    assert gpc.config is None


IMPORT = """
import json, os, sys, warnings
import torch
os.environ.update({"TORCH_CPP_LOG_LEVEL": "", "OMP_WAIT_POLICY": ""})
before = (list(warnings.filters), torch.compile, dict(os.environ), len(sys.meta_path))
import common.colossal
after = (list(warnings.filters), torch.compile, dict(os.environ), len(sys.meta_path))
from colossalai.amp import AMP_TYPE as old_path
from colossalai.legacy.amp import AMP_TYPE
heavy = "transformers", "peft", "torch._inductor.compile_fx", "colossalai._analyzer"
print(json.dumps({
    "unchanged": before == after,
    "heavy": [name for name in heavy if name in sys.modules],
    "amp": old_path is AMP_TYPE,
    "cuda": torch.cuda.is_initialized(),
}))
warnings.warn("seen")
"""


def test_import_is_quiet_and_leaves_nothing_behind():
    environ = {
        name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_MAX_CONNECTIONS"
    }
    done = run_python(IMPORT, check=True, env=environ)
    assert json.loads(done.stdout) == {"unchanged": True, "heavy": [], "amp": True, "cuda": False}
    assert "UserWarning: seen" in done.stderr
    assert "colossalai" not in done.stderr


WITH_GPU = """
import torch
torch.cuda.is_available = lambda: True
def initialize():
    raise SystemExit("CUDA is initialized")
torch.cuda._lazy_init = initialize
import common.colossal
"""


def test_import_leaves_a_gpu_alone():
    run_python(WITH_GPU, check=True)


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(upstream, "version", lambda name: "0.5.10")
    with pytest.raises(
        UserError, match=r"colossalai is 0\.5\.10, this project needs 0\.5\.0: pip install"
    ):
        check_version()
