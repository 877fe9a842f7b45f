"""The end of a run."""

from pathlib import Path

import pytest
import torch

from common.colossal import launch
from common.run import Run


@pytest.mark.parametrize(
    ("lines", "words"), [(None, "top1=?"), ("", "top1=?"), ('{"kind": "eval", "top1": 0.5}', "0.5")]
)
def test_a_run_ends_well_without_its_figures(tmp_path: Path, lines: str | None, words: str, capsys) -> None:
    if lines is not None:
        (tmp_path / "metrics.jsonl").write_text(lines)
    launch({}, 0, 1, "", 0, backend="gloo", verbose=False)
    Run(None, tmp_path, True, torch.device("cpu"), {}, None).finish()
    assert words in capsys.readouterr().out.splitlines()[-1]
