"""Try the careless lines of mutations.txt: each has to fail a test. By hand, minutes for a few.

python common/testing/mutate.py [WORD]    # those of whose five lines one has WORD

A mutation is five lines: what a user would get; files; a text in them; what replaces it; the words
of pytest that should fail. The files are changed in place, and restored after its tests.
"""

import shlex
import subprocess
import sys
from pathlib import Path

from common.files import ROOT

# By pytest's exit status; others did not run the tests.
VERDICTS = {0: "SURVIVED", 1: "caught", None: "the text is not there once"}


def main(word: str = "") -> None:
    for block in Path(__file__).with_name("mutations.txt").read_text().strip().split("\n\n"):
        if word in block:
            title, files, old, new, tests = (line.strip() for line in block.splitlines())
            status = try_mutation([ROOT / file for file in files.split()], old, new, tests)
            print(f"{VERDICTS.get(status, status)}: {title}", flush=True)


def try_mutation(files: list[Path], old: str, new: str, tests: str) -> int | None:
    """Return pytest's exit status with ``new`` in place of ``old``, None if that is not there."""
    sources = {file: file.read_text() for file in files}
    if any(source.count(old) != 1 for source in sources.values()):
        return None
    command = [sys.executable, "-m", "pytest", "-x", *shlex.split(tests)]
    try:
        for file, source in sources.items():
            file.write_text(source.replace(old, new))
        return subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL).returncode
    finally:
        for file, source in sources.items():
            file.write_text(source)


if __name__ == "__main__":
    main(*sys.argv[1:])
