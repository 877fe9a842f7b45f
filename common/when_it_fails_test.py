"""docs/when-it-fails.md lists what the code raises, and nothing else."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "when-it-fails.md"
TASKS = ("imagenet_dali", "caltech101_amp", "cifar10_benchmark")
ERRORS = {"UserError", "RankError", "AgreedError"}


def raised(sources: Iterable[str]) -> set[str]:
    """Return the messages of all errors for users; what they fill in is "…"."""
    trees = [ast.parse(source) for source in sources]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    functions: dict[str, list[ast.FunctionDef]] = {}
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            functions.setdefault(node.name, []).append(node)
    constants = {
        node.targets[0].id: node.value.value
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper()
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    messages = {
        text for tree in trees for argument in arguments(tree) for text in texts(argument, functions, constants)
    }
    return {text for text in messages if re.search(r"\w", text)}  # the others pass on what was raised elsewhere


def arguments(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield the message of each error that is built."""
    names = set(ERRORS)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and names & set(named(node.value)):
            names.add(node.targets[0].id)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names and node.args:
            yield node.args[0]


def named(expression: ast.expr) -> Iterator[str]:
    """Yield the classes that an expression may be: not those of calls in it."""
    branches = [expression.body, expression.orelse] if isinstance(expression, ast.IfExp) else [expression]
    yield from (branch.id for branch in branches if isinstance(branch, ast.Name))


def texts(message: ast.expr, functions: dict[str, list[ast.FunctionDef]], constants: dict[str, str]) -> Iterator[str]:
    """Yield what a message may say; of a function's answer, all that it returns."""
    if isinstance(message, ast.Constant):
        yield message.value
    elif isinstance(message, ast.JoinedStr):
        yield re.sub("…+", "…", "".join(part_of_text(part, constants) for part in message.values))
    elif isinstance(message, ast.Call):
        name = message.func.attr if isinstance(message.func, ast.Attribute) else message.func.id
        for function in functions.get(name, []):
            for node in ast.walk(function):
                if isinstance(node, ast.Return) and isinstance(node.value, ast.JoinedStr):
                    yield from texts(node.value, functions, constants)


def part_of_text(part: ast.expr, constants: dict[str, str]) -> str:
    """Return the text of a constant, also of one with places to fill in; "…" for all else."""
    if isinstance(part, ast.Constant):
        return part.value
    value = part.value
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "format":
        value = value.func.value
    text = constants.get(value.id, "…") if isinstance(value, ast.Name) else "…"
    return re.sub(r"\{\w+\}", "…", text)


def printed_by_scripts() -> set[str]:
    """Return the messages of the shell scripts."""
    scripts = "\n".join(path.read_text() for path in sorted(ROOT.glob("scripts/*.sh")))
    found = re.findall(r'(?:\bfail "|echo "error: )(.+?)"(?= >&2|$)', scripts, re.MULTILINE)
    return {re.sub(r"\$\([^)]*\)|\$\w+", "…", text) for text in found if text != "$1"}


def read(package: str) -> list[str]:
    """Return the code of a folder's files."""
    paths = sorted(path for path in (ROOT / package).rglob("*.py") if not path.name.endswith("_test.py"))
    return [path.read_text() for path in paths]


def listed() -> list[str]:
    """Return the messages that the page lists."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("- ``")]
    return [line.removeprefix("- ``").partition("``")[0].strip() for line in lines]


def test_the_page_lists_every_message_once_and_no_other():
    packages = [source for name in ("common", *TASKS) for source in read(name)]
    expected, found = raised(packages) | raised(read("scripts")) | printed_by_scripts(), listed()
    assert len(expected) > 150
    missing, gone = sorted(expected - set(found)), sorted(set(found) - expected)
    assert not missing, "add to docs/when-it-fails.md:\n" + "\n".join(f"- ``{message}``" for message in missing)
    assert not gone, "remove from docs/when-it-fails.md:\n" + "\n".join(gone)
    assert len(found) == len(set(found))


def test_finds_messages_in_every_form():
    source = """
raise UserError("plain words")
raise AgreedError(f"{key}={value!r} is {odd}" f"{odd}")
mistake = RankError if rank else UserError
raise mistake(f"by a variable {x}")
raise UserError(self.explain(error)) from error
raise UserError(answer[1])
raise ValueError("not for users")
REMEDY = "run {name} again"
raise UserError(f"{fault}; {REMEDY.format(name=name)}")
def explain(error):
    if error:
        return f"by a function {error}"
    return f"or otherwise {error}"
"""
    words = {"plain words", "…=… is …", "by a variable …", "by a function …", "or otherwise …"}
    words.add("…; run … again")
    assert raised([source]) == words
