"""Nothing in the folder of an untrusted run is executed."""

import json
import pickle
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from common.checkpoint.content import FILES, MARKER
from common.checkpoint.save import newest_checkpoint
from common.colossal import shutdown
from common.errors import UserError
from common.files import sha256_of
from common.testing.tiny_task import train
from common.tools import evaluate, export, predict, report


class Evil:
    """Unpickled, it creates the file that it names."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple:
        return Path.touch, (self.proof,)


@pytest.fixture
def hostile(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run with a module of its own, which could be imported from the current folder."""
    shutil.copytree(run, tmp_path / "run", symlinks=True)
    (tmp_path / "run" / "evil.py").write_text(f"open({str(tmp_path / 'proof')!r}, 'w')")
    monkeypatch.chdir(tmp_path / "run")
    monkeypatch.syspath_prepend(tmp_path / "run")
    return tmp_path / "run"


def sign(run: Path) -> None:
    """Rewrite the checkpoint's checksums."""
    checkpoint = newest_checkpoint(run / "checkpoints")
    names = [line.partition("  ")[2] for line in (checkpoint / MARKER).read_text().splitlines()]
    (checkpoint / MARKER).write_text("".join(f"{sha256_of(checkpoint / name)}  {name}\n" for name in names))


def commands(run: Path) -> list[tuple[Callable[[list[str]], object], list[str]]]:
    image = next((run.parent / "run").rglob("*.jpeg"))
    return [
        (evaluate.main, [str(run)]),
        (predict.main, [str(run), str(image)]),
        (export.main, [str(run), "--to", "timm", "--output", str(run.parent / "export")]),
    ]


def test_no_module_that_a_run_names_is_imported(hostile: Path) -> None:
    for file in (hostile / "config.json", newest_checkpoint(hostile / "checkpoints") / "config.json"):
        about = json.loads(file.read_text())
        about["task"] = "evil"
        file.write_text(json.dumps(about))
    sign(hostile)
    for main, argv in commands(hostile):
        with pytest.raises(UserError, match="config.json: task='evil' is none of imagenet_dali, "):
            main(argv)
    assert not (hostile.parent / "proof").exists()


@pytest.mark.parametrize("name", FILES[:-1])
def test_nothing_in_a_run_is_unpickled(data: Path, hostile: Path, name: str) -> None:
    checkpoint = newest_checkpoint(hostile / "checkpoints")
    (checkpoint / name).write_bytes(pickle.dumps(Evil(hostile.parent / "proof")))
    sign(hostile)
    for main, argv in commands(hostile):
        with suppress(UserError, ValueError):  # some of them do not read the file
            main(argv)
    shutdown()
    with pytest.raises(UserError, match=f"damaged, {name}: "):
        train(data, hostile.parent / "other", flags=["--resume", str(checkpoint)])
    shutdown()
    report.main([str(hostile), "--output", str(hostile.parent / "report.html")])
    assert not (hostile.parent / "proof").exists()


@pytest.mark.parametrize(
    ("main", "name"),
    [
        (report.main, "report.html"),
        *(
            (evaluate.main, f"evaluation/{{step}}/{name}")
            for name in ("evaluation.json", "classes.csv", "confusion.png")
        ),
    ],
)
def test_nothing_is_written_through_a_link_in_a_run(hostile: Path, tmp_path: Path, main, name: str) -> None:
    step = newest_checkpoint(hostile / "checkpoints").name
    link, ours = hostile / name.format(step=step), tmp_path / "ours"
    ours.write_text("ours")
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)  # of an evaluation by another test
    link.symlink_to(ours)
    with pytest.raises(UserError, match=f"{link}: a link, or not a regular file; remove it"):
        main([str(hostile)])
    assert ours.read_text() == "ours"


def test_the_proof_would_be_there(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Evil(tmp_path / "proof")))
    assert (tmp_path / "proof").exists()
