"""The end of a run."""

from common.config.load import load_config
from common.config.plan import build_plan
from common.files import ROOT
from common.run.run import Run, describe_best, write_start
from common.testing.ranks import launched

FIGURES = '{"kind": "eval", "step": 1, "loss": 1.0, "top1": 0.5, "top5": 1.0, "samples": 2}'
PRINTED = f"""\
curves       a run/loss.jpeg
             a run/acc.jpeg
checkpoint   a run/checkpoints/step-00000001
tensorboard  tensorboard --logdir 'a run/tensorboard'
wandb        wandb sync 'a run/wandb'/offline-run-*
next         python {ROOT}/scripts/report.py 'a run'
             # or evaluate.py, predict.py, export.py
"""


def test_a_run_ends_with_commands_for_the_shell_and_its_best_evaluation(
    tmp_path, capsys, monkeypatch
):
    output = tmp_path / "a run"
    (output / "wandb" / "offline-run-1").mkdir(parents=True)
    (output / "checkpoints" / "step-00000001").mkdir(parents=True)
    (output / "checkpoints" / "step-00000001" / "COMPLETE").touch()
    (output / "checkpoints" / "best").symlink_to("step-00000001")
    monkeypatch.chdir(tmp_path)
    origin, last = (
        FIGURES.replace('"step": 1', f'"step": {n}').replace("0.5", f"{0.75 - 0.25 * n}")
        for n in (0, 2)
    )
    measured = '{"kind": "train", "step": 1, "noise_scale": 1934.0}'
    lines = f"{measured}\n{origin}\n{FIGURES}\n{last}\n"  # the lines of a branch
    config = load_config("quickstart")
    plan = build_plan(config, 1, None)
    metadata = {"config": config, "plan": {"last_step": plan.last_step}}
    with launched():
        for text in ("", FIGURES, lines):
            (output / "metrics.jsonl").write_text(text)
            Run(plan, output, True, metadata, start_from=None, measurement=None).finish()
    best = "noise scale  1,900 images at step 1, batch 128\n"
    best += "best         top1 0.5000 at step 1 (checkpoints/step-00000001)\n"
    expected = [f"{PRINTED}{end}" for end in ("top1=?\n", "top1=0.5000\n", f"{best}top1=0.2500\n")]
    assert capsys.readouterr().out == "".join(expected)


def test_the_best_by_a_hooks_score_may_lack_the_metric_of_best():
    assert describe_best({"step": 3, "auroc": None}, "auroc") == "auroc nan at step 3"


def test_a_line_that_a_full_disk_cut_is_not_continued(tmp_path):
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "metrics.jsonl").write_text(f"{FIGURES}\n{FIGURES[:9]}")
    write_start(tmp_path, {}, tmp_path / "step")
    assert (tmp_path / "metrics.jsonl").read_text() == f"{FIGURES}\n"
