"""Config files and ``--set`` texts, with values at and just beyond the bounds of every key."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

from annotated_types import Ge, Gt, Le, Lt
from hypothesis import strategies as st

from common.config.batch_plan import DataSummary
from common.config.schema import all_keys
from common.estimate.cluster import parse_cluster
from common.estimate.dry_run import print_dry_run
from common.launch.launcher import detect_launch
from common.run.arguments import parse_arguments
from common.run.prepare import prepare_run
from fuzzing.damage import JUNK

BASE = "TOTAL_BATCH_SIZE = 64\nNUM_EPOCHS = 3\nLEARNING_RATE = 1e-3\nMODEL = dict(width=32, depth=2, heads=2)\n"
Example = tuple[str, Callable[[Path], object]]


def edges(field: Any) -> list[Any]:
    """Return values at and just beyond the bounds of a key."""
    bounds = [getattr(item, name) for item in flat(field.metadata) for kind, name in BOUNDS if isinstance(item, kind)]
    near = [value + step for value in bounds for step in (-1, -1e-9, 0, 1e-9, 1)]
    choices = [choice for kind in flat([field.annotation]) for choice in get_args(kind) if not isinstance(choice, type)]
    default = [] if field.is_required() or hasattr(field.default, "model_fields_set") else [field.default]
    return [*near, *(choice for choice in choices if isinstance(choice, (str, int))), *default]


BOUNDS = ((Ge, "ge"), (Gt, "gt"), (Le, "le"), (Lt, "lt"))


def flat(items: Any) -> Iterator[Any]:
    """Yield annotations, including nested ones."""
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
    """Run ``--dry-run`` on an example; a quarter of them with the table of all modes."""
    (folder / "tiny.py").write_text(text, errors="surrogateescape")
    root = ["--set", f"DATA.root={folder}"] if named else []
    gpus = ["--gpus", "8"] if len(text + "".join(words)) % 4 == 0 else []
    args = parse_arguments(["--config", str(folder / "tiny.py"), "--dry-run", *root, *gpus, *words], None)
    prepared = prepare_run(args, detect_launch(args, {}), lambda data: DataSummary(50_000, 100, 10, "x"))
    print_dry_run(*prepared[:3], parse_cluster(args) if gpus else None)


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
