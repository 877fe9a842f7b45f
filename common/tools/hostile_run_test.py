"""An untrusted run: nothing that it names is imported, nothing is written through its links."""

import json
import shutil

import pytest

from common.errors import UserError
from common.tools import evaluate, report


def test_no_module_that_a_run_names_is_imported(run, tmp_path):
    hostile = shutil.copytree(run, tmp_path / "run", symlinks=True)
    file = hostile / "checkpoints" / "step-00000010" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"task": "evil"}))
    with pytest.raises(UserError, match="config.json: task='evil' is none of imagenet_dali, "):
        evaluate.main([str(hostile)])


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("absent.py", "ModuleNotFoundError: No module named 'absent'"),
        ("empty.py", "AttributeError: module 'empty' has no attribute 'TASK'"),
        ("broken.py", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_script_without_a_task_is_refused(script, words, run, tmp_path):
    (tmp_path / "empty.py").touch()
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(UserError, match=f"--task: .*{script}: {words}.*; give a script that runs"):
        evaluate.main([str(run), f"--task={tmp_path / script}"])


@pytest.mark.parametrize(
    ("tool", "name"),
    [(report, "report.html"), (evaluate, "evaluation/step-00000010/evaluation.json")],
)
def test_nothing_is_written_through_a_link_in_a_run(run, tmp_path, tool, name):
    hostile = shutil.copytree(run, tmp_path / "run", symlinks=True)
    link = hostile / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)  # another test may have left its evaluation there
    link.symlink_to(tmp_path / "ours")
    with pytest.raises(UserError, match=f"{link}: a link, or not a regular file; remove it"):
        tool.main([str(hostile)])
    # nor through one where a file is prepared before it takes its place
    link.unlink()
    link.with_name(f".partial-{link.name}").symlink_to(tmp_path / "ours")
    tool.main([str(hostile)])
    assert not (tmp_path / "ours").exists()


def test_a_place_that_cannot_be_written_is_refused_before_the_work(run, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "Predictor", None)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file/.*: cannot be written; choose another place"):
        evaluate.main([str(run), f"--output={tmp_path}/file/results"])
