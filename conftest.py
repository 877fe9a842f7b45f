"""For all tests."""

import gc
import os

import pytest

# One thread a process, also in those that tests start: models are tiny and the ranks many.
# With more threads, forked children wait forever for those that a fork does not copy.
os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
os.environ.pop("DATA", None)

# What tests left for the garbage collector is their own process's to collect. One forked from it
# that does so crashes, or waits forever: DALI's pipelines, for one, end threads that a fork does
# not copy.
os.register_at_fork(after_in_child=gc.freeze)

# Cases of eight processes run in CI only, but for the equality with one process.
EIGHT_PROCESSES = ("2.5d-8", "3d-8", "dp2 x 2d-4")
EQUALITY = ("parity_test.py", "upstream_layers_test.py")
# Files of a minute or half of one, which compute or wait: they start first, in this order, so that
# no process has one left when the others have ended.
LONGEST = (
    "launchers_test.py",
    "docs_test.py",
    "parity_test.py",
    "hook_test.py",
    "lost_ranks_test.py",
    "step_estimate_test.py",
    "keys_test.py",
    "sweep_test.py",
    "compiled_test.py",
    "signals_test.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backend", choices=["gloo", "nccl"], default="gloo")
    parser.addoption(
        "--first-cases",
        action="store_true",
        help="run one case of each test, but all of the equality with one process",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs, before torch is imported, from tests without the marker ``gpu``, and from what
    they start.
    """
    if config.option.backend == "nccl":
        # Slow cases too. Torch must not start CUDA in the process that forks the ranks.
        config.option.markexpr = ""
        os.environ |= {"TEST_BACKEND": "nccl", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    elif not config.option.markexpr.startswith("gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        case = item.name.partition("[")[2]
        if item.path.name not in EQUALITY and any(name in case for name in EIGHT_PROCESSES):
            item.add_marker("slow")
    if config.option.first_cases:
        first: dict[str, pytest.Item] = {}
        for item in items:
            if not item.get_closest_marker("slow"):
                equality = item.path.name in EQUALITY
                first.setdefault(item.nodeid if equality else item.nodeid.partition("[")[0], item)
        items[:] = first.values()
    items.sort(key=_start)


def _start(item: pytest.Item) -> int:
    """Return the position at which an item's file starts."""
    name = item.path.name
    return LONGEST.index(name) if name in LONGEST else len(LONGEST)
