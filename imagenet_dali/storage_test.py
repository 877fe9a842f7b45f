"""Storage that fails once changes nothing; storage that keeps failing ends the command."""

import errno
import os
import tarfile
from pathlib import Path

import pytest

from common.checkpoint.save import newest_checkpoint
from common.shards import prepare
from common.testing.commands import read_folder, run_forked
from common.testing.photographs import write_colours
from common.tools import predict
from imagenet_dali.testing import train

FIRST = 2  # the read that fails


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> Path:
    """Images in folders, in tars, as shards, and a run of one step."""
    folder = tmp_path_factory.mktemp("stored")
    write_colours(folder / "images", 65, height=20, width=24, kind="jpg")
    prepare.prepare(folder / "images", folder / "shards")
    (folder / "tars").mkdir()
    for number in range(3):
        with tarfile.open(folder / f"tars/{number}.tar", "w") as tar:
            images = sorted(folder.glob(f"images/*/*{number}.jpg"))
            for label, path in enumerate(images):
                (folder / "label").write_text(str(label % 3))
                tar.add(path, f"{label}.jpg")
                tar.add(folder / "label", f"{label}.cls")
    train(folder, "run", f"DATA.root={folder}/shards", "DATA.workers=0", "MAX_STEPS=1")
    return folder


def train_on(source: str, stored: Path, output: Path) -> object:
    loader = "torchvision" if source == "images" else "dali"
    settings = [
        f"DATA.root={stored}/{source}",
        f"DATA.loader={loader}",
        "DATA.workers=0",
        "MAX_STEPS=2",
    ]
    train(output, "run", *settings)
    checkpoint = newest_checkpoint(output / "run/checkpoints")
    return (checkpoint / "model.safetensors").read_bytes()


def prepare_from(source: str, stored: Path, output: Path) -> object:
    places = [f"{stored}/{source}", f"{output}/made"]
    prepare.main([*places, "--workers=1", "--validation-share=0.5"])
    made = read_folder(output / "made")
    del made["manifest.json"]
    return made


def adopt(source: str, stored: Path, output: Path) -> object:
    os.system(f"cp -r {stored}/{source} {output}; rm {output}/{source}/manifest.json")
    prepare.main(["--adopt", f"{output}/{source}", "--workers=1"])
    return read_folder(output / source)


def check(source: str, stored: Path, _: Path) -> None:
    prepare.main(["--check", f"{stored}/{source}", "--workers=1"])


def predict_all(source: str, stored: Path, output: Path) -> object:
    predict.main([f"{stored}/run", f"{stored}/{source}", f"--features={output}/a.npy"])
    return (output / "a.npy").read_bytes()


COMMANDS = [
    (train_on, "images", ".jpg"),
    (train_on, "shards", "-of-"),
    (prepare_from, "images", ".jpg"),
    (prepare_from, "tars", ".tar"),
    (adopt, "shards", "-of-"),
    (check, "shards", "-of-"),
    (predict_all, "images", ".jpg"),
]


@pytest.mark.parametrize(("command", "source", "name"), COMMANDS)
def test_a_read_that_fails_is_repeated_and_no_image_is_blamed(
    command, source, name, stored, tmp_path
):
    plain = Path.open
    results = tmp_path / "results"

    def main(argv: list[str]) -> None:
        """Run the command while ``argv[0]`` reads fail; write what it made."""
        calls = []
        failures = int(argv[0])

        def fail(path: Path, mode: str = "r", *args: object, **options: object) -> object:
            if mode == "rb" and name in path.name:
                calls.append(path)
                if FIRST <= len(calls) < FIRST + failures:
                    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
            return plain(path, mode, *args, **options)

        Path.open = fail
        output = tmp_path / argv[0]
        output.mkdir()
        result = repr(command(source, stored, output))
        results.write_text(result.replace(str(output), ""))
        assert len(calls) >= FIRST

    run_forked(main, [0])
    whole = results.read_text()
    run_forked(main, [1])
    assert results.read_text() == whole
    ended = run_forked(main, [9999], code=2)
    error = ended.stderr.splitlines()[-1]
    # adopt reads a copy
    folder = tmp_path if command is adopt else stored
    assert error.startswith(f"error: {folder}/")
    assert "Stale file handle" in error
    printed = ended.stdout + ended.stderr
    for blame in ("remove or replace", "refused", "skipped"):
        assert blame not in printed
