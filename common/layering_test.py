"""Who may import whom."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TASKS = {"imagenet_dali", "caltech101_amp", "cifar10_benchmark"}
OURS = TASKS | {"common", "configs"}
FILES = sorted(path for package in OURS for path in (ROOT / package).rglob("*.py"))


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


def forbidden(package: str, file: str, module: str) -> str | None:
    """Return the rule that ``package/file`` breaks by importing ``module``, or None."""
    top = module.partition(".")[0]
    if package == "configs" and module not in ("colossalai.amp.AMP_TYPE", "colossalai.legacy.amp.AMP_TYPE"):
        return None if top == "configs" or top not in OURS | {"colossalai"} else "configs import nothing but configs"
    if package == "common" and top in TASKS:
        return "common never imports a task"
    if package in TASKS and top in TASKS - {package}:
        return "tasks never import each other"
    if top == "colossalai" and package != "configs" and not (package == "common" and file.startswith("colossal/")):
        return "only common/colossal imports colossalai"
    if module.startswith("nvidia.dali") and (package, file) != ("imagenet_dali", "imagenet_dali_dataloader.py"):
        return "only imagenet_dali/imagenet_dali_dataloader.py imports nvidia.dali"
    return None


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports(path: Path) -> None:
    package, _, file = path.relative_to(ROOT).as_posix().partition("/")
    broken = {module: rule for module in imports(path) if (rule := forbidden(package, file, module))}
    assert not broken


@pytest.mark.parametrize(
    ("package", "file", "module"),
    [
        ("configs", "a.py", "common.errors"),
        ("configs", "a.py", "colossalai.nn"),
        ("common", "a.py", "imagenet_dali.records"),
        ("common", "hooks.py", "colossalai.legacy"),
        ("caltech101_amp", "train.py", "imagenet_dali.records"),
        ("imagenet_dali", "train.py", "colossalai.legacy"),
        ("imagenet_dali", "prepare.py", "nvidia.dali.fn"),
    ],
)
def test_the_rules_forbid(package: str, file: str, module: str) -> None:
    assert forbidden(package, file, module)
