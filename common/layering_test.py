"""Who may import whom: tasks and rooms, arrows downwards only."""

import ast
import re
from graphlib import TopologicalSorter

import pytest

from common.files import ROOT

TASKS = {"imagenet_dali", "caltech101_amp", "cifar10_benchmark"}
FILES = sorted(
    path for package in TASKS | {"common", "configs"} for path in (ROOT / package).rglob("*.py")
)
# Each room of common/ and those that its modules may import, beside their own and the files of
# common/ itself. The door for users' scripts is "colossal".
BASE = {
    "errors",
    "files",
    "hardware",
    "launchers",
    "locks",
    "process",
    "provenance",
    "resolutions",
    "text",
}
ROOMS = {
    "engine": "",
    "optim": "engine",
    "config": "optim engine",
    "launch": "engine",
    "data": "",
    "shards": "data",
    "model": "config engine",
    "training": "model optim engine",
    "metrics": "config engine",
    "checkpoint": "metrics launch model config engine",
    "planner": "training model optim config engine",
    "task": "data config",
    "tools": "task checkpoint metrics data model launch config engine",
    "run": "task planner checkpoint metrics data model launch config engine",
    "colossal": "config engine",
}
ROOMS = {room: set(imported.split()) for room, imported in ROOMS.items()}


def may_import(file: str, module: str) -> bool:
    package, room, *_ = [*file.removesuffix(".py").split("/"), ""]
    top, imported, *_ = [*module.split("."), ""]
    if top == "colossalai":
        return file.startswith("common/engine/") or module.endswith("AMP_TYPE")
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
    return is_free or imported in BASE | {room} | ROOMS.get(room, set())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports(path):
    file, nodes = path.relative_to(ROOT).as_posix(), list(ast.walk(ast.parse(path.read_text())))
    modules = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    modules |= {f"{node.module}.{name.name}" for node in froms for name in node.names}
    assert not [module for module in modules if not may_import(file, module)]
    may_read = (
        file.startswith(("common/engine/", "common/launch/", "common/testing/"))
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
    assert folders == set(ROOMS) - {"task", "training"} | {"testing"}


def test_every_arrow_is_used():
    used = {room: set() for room in ROOMS}
    for path in (ROOT / "common").rglob("*.py"):
        room = path.relative_to(ROOT / "common").parts[0].removesuffix(".py")
        if room in ROOMS and not path.name.endswith(("_test.py", "conftest.py")):
            imports = re.findall(r"^\s*from common\.(\w+)", path.read_text(), re.MULTILINE)
            used[room] |= set(imports) & ROOMS.keys() - {room}
    assert used == ROOMS
