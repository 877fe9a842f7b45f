"""Feed configs, settings, data sets, checkpoints, weights and image folders that nobody meant to what reads them.

python scripts/fuzz.py --examples 5000 --seed 1

An example is accepted, or refused in one line (`UserError`), within 20 s and 2 GB; all else is broken and printed.
Exit status 1 if anything is broken.
"""

import argparse
import contextlib
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import torch
from annotated_types import Ge, Gt, Le, Lt
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from common.checkpoint.pretrained import load_pretrained
from common.checkpoint.resume import changed_keys, check_data, note_start
from common.checkpoint.save import FILES, MARKER, checkpoint_path, find_fault, write_checkpoint
from common.checkpoint.saved_run import open_run
from common.config.batch_plan import DataSummary
from common.config.schema import all_keys
from common.errors import UserError, printable
from common.files import read_text, sha256_of
from common.launch.launcher import detect_launch
from common.model.vit import build_model
from common.run.arguments import parse_arguments
from common.run.prepare import prepare_run
from common.table import format_table
from common.testing.checkpoints import build_about, build_content
from common.tools.report import load_run, render
from imagenet_dali.dataloader import describe_data
from imagenet_dali.dataset import open_split
from imagenet_dali.preparation import prepare
from imagenet_dali.testing import jpeg
from imagenet_dali.verify import check
from imagenet_dali.writer import Options

SECONDS, MEMORY, LINE = 20, 2 << 30, 4000
BASE = "TOTAL_BATCH_SIZE = 64\nNUM_EPOCHS = 3\nLEARNING_RATE = 1e-3\nMODEL = dict(width=32, depth=2, heads=2)\n"
NUMBERS = [-1, 0, 1, 2, 3, 7, 16, 10**6, 2**31, 2**63 - 1, 2**63, 10**30, -0.0, 0.5, 1e-320, 1e308, float("inf")]
TEXTS = ["", "x", "a\nb", "\x1b[2J", "\u2028", "é" * 300, "../../x", "/dev/zero", "None", "\0"]
JUNK = st.sampled_from([*NUMBERS, *TEXTS, None, True, float("nan"), [], {}, [[[]]], [1, 2, 3], {"x": 1}])
Example = tuple[str, Callable[[Path], object]]


class HangError(BaseException):
    """An example took too long; no ``except Exception`` takes it for its own."""


# ---- configs and settings


def edges(field: Any) -> list[Any]:
    """Return values of a key at the edges of what it takes, and just beyond."""
    bounds = [getattr(item, name) for item in flat(field.metadata) for kind, name in BOUNDS if isinstance(item, kind)]
    near = [value + step for value in bounds for step in (-1, -1e-9, 0, 1e-9, 1)]
    choices = [choice for kind in flat([field.annotation]) for choice in get_args(kind) if not isinstance(choice, type)]
    default = [] if field.is_required() or hasattr(field.default, "model_fields_set") else [field.default]
    return [*near, *(choice for choice in choices if isinstance(choice, (str, int))), *default]


BOUNDS = ((Ge, "ge"), (Gt, "gt"), (Le, "le"), (Lt, "lt"))


def flat(items: Any) -> Iterator[Any]:
    """Yield annotations and what is inside them."""
    for item in items:
        yield item
        yield from flat(getattr(item, "metadata", ()) or ())
        yield from flat(part for part in get_args(item) if not isinstance(part, (str, int)))


KEYS = dict(all_keys())
KEY = st.sampled_from(sorted(KEYS))
PAIR = KEY.flatmap(lambda key: st.tuples(st.just(key), st.one_of(st.sampled_from(edges(KEYS[key]) or [1]), JUNK)))


def source_of(value: Any) -> str:
    return re.sub(r"\b(inf|nan)\b", r"float('\1')", repr(value))


def start(folder: Path, text: str, words: list[str], named: bool) -> None:
    """Plan what a start would."""
    (folder / "tiny.py").write_text(text, errors="surrogateescape")
    root = ["--set", f"DATA.root={folder}"] if named else []
    args = parse_arguments(["--config", str(folder / "tiny.py"), "--dry-run", *root, *words], None)
    prepare_run(args, detect_launch(args, {}), lambda data: DataSummary(50_000, 100, 10, "x"))


