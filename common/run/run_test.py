"""The end of a run."""

import shlex
from pathlib import Path

from common.run.run import Run, write_start
from common.testing.ranks import launched

FIGURES = '{"kind": "eval", "step": 1, "loss": 1.0, "top1": 0.5, "top5": 1.0, "samples": 2}'


def test_the_best_evaluation_is_named_where_it_is_not_the_last(tmp_path, capsys):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "best").symlink_to("step-00000001")
    origin, last = (FIGURES.replace('"step": 1', f'"step": {n}').replace("0.5", f"{0.75 - 0.25 * n}") for n in (0, 2))
    with launched():
        for lines in (FIGURES, f"{origin}\n{FIGURES}\n{last}\n"):  # of a branch
            (tmp_path / "metrics.jsonl").write_text(lines)
            Run(None, tmp_path, True, {}, start_from=None, measurement=None).finish()
    one, two = capsys.readouterr().out.split("top1=0.5000\n")
    assert not one.splitlines()[-1].startswith("best ")
    assert two.endswith("best         top1 0.5000 at step 1 (checkpoints/best)\ntop1=0.2500\n")


def test_a_line_that_a_full_disk_cut_is_not_continued(tmp_path):
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "metrics.jsonl").write_text(f"{FIGURES}\n{FIGURES[:9]}")
    write_start(tmp_path, {}, tmp_path / "step")
    assert (tmp_path / "metrics.jsonl").read_text() == f"{FIGURES}\n"


def test_a_run_ends_with_commands_for_the_shell(tmp_path, capsys, monkeypatch):
    output = tmp_path / "a run"
    (output / "wandb" / "offline-run-1").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with launched():
        Run(None, output, True, {}, start_from=None, measurement=None).finish()
    *_, board, sync, following, _, last = capsys.readouterr().out.splitlines()
    assert shlex.split(board)[1:] == ["tensorboard", "--logdir", "a run/tensorboard"]
    assert sync == "wandb        wandb sync 'a run/wandb'/offline-run-*"
    _, python, script, folder = shlex.split(following)
    assert (python, Path(script).is_file(), folder) == ("python", True, "a run")
    assert last == "top1=?"
