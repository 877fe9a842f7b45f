"""Valid data sets, checkpoints, weights and image folders, and mutations of them."""

import contextlib
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from hypothesis import strategies as st

from common.checkpoint.pretrained import load_pretrained
from common.checkpoint.resume import changed_keys, check_data, note_start
from common.checkpoint.save import FILES, MARKER, checkpoint_path, find_fault, write_checkpoint
from common.checkpoint.saved_run import open_run
from common.config.batch_plan import DataSummary
from common.errors import UserError
from common.files import read_text, sha256_of
from common.model.vit import build_model
from common.testing.checkpoints import build_about, build_content
from common.tools.report import load_run, render
from fuzzing.configs import Example
from fuzzing.damage import mutate
from imagenet_dali.dataloader import describe_data
from imagenet_dali.dataset import open_split
from imagenet_dali.preparation import prepare
from imagenet_dali.testing import jpeg
from imagenet_dali.verify import check
from imagenet_dali.writer import Options

about = cache(build_about)


@cache
def originals() -> Path:
    """Create a valid data set, run and weight files."""
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
    """Recompute the checksums in the manifest."""
    manifest = json.loads(read_text(root / "manifest.json"))
    for split, described in manifest["splits"].items():
        described["records_sha256"] = sha256_of(root / "records" / f"{split}.npy", 10**8)
        for shard in described["shards"]:
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
