"""The repository stays small: what is added pays by what it deletes (CONTRIBUTING.md)."""

import ast
import io
import subprocess
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


def count_tokens(source: str) -> int:
    """Count what has to be read, however it is laid out: no comments, docstrings, line ends and indentation."""
    documented = [node for node in ast.walk(ast.parse(source)) if isinstance(node, DOCUMENTED)]
    docstrings = {(node.body[0].lineno, node.body[0].col_offset) for node in documented if ast.get_docstring(node)}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type not in LAYOUT and token.start not in docstrings for token in tokens)


def is_test(path: Path) -> bool:
    return path.name.endswith("_test.py") or path.name in ("conftest.py", "testing.py") or "testing" in path.parts


def test_size():
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    sources = {path: (ROOT / path).read_text() for path in map(Path, listed.splitlines()) if (ROOT / path).is_file()}
    assert sum(source.count("\n") for source in sources.values()) <= 25_000
    assert sum(map(count_tokens, sources.values())) <= 200_000
    assert sum(not is_test(path) for path in sources) <= 130
