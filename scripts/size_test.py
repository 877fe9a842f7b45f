"""The repository stays small: what is added pays by what it deletes (CONTRIBUTING.md)."""

import io
import subprocess
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def count_tokens(source: str) -> int:
    """Count what has to be read: no comments, docstrings, line ends and indentation."""
    before, count, open_texts = tokenize.NEWLINE, 0, 0
    for kind, *_ in tokenize.generate_tokens(io.StringIO(source).readline):
        # an f-string is one token, as before Python 3.12
        name = tokenize.tok_name[kind]
        open_texts += (name == "FSTRING_START") - (name == "FSTRING_END")
        is_docstring = kind == tokenize.STRING and before in (tokenize.NEWLINE, tokenize.INDENT)
        count += kind not in LAYOUT and not is_docstring and not open_texts
        before = kind
    return count


def test_size():
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    paths = [ROOT / line for line in listed.splitlines()]
    assert sum(count_tokens(path.read_text()) for path in paths if path.is_file()) <= 215_000
