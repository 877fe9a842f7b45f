"""Who may import whom: tasks and rooms, arrows downwards only."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TASKS = {"imagenet_dali", "caltech101_amp", "cifar10_benchmark"}
OURS = TASKS | {"common", "configs"}
FILES = sorted(path for package in OURS for path in (ROOT / package).rglob("*.py"))
# launch_from_torch and the others, which users' own scripts call, resolve a config as start_run does. The functions are
# Colossal-AI's, so that they stand in its room, and import this when they are called.
OWN_CONFIG = "common.config.load.load_own_config"
# Each room of common/ and those that its modules may import, beside their own and the files of common/ itself.
BASE = {"errors", "files", "hardware"}
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
    "tools": {"task", "checkpoint", "metrics", "data", "model", "optim", "launch", "config", "colossal"},
    "task": {"data", "config"},
    "run": {"task", "planner", "checkpoint", "metrics", "data", "model", "optim", "launch", "config", "colossal"},
}


def imports(path: Path) -> set[str]:
    """Return the dotted names of all modules that the file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def reads_launch_config(source: str) -> bool:
    """Return whether the code reads ``gpc.config``, which Colossal-AI's launch fills."""
    nodes = ast.walk(ast.parse(source))
    return any(isinstance(node, ast.Attribute) and ast.unparse(node).endswith("gpc.config") for node in nodes)


def is_test(file: str) -> bool:
    return file.endswith(("_test.py", "conftest.py"))


def may_read_launch_config(package: str, file: str) -> bool:
    """Training scripts and the launch may; those of testing/ stand for such. Tests may read all."""
    if package == "common":
        return is_test(file) or file.startswith(("colossal/", "launch/", "testing/"))
    return package in TASKS and file.startswith("train")


def forbidden(package: str, file: str, module: str) -> str | None:
    """Return the rule that ``package/file`` breaks by importing ``module``, or None."""
    top = module.partition(".")[0]
    if package == "configs" and module not in ("colossalai.amp.AMP_TYPE", "colossalai.legacy.amp.AMP_TYPE"):
        return None if top == "configs" or top not in OURS | {"colossalai"} else "configs import nothing but configs"
    if package == "common" and top in TASKS:
        return "common never imports a task"
    if (file, module) == ("colossal/context.py", OWN_CONFIG):
        return None
    if package == "common" and not is_test(file) and (rule := forbidden_room(file.removesuffix(".py"), module)):
        return rule
    if package in TASKS and top in TASKS - {package}:
        return "tasks never import each other"
    if top == "colossalai" and package != "configs" and not (package == "common" and file.startswith("colossal/")):
        return "only common/colossal imports colossalai"
    if module.startswith("nvidia.dali") and (package, file) != ("imagenet_dali", "imagenet_dali_dataloader.py"):
        return "only imagenet_dali/imagenet_dali_dataloader.py imports nvidia.dali"
    return None


def forbidden_room(room: str, module: str) -> str | None:
    """Return the rule that a module of ``room``, a folder or a file of common/, breaks by importing it, or None."""
    room = room.partition("/")[0]
    top, imported = [*module.split("."), ""][:2]
    if top != "common" or room == "testing" or imported in BASE | {room}:
        return None
    if imported not in ROOMS.get(room, set()):
        return f"common/{room} may import {', '.join(sorted(BASE | ROOMS.get(room, set())))}, not {imported}"
    return None


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports(path: Path) -> None:
    package, _, file = path.relative_to(ROOT).as_posix().partition("/")
    broken = {module: rule for module in imports(path) if (rule := forbidden(package, file, module))}
    assert not broken
    assert may_read_launch_config(package, file) or not reads_launch_config(path.read_text()), (
        "only train*.py, common/launch and common/colossal read gpc.config: take plain arguments"
    )


def test_every_folder_is_a_room_and_they_have_no_cycle() -> None:
    TopologicalSorter(ROOMS).prepare()  # raises CycleError
    folders = {path.parent.relative_to(ROOT / "common").parts[0] for path in (ROOT / "common").glob("*/*.py")}
    assert folders == set(ROOMS) - {"task"} | {"testing"}
