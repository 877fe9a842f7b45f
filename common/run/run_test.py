"""The end of a run."""

import shlex
from pathlib import Path

from common.run.run import Run, write_start
from common.testing.ranks import launched

FIGURES = '{"kind": "eval", "step": 1, "loss": 1.0, "top1": 0.5, "top5": 1.0, "samples": 2}'


def test_a_run_ends_with_commands_for_the_shell_and_its_best_evaluation_where_another_is_last(
    tmp_path, capsys, monkeypatch
):
    output = tmp_path / "a run"
    (output / "wandb" / "offline-run-1").mkdir(parents=True)
    (output / "checkpoints").mkdir()
    (output / "checkpoints" / "best").symlink_to("step-00000001")
    monkeypatch.chdir(tmp_path)
    origin, last = (FIGURES.replace('"step": 1', f'"step": {n}').replace("0.5", f"{0.75 - 0.25 * n}") for n in (0, 2))
    with launched():
        for lines in ("", FIGURES, f"{origin}\n{FIGURES}\n{last}\n"):  # the last is of a branch
            (output / "metrics.jsonl").write_text(lines)
            Run(None, output, True, {}, start_from=None, measurement=None).finish()
    unknown, one, two = (text.splitlines() for text in capsys.readouterr().out.split("curves ")[1:])
    *_, board, sync, following, _, end = unknown
    assert shlex.split(board)[1:] == ["tensorboard", "--logdir", "a run/tensorboard"]
    assert sync == "wandb        wandb sync 'a run/wandb'/offline-run-*"
    _, python, script, folder = shlex.split(following)
    assert (python, Path(script).is_file(), folder) == ("python", True, "a run")
    assert (end, one) == ("top1=?", [*unknown[:-1], "top1=0.5000"])
    assert two == [*unknown[:-1], "best         top1 0.5000 at step 1 (checkpoints/best)", "top1=0.2500"]


def test_a_line_that_a_full_disk_cut_is_not_continued(tmp_path):
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "metrics.jsonl").write_text(f"{FIGURES}\n{FIGURES[:9]}")
    write_start(tmp_path, {}, tmp_path / "step")
    assert (tmp_path / "metrics.jsonl").read_text() == f"{FIGURES}\n"
