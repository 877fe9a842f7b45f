"""Whatever is in the folder of a run, it is read, or refused in one line."""

import copy
import json
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import SGD

from common.checkpoint.content import CONFIG, FILES, MARKER, METRICS, find_fault
from common.checkpoint.resume import add_start, changed_keys, choose_checkpoint
from common.checkpoint.save import checkpoint_path, load_full_state_dict, write_checkpoint
from common.checkpoint.saved_run import open_run
from common.errors import UserError
from common.files import sha256_of
from common.model.build import build_model
from common.testing.checkpoints import build_content, build_metadata
from common.tools.report import load_run, render

ABOUT = build_metadata()
DAMAGED = (*FILES, f"../../{CONFIG}", f"../../{METRICS}")
JUNK = [None, True, -1, 10**9, 2**63, 1e308]
JUNK += ["", "\x1b[2J", f"{'':é<300}"]
JUNK += [[], {}, [[1]], {"x": 1}]


def change_value(text: bytes, choice: random.Random) -> bytes:
    """Replace a value of the JSON in ``text``."""
    found = choice.choice([*re.finditer(rb'(?<=[\[:,\s])("[^"]*"|[-\w.+]+)(?=\s*[,\]}])', text)])
    junk = json.dumps(choice.choice(JUNK)).encode()
    return text[: found.start()] + junk + text[found.end() :]


def damage(file: Path, choice: random.Random) -> None:
    content = file.read_bytes()
    if file.suffix == ".safetensors":
        size = int.from_bytes(content[:8], "little")
        header = change_value(content[8 : 8 + size], choice)
        file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
    else:
        file.write_bytes(change_value(content, choice) + b"\n")


def report(run: Path) -> None:
    render([load_run(run, run.name)])


def evaluate(run: Path) -> None:
    opened = open_run(str(run))
    opened.load_model()
    assert len(opened.class_names) >= 3
    assert opened.batch > 0


def resume(run: Path) -> None:
    path = choose_checkpoint("auto", run)
    changed_keys(path, ABOUT["config"])
    add_start(copy.deepcopy(ABOUT), path)


@pytest.mark.parametrize(
    ("file", "change", "fault"),
    [
        ("model.safetensors", {}, " does not fit the model: "),
        ("raw.safetensors", {}, " does not fit the model: "),
        (
            "ema.safetensors",
            {},
            r" does not .*: cls_token missing \(model: \[1, 1, 8\]\), .*, .*, and 17 more; keep ",
        ),
        (
            "optimizer.safetensors",
            {"step/x": torch.ones(2)},
            " does not belong to its model: it has step/x; use another checkpoint",
        ),
        ("optimizer.safetensors", b"none", ""),
        (
            METRICS,
            b'{"kind": "eval", "step": 1, "loss": 1, "samples": 2}\n',
            " line 1: .* without top1, top5, ",
        ),
        ("trainer.json", (b'"trainer"', b'"version": 3, "trainer"'), "version: .*, not 3"),
        ("random.safetensors", None, "each with its SHA-256"),
    ],
)
def test_a_file_with_the_right_checksum_and_the_wrong_content(file, change, fault, tmp_path):
    content = build_content()
    before = content.pop(file, b"")
    if change is not None:
        content[file] = before.replace(*change) if isinstance(change, tuple) else change
    path = tmp_path / "step-00000001"
    write_checkpoint(path, content)
    said = find_fault(path)
    if said is None:
        model = build_model(**build_metadata()["config"]["MODEL"])
        with pytest.raises(UserError) as refused:
            load_full_state_dict(path, model, SGD(model.parameters()), averages={})
        said = str(refused.value)
    assert re.search(f"{file}.*{fault}", said)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.sampled_from(DAMAGED), st.integers(0, 10**6))
def test_a_changed_value_is_refused_in_one_line(tmp_path_factory, name, seed):
    run = tmp_path_factory.mktemp("damaged") / "run"
    path = checkpoint_path(run / "checkpoints", 1)
    write_checkpoint(path, build_content())
    for file in (CONFIG, METRICS):
        shutil.copy(path / file, run)
    damage(path / name, random.Random(seed))
    # whoever can write a file can write its checksum
    sums = [f"{sha256_of(path / each)}  {each}\n" for each in FILES]
    (path / MARKER).write_text("".join(sums))
    refusals = []
    # a report reads no tensors, and takes the longest to draw
    readers = (evaluate, resume) if name.endswith(".safetensors") else (evaluate, resume, report)
    for read in readers:
        try:
            read(run)
        except UserError as error:
            refusals.append(str(error))
    assert all(line and "\n" not in line for line in refusals)
