"""Nothing in the folder of an untrusted run is executed, and nothing is written through it."""

import json
import pickle
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from common.checkpoint.content import FILES, MARKER
from common.checkpoint.save import newest_checkpoint
from common.colossal import shutdown
from common.errors import UserError
from common.files import sha256_of
from common.tools import evaluate, export, predict, report


class Evil:
    """Unpickled, it creates the file that it names."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple:
        return Path.touch, (self.proof,)


@pytest.fixture
def hostile(run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(run, tmp_path / "run", symlinks=True)


def change(run: Path, name: str, content: bytes) -> None:
    """Replace a file of the run's checkpoint, and its checksum."""
    checkpoint = newest_checkpoint(run / "checkpoints")
    (checkpoint / name).write_bytes(content)
    names = [line.partition("  ")[2] for line in (checkpoint / MARKER).read_text().splitlines()]
    (checkpoint / MARKER).write_text("".join(f"{sha256_of(checkpoint / name)}  {name}\n" for name in names))


def commands(run: Path) -> list[tuple]:
    image = next(run.rglob("*.jpeg"))
    timm = ["--to", "timm", "--output", str(run.parent / "export")]
    return [(evaluate.main, [str(run)]), (predict.main, [str(run), str(image)]), (export.main, [str(run), *timm])]


def test_no_module_that_a_run_names_is_imported(hostile: Path) -> None:
    about = json.loads((newest_checkpoint(hostile / "checkpoints") / "config.json").read_text())
    change(hostile, "config.json", json.dumps(about | {"task": "evil"}).encode())
    for main, argv in commands(hostile):
        with pytest.raises(UserError, match="config.json: task='evil' is none of imagenet_dali, "):
            main(argv)


@pytest.mark.parametrize("name", FILES[:-1])
def test_nothing_in_a_run_is_unpickled(hostile: Path, name: str) -> None:
    proof = hostile.parent / "proof"
    change(hostile, name, pickle.dumps(Evil(proof)))
    for main, argv in [*commands(hostile), (report.main, [str(hostile)])]:
        with suppress(UserError, ValueError):  # some of them do not read the file
            main(argv)
    shutdown()
    assert not proof.exists()
    pickle.loads(pickle.dumps(Evil(proof)))
    assert proof.exists()


@pytest.mark.parametrize(
    "name", ["report.html", "evaluation/{step}/evaluation.json", "evaluation/{step}/confusion.png"]
)
def test_nothing_is_written_through_a_link_in_a_run(hostile: Path, tmp_path: Path, name: str) -> None:
    link, ours = hostile / name.format(step=newest_checkpoint(hostile / "checkpoints").name), tmp_path / "ours"
    ours.write_text("ours")
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)  # of an evaluation by another test
    link.symlink_to(ours)
    with pytest.raises(UserError, match=f"{link}: a link, or not a regular file; remove it"):
        (report if name == "report.html" else evaluate).main([str(hostile)])
    assert ours.read_text() == "ours"
