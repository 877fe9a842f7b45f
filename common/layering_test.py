"""Who may import whom: tasks and rooms, arrows downwards only."""

import ast
import re
import tomllib
from configparser import ConfigParser
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from common import task
from common.files import ROOT

TASKS = {path.parent.name for path in ROOT.glob("*/task.py")} - {"common"}
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
    "recording",
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
    "run": "task planner checkpoint metrics data model launch config optim engine",
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
    file = path.relative_to(ROOT).as_posix()
    nodes = list(ast.walk(ast.parse(path.read_text())))
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


def training_sequence(path: Path) -> str:
    """Return the statements of a script's training, without what makes the task."""
    functions = [
        ast.unparse(node)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    ]
    (function,) = [text for text in functions if "start_run(" in text]
    _, start, body = function.partition("config, plan =")
    return start + body.replace("task.build_", "build_").replace("order=plan.order, ", "")


# imagenet_dali/train.py starts another script's main.
SCRIPTS = [
    path
    for folder in sorted(TASKS)
    for path in sorted((ROOT / folder).glob("train*.py"))
    if not path.name.endswith("_test.py") and " import main\n" not in path.read_text()
]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_training_script_differs_from_the_function_by_its_task_only(path):
    """What the tests of one task show of its script holds for all, and for a user's own task."""
    expected = training_sequence(ROOT / "common/run/train.py")
    assert training_sequence(path).splitlines() == expected.splitlines()


def test_every_task_has_a_script():
    assert {path.parent.name for path in SCRIPTS} == TASKS


def test_the_tools_know_every_task():
    assert {name: f"{name}.task" for name in TASKS} == {
        name: module for name, module in task.TASKS.items() if name in TASKS
    }


def test_every_package_is_installed():
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    folders = [path.parent for path in FILES if path.name == "__init__.py"]
    packages = {folder.relative_to(ROOT).as_posix().replace("/", ".") for folder in folders}
    assert {*setup["options"]["packages"].split()} == packages


def test_style_and_types_are_checked_in_every_package():
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert TASKS | {"common", "configs"} == {*tools["ruff"]["lint"]["isort"]["known-first-party"]}
    assert TASKS | {"common", "scripts"} == {*tools["basedpyright"]["include"]}


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
