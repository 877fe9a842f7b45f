"""Fuzz the readers of configs, settings, data sets, checkpoints, weights and image folders.

python scripts/fuzz.py --examples 5000 --seed 1

An example must be accepted, or refused in one line (`UserError`), within 20 s and 2 GB; others are printed as broken.
Exit status 1 if anything is broken.
"""

import contextlib
import io
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from fuzzing.configs import PAIR, SETTING, Example, config_example, setting_example
from fuzzing.damage import DAMAGE
from fuzzing.files import ENTRY, NAME, checkpoint_example, data_example, images_example, init_example, originals
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from common.errors import UserError, command_parser, printable, run_command
from common.table import format_table

SECONDS, MEMORY, LINE = 20, 2 << 30, 4000
DAMAGED = st.lists(DAMAGE, max_size=2)
KINDS: dict[str, st.SearchStrategy[Example]] = {
    "config file": st.builds(config_example, st.lists(PAIR, max_size=4), st.booleans()),
    "--set": st.builds(setting_example, st.lists(SETTING, max_size=3), st.booleans()),
    "prepared data set": st.builds(data_example, DAMAGED),
    "run and checkpoint": st.builds(checkpoint_example, DAMAGED),
    "--init": st.builds(init_example, st.sampled_from(["model.safetensors", "model.pth", ""]), DAMAGED),
    "image folder": st.builds(
        images_example,
        st.dictionaries(NAME, st.lists(ENTRY, max_size=4), min_size=1, max_size=3),
        st.sampled_from([0.0, 0.5, 1.0]),
    ),
}


class HangError(BaseException):
    """An example took too long; not an Exception, so that ``except Exception`` does not catch it."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Raise `HangError` after `SECONDS`, and MemoryError when memory grows by more than `MEMORY`."""

    def stop(*_: object) -> None:
        raise HangError(f"more than {SECONDS} s")

    now = int(re.search(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10  # pyright: ignore
    before, handler = resource.getrlimit(resource.RLIMIT_DATA), signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_DATA, (now + MEMORY, before[1]))
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_DATA, before)


def attempt(kind: str, example: Example) -> str:
    """Return the outcome of an example; print it if broken."""
    described, read = example
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        with limited(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            read(folder)
        return "accepted"
    except UserError as error:
        if len(printable(error)) <= LINE:
            return "refused in one line"
        why = f"a line of {len(printable(error)):,} characters"
    except (Exception, HangError, SystemExit):
        why = traceback.format_exc(limit=-4)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"BROKEN {kind}: {described[:1000]}\n{why}", file=sys.stderr, flush=True)
    return "broken"


def fuzz(kind: str, examples: int, number: int) -> Counter:
    """Try examples of a kind; return the count of each outcome."""
    originals()
    if kind in ("config file", "--set"):  # starts the process that estimates memory, outside the limits
        with contextlib.redirect_stdout(io.StringIO()):
            config_example([], False)[1](originals())
    outcomes: Counter = Counter()

    @seed(number)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
    )
    @given(KINDS[kind])
    def try_one(example: Example) -> None:
        outcomes[attempt(kind, example)] += 1

    try_one()
    return outcomes


def main(argv: list[str]) -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--examples", type=int, default=5000, help="number of examples over all kinds (default: 5000)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    parser.add_argument("--only", choices=KINDS, help="test only this kind")
    args = parser.parse_args(argv)
    kinds, rows = [args.only] if args.only else list(KINDS), []
    for kind in kinds:
        started = time.perf_counter()
        outcomes = fuzz(kind, args.examples // len(kinds), args.seed)
        counts = {name: outcomes[name] for name in ("refused in one line", "accepted", "broken")}
        seconds = f"{time.perf_counter() - started:.0f}"
        rows.append({"hostile input": kind, "tried": outcomes.total(), **counts, "seconds": seconds})
        print(rows[-1], file=sys.stderr, flush=True)
    print(format_table(rows))
    shutil.rmtree(originals())
    return int(any(row["broken"] for row in rows))


if __name__ == "__main__":
    run_command(lambda argv: sys.exit(main(argv)))
