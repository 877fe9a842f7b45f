"""Invalid values, and ways to damage a file."""

import json
import os
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

NUMBERS = [-1, 0, 1, 2, 3, 7, 16, 10**6, 2**31, 2**63 - 1, 2**63, 10**30, -0.0, 0.5, 1e-320, 1e308, float("inf")]
TEXTS = ["", "x", "a\nb", "\x1b[2J", "\u2028", "é" * 300, "../../x", "/dev/zero", "None", "\0"]
JUNK = st.sampled_from([*NUMBERS, *TEXTS, None, True, float("nan"), [], {}, [[[]]], [1, 2, 3], {"x": 1}])


def places(tree: Any, at: tuple = ()) -> Iterator[tuple]:
    """Yield the path of every value in JSON."""
    yield at
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in inside:
        yield from places(value, (*at, key))


def mutate_json(tree: Any, choice: random.Random, junk: Any) -> Any:
    """Replace, remove or add one value."""
    *above, last = choice.choice(list(places(tree))[1:] or [("x",)])
    node = tree
    for key in above:
        node = node[key]
    how = choice.choice(("replace", "replace", "remove", "add"))
    if how == "add" and isinstance(node, dict):
        node["added"] = junk
    elif how == "remove":
        del node[last]
    else:
        node[last] = junk
    return tree


def mutate(file: Path, how: str, choice: random.Random, junk: Any) -> None:
    """Apply one of `DAMAGES` to a file."""
    is_whole = file.is_file() and file.stat().st_size < 10**8
    content = file.read_bytes() if is_whole else b""
    file.unlink(missing_ok=True)
    if how == "content" and file.suffix in (".json", ".jsonl"):
        tree = [json.loads(line) for line in content.splitlines()] if file.suffix == ".jsonl" else json.loads(content)
        tree = mutate_json(tree, choice, junk)
        lines = tree if file.suffix == ".jsonl" else [tree]
        file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    elif how == "content" and file.suffix == ".safetensors" and content:
        size = struct.unpack("<Q", content[:8])[0]
        header = json.dumps(mutate_json(json.loads(content[8 : 8 + size]), choice, junk)).encode()
        file.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + size :])
    elif how in ("content", "bytes"):
        spoiled = bytearray(content or b"x")
        for _ in range(choice.randint(1, 8)):
            spoiled[choice.randrange(len(spoiled))] = choice.randrange(256)
        file.write_bytes(spoiled)
    elif how == "truncated":
        file.write_bytes(content[: choice.randint(0, len(content))])
    elif how == "pipe":
        os.mkfifo(file)
    elif how == "device":
        file.symlink_to(choice.choice(("/dev/zero", "/dev/stdin", "nowhere", file.name)))
    elif how == "folder":
        file.mkdir()
    elif how == "deep":
        file.write_bytes(choice.choice((b"[", b'{"a":')) * choice.choice((10, 1000, 10**6)))
    elif how == "sparse":
        file.write_bytes(struct.pack("<Q", choice.choice((2, 2**30, 2**62))))
        os.truncate(file, choice.choice((2**31, 2**43)))


DAMAGES = ("content",) * 10 + ("bytes", "truncated", "pipe", "device", "folder", "deep", "sparse", "missing")
DAMAGE = st.tuples(st.sampled_from(DAMAGES), st.integers(0, 2**32), JUNK, st.booleans())
