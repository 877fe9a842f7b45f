"""Corrupt images: how many are tolerated, and how they are reported."""

import sys
from collections.abc import Iterable, Sequence

from common.errors import UserError, printable

MAX_BAD_SHARE = 0.01
UNREADABLE = "not a readable image: "  # and then the decoder's message
NAMED = 20  # of a list that may have a million


def reason_of(error: Exception) -> str:
    """Return a decoder's message as one line, without the buffer's address that some contain."""
    return " ".join(str(error).split()).partition(" <")[0] or type(error).__name__


def print_some(lines: Sequence[str], most: int = NAMED) -> None:
    """Print the first lines, and how many more there are."""
    print(*(printable(line.expandtabs(1)) for line in lines[:most]), sep="\n", end="\n" if lines else "")
    if len(lines) > most:
        print(f"... and {len(lines) - most:,} more")


def join_some(lines: Sequence[str], most: int = 5) -> str:
    """Return the first lines in one, and how many more there are."""
    more = f" and {len(lines) - most:,} more" if len(lines) > most else ""
    return ", ".join(lines[:most]) + more


class BadImages:
    """Count the images that a loader skips, and name each once on stderr.

    More than `MAX_BAD_SHARE` of the ``samples`` that this process reads in a pass raises `UserError`.
    """

    def __init__(self, samples: float) -> None:
        self.samples, self.count = samples, 0
        self._named: set[str] = set()

    def start_pass(self) -> None:
        """Count from 0 again, without naming images twice."""
        self.count = 0

    def add(self, messages: Iterable[str]) -> None:
        """Count the skipped images of a batch, given a message for each."""
        for message in messages:
            self.count += 1
            if self.count > MAX_BAD_SHARE * self.samples:
                raise UserError(
                    f"{message}; with it {self.count:,} of the {self.samples:,.0f} images that this process reads "
                    f"in a pass are bad, more than {MAX_BAD_SHARE:.0%}"
                )
            if message not in self._named and len(self._named) < NAMED:
                self._named.add(message)
                last = "; further images are not named" if len(self._named) == NAMED else ""
                line = f"skipped: {printable(message)}{last}\n"
                sys.stderr.write(line)  # one write, unlike print, since ranks share stderr
