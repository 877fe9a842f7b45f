"""Try the careless lines of mutations.txt: each has to fail a test. By hand, minutes for a few.

python common/testing/mutate.py [WORD]    # those of whose five lines one has WORD

A mutation is five lines: what a user would get; files; a text in them; what replaces it; the words
of pytest that should fail. The files are changed in place, and restored after its tests.
"""

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from common.files import ROOT

# By pytest's exit status; others did not run the tests.
VERDICTS = {0: "SURVIVED", 1: "caught", 5: "no test has these words"}


def main(word: str = "") -> None:
    for mutation in read_mutations():
        if word in "\n".join(mutation):
            title, files, old, new, tests = mutation
            verdict = try_mutation([ROOT / file for file in files.split()], old, new, tests)
            print(f"{title}: {verdict}", flush=True)


def read_mutations() -> list[list[str]]:
    """Return the five lines of each."""
    blocks = Path(__file__).with_name("mutations.txt").read_text().strip().split("\n\n")
    return [block.splitlines() for block in blocks]


def try_mutation(files: list[Path], old: str, new: str, tests: str) -> str:
    """Return what pytest makes of ``new`` in place of ``old``, with the test that fails."""
    sources = {file: file.read_text() for file in files}
    if any(source.count(old) != 1 for source in sources.values()):
        return "the text is not there once"
    command = [sys.executable, "-m", "pytest", "-x", *shlex.split(tests)]
    try:
        for file, source in sources.items():
            file.write_text(source.replace(old, new))
        answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    finally:
        for file, source in sources.items():
            file.write_text(source)
    verdict = VERDICTS.get(answer.returncode, f"pytest ends with {answer.returncode}")
    # A test that times out, or fails for another reason, has not seen the mutation.
    failed = re.search(r"^(?:FAILED|ERROR) .*", answer.stdout, re.MULTILINE)
    return f"{verdict}\n    {failed[0]}" if failed else verdict


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # restores the files, as Ctrl-C does
    main(*sys.argv[1:])