def config_example(pairs: list[tuple[str, Any]], named: bool) -> Example:
    lines = []
    for key, value in pairs:
        first, _, rest = key.partition(".")
        names = rest.split(".") if rest else []
        nested = value if not names else None
        for name in reversed(names):
            nested = {name: value if nested is None else nested}
        merge = f"{{**globals().get({first!r}, {{}}), **{source_of(nested)}}}" if names else source_of(nested)
        lines.append(f"{first} = {merge}\n")
    return repr(pairs), lambda folder: start(folder, BASE + "".join(lines), [], named)


def setting_example(texts: list[str], named: bool) -> Example:
    words = [f"--set={text}" for text in texts]
    return repr(texts), lambda folder: start(folder, BASE, words, named)


SETTING = st.one_of(
    PAIR.map(lambda pair: f"{pair[0]}={source_of(pair[1])}"),
    st.builds(lambda key, text: f"{key}={text}", KEY, st.text(max_size=40)),
    st.builds(lambda key, n, c: f"{key}={c * n}", KEY, st.integers(1, 9999), st.sampled_from("[-({9")),
    st.text(max_size=30),
    st.sampled_from(["OPTIMIZER={[1]: 2}", 'DATA.root="\\d"', "DATA={**{}}", "MODEL=dict(**{})", "SEED=1or 2"]),
)


# ---- files


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
    """Change a file in one of `DAMAGES`."""
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


about = cache(build_about)


