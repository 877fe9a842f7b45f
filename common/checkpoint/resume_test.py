"""Which checkpoint is resumed, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest

from common.checkpoint.content import read_config
from common.checkpoint.resume import add_start, check_changes, check_data, choose_checkpoint
from common.checkpoint.save import checkpoint_path, write_checkpoint
from common.config.load import restore_config
from common.config.plan import DataSummary
from common.errors import UserError
from common.testing.checkpoints import build_content, build_metadata

SETTINGS = "SEED=1", "LEARNING_RATE=0.1", "DATA.order='random'"
CONFIG = build_metadata(*SETTINGS)["config"]
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
        write_checkpoint(path, build_content(step, 1.0, *SETTINGS))
    (output / "config.json").write_text(json.dumps(build_metadata()))
    return paths


def test_the_newest_is_chosen(tmp_path):
    first, second = write(tmp_path, 9, 12)
    for resume in ("auto", str(second), str(tmp_path)):
        assert choose_checkpoint(resume, tmp_path) == second
    # a rerun would resume from the later one, of the abandoned training
    with pytest.raises(UserError, match="-00000009: .* has continued to step-00000012; .* DIR$"):
        choose_checkpoint(str(first), tmp_path)
    for resume, path in (("auto", None), (str(first), first), (str(tmp_path), second)):
        assert choose_checkpoint(resume, tmp_path / "other") == path


def test_a_branch_is_resumed_from_its_own_checkpoint(tmp_path):
    (first,) = write(tmp_path, 9)
    branch = tmp_path / "branch"
    (own,) = write(branch, 10)
    for origin, resume in (("/gone/run/step", "/gone/run"), (str(first), str(tmp_path))):
        starts = [{"from": "/other"}, {"from": origin}, {"from": str(own)}]
        (branch / "config.json").write_text(json.dumps(build_metadata() | {"starts": starts}))
        assert choose_checkpoint(resume, branch) == own
    shutil.rmtree(own)
    assert choose_checkpoint(str(first), branch) == first


def test_a_damaged_checkpoint_is_skipped(tmp_path, capsys):
    first, second = write(tmp_path, 9, 12)
    content = bytearray((second / "optimizer.safetensors").read_bytes())
    content[-1] ^= 1
    (second / "optimizer.safetensors").write_bytes(content)
    for resume in ("auto", str(first)):
        assert choose_checkpoint(resume, tmp_path) == first
    said = f"warning: {second} cannot be resumed (optimizer.safetensors has changed since it was"
    assert said in capsys.readouterr().err
    with pytest.raises(UserError, match="12: this checkpoint cannot be resumed, optimizer.safet"):
        choose_checkpoint(str(second), tmp_path / "other")
    (first / "trainer.json").write_text("")
    # it must not start from nothing
    with pytest.raises(UserError, match="none of the 2 checkpoints can be resumed"):
        choose_checkpoint("auto", tmp_path)


def test_another_data_set_is_refused_unless_allowed(tmp_path, capsys):
    (path,) = write(tmp_path, 9)
    check_data(path, DataSummary(61, 10, 3, fingerprint="same"), [])
    other = DataSummary(60, 10, 3, fingerprint="other")
    said = r"\(61 training images then, 60 now\).*--allow-change DATA.root"
    with pytest.raises(UserError, match=said):
        check_data(path, other, [])
    assert capsys.readouterr().out == ""
    check_data(path, other, ["DATA.root"])
    assert capsys.readouterr().out == (
        "DATA.root is another data set from here on (61 training images then, 60 now); the best "
        "starts anew\n"
    )


def test_another_run_is_not_written_over(tmp_path):
    write(tmp_path / "a", 9)
    write(tmp_path / "b", 9)
    with pytest.raises(UserError, match="holds another run: choose another folder"):
        choose_checkpoint("never", tmp_path / "a")
    with pytest.raises(UserError, match="b holds another run than --resume .*/a"):
        choose_checkpoint(str(tmp_path / "a"), tmp_path / "b")


@pytest.mark.parametrize(
    ("key", "value", "before"),
    [("LEARNING_RATE", 0.2, 0.1), ("NUM_EPOCHS", 4, 5), ("OPTIMIZER.eps", 1.0, None)],
)
def test_what_changes_training_is_refused_unless_allowed_or_branched_off(
    key, value, before, tmp_path
):
    (path,) = write(tmp_path, 9)
    changed = restore_config(CONFIG, [f"{key}={value}", *MAY_CHANGE], where="")
    with pytest.raises(UserError) as refused:
        check_changes(path, changed, tmp_path, ["SEED"])
    said = f"{key}={value} (was {before}): the run in {tmp_path} has trained with the earlier"
    assert str(refused.value).startswith(said)
    assert str(refused.value).endswith(f"--output DIR, or add --allow-change {key}")
    for allowed in (key, key.partition(".")[0]):
        check_changes(path, changed, tmp_path, [allowed])
    check_changes(path, changed, tmp_path / "branch", [])
    longer = restore_config(CONFIG, ["NUM_EPOCHS=6", "WARMUP_EPOCHS=1"], where="")
    check_changes(path, longer, tmp_path, [])


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
        check_changes(path, changed, tmp_path / "branch", [setting.partition("=")[0]])


def test_a_resumed_run_keeps_the_first_init_and_says_what_changed(tmp_path):
    path = checkpoint_path(tmp_path / "checkpoints", 9)
    write_checkpoint(path, build_content(9, 1.0, "INIT=timm/vit"))
    metadata = build_metadata("INIT=None", "LEARNING_RATE=0.3", "LOG.every=3") | {"started": 1.0}
    metadata["plan"]["gpus"] = 2
    kept = add_start(metadata, path)
    assert kept["config"]["INIT"] == "timm/vit"
    first, second = kept["starts"]
    assert first["step"] == 0
    assert (second["step"], second["from"]) == (9, str(path))
    before = build_metadata()["config"]["LEARNING_RATE"]
    assert second["changed"] == {"LEARNING_RATE": (before, 0.3), "processes": (1, 2)}


def test_a_run_that_does_not_say_how_it_was_split_was_split_by_count():
    metadata = build_metadata()
    del metadata["config"]["DATA"]["split"]
    assert read_config(Path("run"), metadata)["DATA"]["split"] == "counted"
    assert "split" not in metadata["config"]["DATA"]
