"""What scripts written for Colossal-AI use beyond what our own train scripts do."""

from pathlib import Path
from typing import Any

import pytest
import torch
from colossalai.utils import MultiTimer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from common.colossal import AMP_TYPE, Trainer, get_default_parser, gpc, initialize, launch_from_slurm, shutdown
from common.errors import UserError
from common.testing.ranks import free_port, launched

HALVES: dict[str, dict[str, Any]] = {
    "NAIVE": dict(mode=AMP_TYPE.NAIVE, dtype="bfloat16"),
    "O2": dict(mode=AMP_TYPE.APEX, opt_level="O2", dtype="bfloat16"),
    "O3": dict(mode=AMP_TYPE.APEX, opt_level="O3", dtype="bfloat16"),
}


class ConvNet(nn.Module):
    """A convolution, a batch norm with and one without parameters and statistics, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm, self.plain = nn.BatchNorm2d(8), nn.BatchNorm2d(8, affine=False, track_running_stats=False)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.plain(self.norm(self.conv(x)))).mean((2, 3)))


def build() -> tuple[nn.Module, SGD, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = ConvNet()
    batches = [(torch.randn(16, 3, 8, 8), torch.randint(0, 4, (16,))) for _ in range(4)]
    return model, SGD(model.parameters(), lr=0.1), batches


def train(fp16: dict[str, Any] | None, *, named: bool) -> tuple[list[float], Tensor, Tensor]:
    """Return the losses, the running mean and the evaluated logits of four steps."""
    with launched(fp16=fp16):
        model, optimizer, batches = build()
        engine, *_ = initialize(model, optimizer, nn.CrossEntropyLoss())
        engine.train()
        losses = []
        for images, labels in batches:
            engine.zero_grad()
            logits = engine(x=images) if named else engine(images)
            loss = engine.criterion(logits, labels)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.eval()
        with torch.no_grad():
            return losses, model.norm.running_mean.float(), engine(x=batches[0][0])


@pytest.mark.parametrize("mode", HALVES)
def test_named_inputs_and_batch_norm_in_half_precision_stay_near_float32(mode: str) -> None:
    losses, mean, logits = train(HALVES[mode], named=True)
    expected_losses, expected_mean, expected_logits = train(None, named=True)
    assert losses == pytest.approx(expected_losses, abs=0.05)
    torch.testing.assert_close(mean, expected_mean, atol=0.02, rtol=0.05)
    torch.testing.assert_close(logits, expected_logits, atol=0.1, rtol=0.1)
    assert losses == train(HALVES[mode], named=False)[0]


def test_the_trainer_takes_a_timer_and_a_logger() -> None:
    timer = MultiTimer()
    with launched():
        model, optimizer, batches = build()
        engine, loader, *_ = initialize(model, optimizer, nn.CrossEntropyLoss(), batches)
        Trainer(engine, logger=object(), timer=timer).fit(loader, epochs=1)
    assert [len(timer.get_timer(name)._history) for name in ("Train-epoch", "Train-step")] == [1, 4]


def test_launch_from_slurm_reads_a_config_file_and_takes_gloo_on_a_cpu(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "config.py").write_text(
        "from colossalai.amp import AMP_TYPE\nfp16 = dict(mode=AMP_TYPE.NAIVE)\n_x = 1\n"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NPROCS", "1")
    words = ["--config", str(tmp_path / "config.py"), "--host", "127.0.0.1", "--port", str(free_port())]
    args = get_default_parser().parse_args(words)
    try:
        launch_from_slurm(config=args.config, host=args.host, port=args.port, backend=args.backend)
        assert torch.distributed.get_backend() == "gloo"
        assert gpc.config.fp16.mode is AMP_TYPE.NAIVE
        assert "_x" not in gpc.config
    finally:
        shutdown()


def test_launch_from_slurm_asks_for_the_host() -> None:
    with pytest.raises(UserError, match="--host and --port are required"):
        launch_from_slurm({}, None, None)
