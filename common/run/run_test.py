"""The end of a run."""

from pathlib import Path

import pytest
import torch

from common.run.run import Run
from common.testing.ranks import launched

FIGURES = '{"kind": "eval", "step": 1, "loss": 1.0, "top1": 0.5, "top5": 1.0, "samples": 2}'


@pytest.mark.parametrize(("lines", "words"), [(None, "top1=?"), ("", "top1=?"), (FIGURES, "top1=0.5000")])
def test_a_run_ends_well_without_its_figures(tmp_path: Path, lines: str | None, words: str, capsys) -> None:
    if lines is not None:
        (tmp_path / "metrics.jsonl").write_text(lines)
    with launched():
        run = Run(None, tmp_path, True, torch.device("cpu"), {}, start_from=None, measurement=None)
        run.finish()
    assert words in capsys.readouterr().out.splitlines()[-1]