@cache
def originals() -> Path:
    """Make a data set, a run and files of weights, which are valid."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    for label in "ab":
        (folder / "images" / label).mkdir(parents=True)
        for number in range(5):
            (folder / "images" / label / f"{number}.jpg").write_bytes(jpeg(8 + number, 8, seed=number))
    prepare(folder / "images", folder / "data", Options(shards=2))
    content = build_content()
    write_checkpoint(checkpoint_path(folder / "run" / "checkpoints", 1), content)
    for name in ("config.json", "metrics.jsonl"):
        shutil.copy(checkpoint_path(folder / "run" / "checkpoints", 1) / name, folder / "run")
    (folder / "weights").mkdir()
    write_checkpoint(folder / "weights" / "all", content)
    shutil.move(folder / "weights" / "all" / "model.safetensors", folder / "weights")
    shutil.rmtree(folder / "weights" / "all")
    torch.save(content["model.safetensors"], folder / "weights" / "model.pth")
    (folder / "weights" / "config.json").write_text(
        json.dumps({"architecture": "vit_tiny_patch16_224", "model_args": {"num_heads": 2, "embed_dim": 8}})
    )
    return folder


def copied(name: str, folder: Path) -> Path:
    return shutil.copytree(originals() / name, folder / name, symlinks=True)


def damage_files(name: str, folder: Path, files: list[str], damages: list[tuple]) -> tuple[Path, bool]:
    root, is_signed = copied(name, folder), False
    for how, number, junk, signs in damages:
        choice = random.Random(number)
        damaged_already = (KeyError, ValueError, TypeError, AttributeError, OSError, RecursionError)
        with contextlib.suppress(*damaged_already):
            mutate(root / choice.choice(files), how, choice, junk)
        is_signed |= signs
    return root, is_signed


def data_example(damages: list[tuple]) -> Example:
    files = [
        str(path.relative_to(originals() / "data")) for path in (originals() / "data").rglob("*") if path.is_file()
    ]

    def read(folder: Path) -> None:
        root, is_signed = damage_files("data", folder, [*files, *["manifest.json"] * 6], damages)
        if is_signed:
            with contextlib.suppress(Exception):
                sign_data(root)
        describe_data({"root": str(root), "loader": "dali"})
        for split in map(open_split, (root, root), ("train", "validation")):
            for index in range(len(split)):
                split.read(index)
        if faults := check(root, 1):
            raise UserError(faults[0])

    return repr(damages), read


def sign_data(root: Path) -> None:
    """Let the sums in the manifest fit."""
    manifest = json.loads(read_text(root / "manifest.json"))
    for split, described in manifest["splits"].items():
        described["records_sha256"] = sha256_of(root / "records" / f"{split}.npy", 10**8)
        for shard in described["shards"]:
            shard["index_sha256"] = sha256_of(root / "idx_files" / split / f"{Path(shard['name']).name}.idx", 10**8)
            shard["bytes"] = (root / shard["name"]).stat().st_size
    (root / "manifest.json").write_text(json.dumps(manifest))


def checkpoint_example(damages: list[tuple]) -> Example:
    inside = "checkpoints/step-00000001"
    files = [*(f"{inside}/{name}" for name in (*FILES, *FILES, MARKER)), "config.json", "metrics.jsonl"]

    def read(folder: Path) -> None:
        run, is_signed = damage_files("run", folder, files, damages)
        path = run / inside
        if is_signed and (path / MARKER).is_file():
            with contextlib.suppress(OSError, UserError):
                (path / MARKER).write_text("".join(f"{sha256_of(path / name, 10**8)}  {name}\n" for name in FILES))
        refusals = [refusal for read in (resume, use, report) if (refusal := refused(read, path, run))]
        if refusals:
            raise refusals[0]

    return repr(damages), read


def refused(read: Callable, path: Path, run: Path) -> UserError | None:
    try:
        read(path, run)
    except UserError as error:
        return error
    return None


def resume(path: Path, run: Path) -> None:
    if fault := find_fault(path):
        raise UserError(fault)
    changed_keys(path, about()["config"])
    check_data(path, DataSummary(61, 10, 3, fingerprint="same"), True)
    note_start(about(), path)


def use(path: Path, run: Path) -> None:
    opened = open_run(str(run))
    opened.load_model()
    assert len(opened.class_names) >= 3
    assert opened.evaluation is None
    assert opened.batch + opened.step > 0


def report(path: Path, run: Path) -> None:
    render([load_run(run, run.name)])


def init_example(name: str, damages: list[tuple]) -> Example:
    def read(folder: Path) -> None:
        root, _ = damage_files("weights", folder, [name, name, "config.json"], damages)
        load_pretrained(build_model(**about()["config"]["MODEL"]), str(root / name))

    return repr((name, damages)), read


NAME = st.one_of(
    st.sampled_from(["a", "A", "CON", "-x", ".hidden", "train", "val", "é\u200d", " ", "\\n", "$x", "é" * 100]),
    st.sampled_from(["a\nb", "\x1b[2J", "\u2028", "caf\udce9"]),
    st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=20),
)
ENTRY = st.tuples(NAME, st.sampled_from(["jpeg", "jpeg", "jpeg", "empty", "noise", "pipe", "link", "loop", "folder"]))


def images_example(classes: dict[str, list[tuple[str, str]]], share: float) -> Example:
    def read(folder: Path) -> None:
        source = shutil.copytree(originals() / "images", folder / "images")
        for name, entries in classes.items():
            with contextlib.suppress(OSError):  # too long
                (source / name).mkdir(exist_ok=True)
            for entry, kind in entries:
                if not os.path.lexists(source / name / entry):
                    with contextlib.suppress(OSError):
                        make(source / name / entry, kind)
        prepare(source, folder / "data", Options(), max_refused=share)
        names = open_split(folder / "data", "train").class_names
        shown = sorted(name for name in os.listdir(source) if not name.startswith("."))
        assert names == shown or (source / "train").is_dir(), names
        assert not check(folder / "data", 1)

    return repr(classes), read


def make(path: Path, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind in ("link", "loop"):
        path.symlink_to("nowhere" if kind == "link" else "..")
    else:
        path.write_bytes({"jpeg": jpeg(8, 8), "empty": b"", "noise": b"x" * 100}[kind])


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


# ---- running


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Raise `HangError` after `SECONDS`, and MemoryError beyond `MEMORY` more than there is now."""

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
    """Return what became of an example; print it if it is broken."""
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
    """Try examples of a kind; return how many became what."""
    originals()
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=5000, help="of all kinds together (default: 5000)")
    parser.add_argument("--seed", type=int, default=0, help="of the random choices (default: 0)")
    parser.add_argument("--only", choices=KINDS, help="one kind alone")
    args = parser.parse_args()
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
    sys.exit(main())
