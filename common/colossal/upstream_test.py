"""Importing Colossal-AI: quickly, quietly, and leaving nothing behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common.colossal import upstream
from common.colossal.upstream import check_version, quiet_import
from common.errors import UserError

IMPORT = """
import json, os, sys, warnings
import torch
os.environ.update({"TORCH_CPP_LOG_LEVEL": "", "OMP_WAIT_POLICY": ""})
before = (list(warnings.filters), torch.compile, dict(os.environ), len(sys.meta_path))
import common.colossal
after = (list(warnings.filters), torch.compile, dict(os.environ), len(sys.meta_path))
from colossalai.amp import AMP_TYPE as old_path
from colossalai.legacy.amp import AMP_TYPE
heavy = "transformers", "peft", "galore_torch", "bitsandbytes", "torch._inductor.compile_fx"
print(json.dumps({"unchanged": before == after, "heavy": [name for name in heavy if name in sys.modules],
                  "amp": old_path is AMP_TYPE, "cuda": torch.cuda.is_initialized()}))
warnings.warn("seen")
"""


def test_import_is_quiet_and_leaves_nothing_behind() -> None:
    environ = {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_MAX_CONNECTIONS"}
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True, env=environ)
    assert json.loads(done.stdout) == {"unchanged": True, "heavy": [], "amp": True, "cuda": False}
    assert "UserWarning: seen" in done.stderr
    assert "colossalai" not in done.stderr
    assert len(done.stderr.splitlines()) <= 2


def test_meta_kernels_are_pytorchs() -> None:
    """Upstream's for a convolution's backward pass fails without a bias, which torch.compile needs."""
    shapes = (1, 2, 2, 2), (1, 3, 4, 4), (2, 3, 2, 2)
    tensors = [torch.empty(shape, device="meta") for shape in shapes]
    options = [2, 2], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False]
    gradients = torch.ops.aten.convolution_backward(*tensors, None, *options)
    assert [gradient.shape for gradient in gradients[:2]] == [tensor.shape for tensor in tensors[1:]]


def test_an_installed_package_is_not_stood_in_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "peft.py").write_text("real = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    with quiet_import():
        import peft
    assert peft.real
    assert "bitsandbytes" not in sys.modules
    del sys.modules["peft"]


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "version", lambda name: "0.4.9")
    with pytest.raises(UserError, match=r"colossalai is 0\.4\.9, this project needs 0\.5\.0: pip install"):
        check_version()
