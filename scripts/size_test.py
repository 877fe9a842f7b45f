"""The product stays small (CONTRIBUTING.md). Tests may have any size."""

import io
import subprocess
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYOUT = "COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER"
MOST = 161_200


def count_tokens(source: str) -> int:
    """Count what has to be read: no comments, docstrings, line ends and indentation."""
    before = "NEWLINE"
    count = 0
    open_texts = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        # an f-string is one token, as before Python 3.12
        open_texts += (kind == "FSTRING_START") - (kind == "FSTRING_END")
        is_docstring = kind == "STRING" and before in ("NEWLINE", "INDENT")
        count += kind not in LAYOUT and not is_docstring and not open_texts
        before = kind
    return count


def is_test(path: Path) -> bool:
    name = path.name
    return (
        name.endswith("_test.py")
        or name in ("conftest.py", "testing.py")
        or "testing" in path.parts
    )


def test_size():
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    product = [ROOT / line for line in listed.splitlines() if not is_test(Path(line))]
    assert sum(count_tokens(path.read_text()) for path in product if path.is_file()) <= MOST
