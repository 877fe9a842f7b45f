"""Who may import whom: tasks and rooms, arrows downwards only."""

import ast
from graphlib import TopologicalSorter

import pytest

from common.files import ROOT

TASKS = {"imagenet_dali", "caltech101_amp", "cifar10_benchmark"}
FILES = sorted(
    path for package in TASKS | {"common", "configs"} for path in (ROOT / package).rglob("*.py")
)
# What users' own scripts call when they launch; it stands in Colossal-AI's room, as the functions
# are Colossal-AI's.
OWN_CONFIG = ("common/colossal/context.py", "common.config.load.load_own_config")
# Each room of common/ and those that its modules may import, beside their own and the files of
# common/ itself.
BASE = {"errors", "files", "plot", "hardware"}
ROOMS = {
    "colossal": set(),
    "optim": {"colossal"},
    "config": {"optim", "colossal"},
    "launch": {"colossal"},
    "data": {"config"},
    "model": {"optim", "config", "colossal"},
    "metrics": {"config", "colossal"},
    "checkpoint": {"metrics", "launch", "model", "optim", "config", "colossal"},
    "planner": {"model", "optim", "config", "colossal"},
    "tools": {
        "task",
        "checkpoint",
        "metrics",
        "data",
        "model",
        "optim",
        "launch",
        "config",
        "colossal",
    },
    "task": {"data", "config"},
    "run": {
        "task",
        "planner",
        "checkpoint",
        "metrics",
        "data",
        "model",
        "optim",
        "launch",
        "config",
        "colossal",
    },
}


def may_import(file: str, module: str) -> bool:
    package, room, *_ = [*file.removesuffix(".py").split("/"), ""]
    top, imported, *_ = [*module.split("."), ""]
    if top == "colossalai":
        return file.startswith("common/colossal/") or module.endswith("AMP_TYPE")
    if module.startswith("nvidia.dali"):
        return file == "imagenet_dali/imagenet_dali_dataloader.py"
    if top in TASKS:
        return package == top
    if package == "configs":
        return top == "configs"
    is_free = (
        top != "common"
        or package in TASKS
        or room == "testing"
        or file.endswith(("_test.py", "conftest.py"))
    )
    return (
        is_free
        or imported in BASE | {room} | ROOMS.get(room, set())
        or (file, module) == OWN_CONFIG
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports(path):
    file, nodes = path.relative_to(ROOT).as_posix(), list(ast.walk(ast.parse(path.read_text())))
    modules = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    modules |= {f"{node.module}.{name.name}" for node in froms for name in node.names}
    assert not [module for module in modules if not may_import(file, module)]
    may_read = (
        file.startswith(("common/colossal/", "common/launch/", "common/testing/"))
        or "_test.py" in file
    )
    reads = any(
        isinstance(node, ast.Attribute) and ast.unparse(node).endswith("gpc.config")
        for node in nodes
    )
    assert may_read or not reads or path.name.startswith("train"), (
        "only train*.py read gpc.config: take arguments"
    )


def test_the_training_scripts_differ_by_their_task_only():
    """What the tests of one task show of its script holds for all."""
    scripts = [ROOT / name for name in ("caltech101_amp/train.py", "cifar10_benchmark/train.py")]
    bodies = [
        ast.unparse(ast.parse(path.read_text()))
        for path in [*scripts, ROOT / "imagenet_dali/train_dali.py"]
    ]
    assert (
        len(
            {
                body.partition("config, plan =")[2].replace("order=plan.order, ", "")
                for body in bodies
            }
        )
        == 1
    )


def test_every_folder_is_a_room_and_they_have_no_cycle():
    TopologicalSorter(ROOMS).prepare()  # raises CycleError
    folders = {path.parent.name for path in (ROOT / "common").glob("*/*.py")}
    assert folders == set(ROOMS) - {"task"} | {"testing"}
