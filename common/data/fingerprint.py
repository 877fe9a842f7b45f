"""Fingerprints of content, independent of its location."""

import hashlib
import os
from collections.abc import Iterable


def fingerprint_of(parts: Iterable[object]) -> str:
    """Return the sha256, in hexadecimal, of the parts as text, in their order."""
    digest = hashlib.sha256()
    for part in parts:
        text = os.fsencode(str(part))  # the names of files need not be valid text
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()
