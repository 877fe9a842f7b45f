"""Count the images that a loader skips."""

import sys
from collections.abc import Iterable

from common.errors import UserError
from common.text import printable

MAX_BAD_SHARE = 0.01
NAMED = 20  # images that are named: a list may have a million


class BadImages:
    """Count the images that a loader skips, and name each of the first `NAMED` once on stderr.

    Clearly more than `MAX_BAD_SHARE` of the ``samples`` that this process reads in a pass raise
    `UserError`.
    """

    def __init__(self, samples: float):
        self.samples = samples
        self.count = 0  # bad images in this pass
        self._named = set()

    def add(self, messages: Iterable[str]) -> None:
        """Count the skipped images of a batch, given a message for each."""
        for message in messages:
            self.count += 1
            allowed = MAX_BAD_SHARE * self.samples
            # One process may read more bad images than others by chance: add four standard
            # deviations.
            if self.count > max(1, allowed + 4 * allowed**0.5):
                raise UserError(
                    f"{message}; with it {self.count:,} of the {self.samples:,.0f} images that "
                    f"this process reads in a pass are bad, more than {MAX_BAD_SHARE:.0%}"
                )
            if message not in self._named and len(self._named) < NAMED:
                self._named.add(message)
                # One write, which `print` does not promise: ranks share stderr.
                sys.stderr.write(f"skipped: {printable(message)}\n")
