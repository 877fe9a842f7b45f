"""The repository stays small: what is added pays by what it deletes (CONTRIBUTING.md)."""

import io
import subprocess
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYOUT = "COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER"


def count_tokens(source: str) -> int:
    """Count what has to be read: no comments, docstrings, line ends and indentation."""
    before, count, open_texts = "NEWLINE", 0, 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        # an f-string is one token, as before Python 3.12
        open_texts += (kind == "FSTRING_START") - (kind == "FSTRING_END")
        is_docstring = kind == "STRING" and before in ("NEWLINE", "INDENT")
        count += kind not in LAYOUT and not is_docstring and not open_texts
        before = kind
    return count


def test_size():
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    paths = [ROOT / line for line in listed.splitlines()]
    assert sum(count_tokens(path.read_text()) for path in paths if path.is_file()) <= 215_000
