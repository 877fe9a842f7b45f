"""Which checkpoint is resumed, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest

from common.checkpoint.resume import check_changes, check_data, choose_checkpoint
from common.checkpoint.save import checkpoint_path, write_checkpoint
from common.config.load import restore_config
from common.config.plan import DataSummary
from common.errors import UserError
from common.testing.checkpoints import build_about, build_content

CONFIG = build_about("SEED=1", "LEARNING_RATE=0.1", "DATA.order='random'")["config"]
DATA = DataSummary(60, 10, 3, fingerprint="same")
MAY_CHANGE = [
    "CHECKPOINT_EVERY=3",
    "DATA.root=b",
    "LOG.every=3",
    "MICRO_BATCH_SIZE=3",
    "MODEL.activation_checkpoint=True",
    "TENSOR_PARALLEL_SIZE=3",
    "gradient_accumulation=3",
    "torch_ddp.find_unused_parameters=True",
    "zero.stage=3",
]


def write(output: Path, *steps: int) -> list[Path]:
    paths = [checkpoint_path(output / "checkpoints", step) for step in steps]
    for step, path in zip(steps, paths, strict=True):
        write_checkpoint(
            path, build_content(step, 1.0, "SEED=1", "LEARNING_RATE=0.1", "DATA.order='random'")
        )
    (output / "config.json").write_text(json.dumps(build_about()))
    return paths


def test_the_newest_is_chosen(tmp_path):
    first, second = write(tmp_path, 9, 12)
    assert choose_checkpoint("auto", tmp_path) == second
    assert choose_checkpoint(str(first), tmp_path / "other") == first
    with pytest.raises(
        UserError, match="--resume .*-00000009: .* has continued to step-00000012; .* --output DIR$"
    ):
        choose_checkpoint(
            str(first), tmp_path
        )  # a rerun would resume from the later one, of the abandoned training
    for path in (second, tmp_path):
        assert choose_checkpoint(str(path), tmp_path) == second
    assert choose_checkpoint(str(tmp_path), tmp_path / "other") == second
    assert choose_checkpoint("auto", tmp_path / "other") is None
    assert choose_checkpoint("never", tmp_path / "other") is None
    (own,) = write(branch := tmp_path / "branch", 10)
    for origin, path in (("/gone/run/step", "/gone/run"), (first, tmp_path)):
        starts = [{"from": "/other"}, {"from": str(origin)}, {"from": str(own)}]
        (branch / "config.json").write_text(json.dumps(build_about() | {"starts": starts}))
        assert choose_checkpoint(str(path), branch) == own
    shutil.rmtree(own)
    assert choose_checkpoint(str(first), branch) == first
    (second / "trainer.json").write_text("")
    assert choose_checkpoint(str(first), tmp_path) == first
    with pytest.raises(
        UserError,
        match="step-00000012: this checkpoint cannot be resumed, trainer.json has changed",
    ):
        choose_checkpoint(str(second), tmp_path / "other")
    (first / "trainer.json").write_text("")
    with pytest.raises(
        UserError, match="none of the 2 checkpoints can be resumed"
    ):  # it must not start from nothing
        choose_checkpoint("auto", tmp_path)


@pytest.mark.parametrize(
    ("resume", "output", "words"),
    [
        ("never", "a", "holds another run: choose another folder"),
        ("{}/a", "b", "b holds another run than --resume .*/a"),
        ("nope", "c", "^--resume .*nope: neither a checkpoint nor a run with one"),
    ],
)
def test_what_is_refused(resume, output, words, tmp_path):
    for name in ("a", "b"):
        write(tmp_path / name, 9)
    with pytest.raises(UserError, match=words):
        choose_checkpoint(resume.format(tmp_path), tmp_path / output)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            "LEARNING_RATE=0.2",
            r"LEARNING_RATE=0.2 \(was 0.1\): the run in .* differently; keep .* --output DIR, .*",
        ),
        ("NUM_EPOCHS=4", r"NUM_EPOCHS=4 \(was 5\): "),
        ("OPTIMIZER.eps=1", r"OPTIMIZER.eps=1 \(was None\): "),
    ],
)
def test_what_changes_training_is_refused_unless_allowed_or_branched_off(tmp_path, setting, words):
    (path,) = write(tmp_path, 9)
    changed, key = (
        restore_config(CONFIG, [setting, *MAY_CHANGE], where=""),
        setting.partition("=")[0],
    )
    with pytest.raises(UserError, match=words) as refused:
        check_changes(path, changed, tmp_path, ["SEED"], 10)
    assert str(refused.value).endswith(
        f"branch off with --resume {path} --output DIR, or add --allow-change {key}"
    )
    check_changes(path, changed, tmp_path, [key], 10)
    check_changes(path, changed, tmp_path, [key.partition(".")[0]], 10)
    check_changes(path, changed, tmp_path / "branch", [], 10)
    check_changes(
        path,
        restore_config(CONFIG, ["NUM_EPOCHS=6", "WARMUP_EPOCHS=1"], where=""),
        tmp_path,
        [],
        10,
    )


@pytest.mark.parametrize(
    "setting",
    ["TOTAL_BATCH_SIZE=32", "SEED=2", "OPTIMIZER.name='sgd'", "INIT='a'", "MODEL.depth=2"],
)
def test_what_the_state_depends_on_never_changes(tmp_path, setting):
    (path,) = write(tmp_path, 9)
    changed = restore_config(CONFIG, [setting], where="")
    with pytest.raises(
        UserError, match=f"{setting}.*: .* keep .*, or start another run with --output DIR .--init"
    ):
        check_changes(path, changed, tmp_path / "branch", [setting.partition("=")[0]], 10)


def test_another_data_set_is_refused_unless_allowed(tmp_path, capsys):
    (path,) = write(tmp_path, 9)
    check_data(path, DATA, [])
    other = DataSummary(60, 10, 3, fingerprint="other")
    with pytest.raises(
        UserError, match=r"\(61 training images then, 60 now\).*--allow-change DATA.root"
    ):
        check_data(path, other, [])
    assert capsys.readouterr().out == ""
    check_data(path, other, ["DATA.root"])
    assert (
        capsys.readouterr().out
        == "DATA.root is another data set from here on (61 training images then, 60 now); "
        "the best starts anew\n"
    )
