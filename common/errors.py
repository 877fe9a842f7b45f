"""Mistakes of the user's, and how every command of the project reports them."""

import difflib
import os
import sys
from collections.abc import Callable, Iterable


class UserError(ValueError):
    """What the user can mend: the message names the key or file, its value and the remedy, in one line."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest known name, or an empty string."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def run_command(main: Callable[[list[str]], object], argv: list[str] | None = None) -> None:
    """Run ``main(argv)``; a `UserError` ends the process with one line on stderr and exit code 2.

    ``--debug`` anywhere in the arguments shows the traceback instead. Of many ranks only the first one speaks,
    because all of them see the same mistake.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        main(argv)
    except UserError as error:
        if "--debug" in argv:
            raise
        if os.environ.get("RANK", os.environ.get("SLURM_PROCID", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))) == "0":
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
