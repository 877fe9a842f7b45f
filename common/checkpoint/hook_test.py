"""Training resumes bit for bit where it stopped, in every mode; when checkpoints are saved, and which stay."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from common.checkpoint.hook import CheckpointHook, parse_minutes
from common.checkpoint.resume import choose_checkpoint
from common.checkpoint.save import list_checkpoints, load_trainer_state, newest_checkpoint, write_checkpoint
from common.colossal import AMP_TYPE, BaseHook, Trainer, initialize, resolve_parallel, shard_model
from common.config.batch_plan import DataSummary, build_plan
from common.config.load import load_config
from common.data.loader import Loader
from common.data.sampling import Draw, EvalSampler, TrainSampler
from common.errors import UserError
from common.launch.stop_signals import stop_signals
from common.metrics.hook import MetricsHook
from common.metrics.writers import read_metrics
from common.model.ema import EmaHook
from common.model.freeze import freeze
from common.optim.build import build_optimizer
from common.optim.lr_schedule import build_lr_scheduler
from common.testing.checkpoints import build_about, read_result
from common.testing.parity_cases import CASES, CONFIGS, MODEL, OPTIMIZERS, build_tiny_model
from common.testing.ranks import launched, run_ranks

TRAIN, EVAL, BATCH = 70, 21, 16
STEPS = 8  # two epochs
AMP = {
    "fp32": None,
    "TORCH": dict(mode=AMP_TYPE.TORCH, dtype="bfloat16"),
    "TORCH float16": dict(mode=AMP_TYPE.TORCH, dtype="float16", init_scale=2.0**18, growth_interval=3),
    "NAIVE": dict(mode=AMP_TYPE.NAIVE, dtype="bfloat16"),
    "O1": dict(mode=AMP_TYPE.APEX, opt_level="O1", dtype="bfloat16"),
    "O2": dict(mode=AMP_TYPE.APEX, opt_level="O2", dtype="bfloat16"),
    "O3": dict(mode=AMP_TYPE.APEX, opt_level="O3", dtype="bfloat16"),
}


@pytest.fixture(autouse=True)
def without_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than training here."""
    monkeypatch.setattr("common.metrics.writers.draw_curves", lambda *_: None)


class NoiseReader:
    """Images that are a function of their index and their uniforms."""

    def read(self, draws: Iterator[Draw]) -> Iterator[tuple[Tensor, Tensor]]:
        for draw in draws:
            generator = torch.Generator()
            seeds = [int(i) + 1 for i in draw.indices]
            images = torch.stack([torch.randn(3, 16, 16, generator=generator.manual_seed(seed)) for seed in seeds])
            images += torch.from_numpy(draw.uniforms).float().mean(1)[:, None, None, None] if draw.uniforms.size else 0
            labels = torch.from_numpy(draw.indices) % MODEL["num_classes"]
            yield images, labels.masked_fill(torch.from_numpy(draw.indices) < 0, -100)

    def close(self) -> None:
        pass


class StopAfter(BaseHook):
    """Receive a signal during step ``step``, or in the evaluation after it."""

    def __init__(self, step: int, evaluating: bool) -> None:
        super().__init__(priority=5)
        self.step, self.evaluating = step, evaluating

    def after_train_iter(self, trainer: Trainer, *_: Any) -> None:
        if trainer.step == self.step and not self.evaluating:
            stop_signals.received = 15

    def after_test_iter(self, trainer: Trainer, *_: Any) -> None:
        if trainer.step == self.step:
            stop_signals.received = 15


def train(
    output: Path, gpus: int, settings: dict[str, Any], stop: tuple[int, bool] | None = None, every: int | str = 3
) -> list[dict]:
    """Train into ``output``, resuming the run in it; return the records so far."""
    output.mkdir(exist_ok=True, parents=True)
    stop_signals.received = stop_signals.agreed = 0
    config = load_config("quickstart", ["NUM_EPOCHS=2", "WARMUP_EPOCHS=1", f"TOTAL_BATCH_SIZE={BATCH}", "EVAL_EVERY=1"])
    config["MODEL"] |= MODEL
    config |= settings | {"LOG": {"every": 3, "tensorboard": False}}
    config["parallel"] = resolve_parallel(config["parallel"], gpus)
    plan = build_plan(config, gpus, DataSummary(TRAIN, EVAL, MODEL["num_classes"], fingerprint=""))
    with launched(**config):
        torch.manual_seed(0)
        model = build_tiny_model(dropout=0.1)
        freeze(model, config["FREEZE"])
        model = shard_model(model)
        optimizer = build_optimizer(model, "adamw", **OPTIMIZERS["adamw"])
        schedule = build_lr_scheduler(optimizer, "linear", plan.total_steps, plan.warmup_steps)
        rank = torch.distributed.get_rank()
        place = dict(dp_rank=rank // plan.tensor_parallel, dp_size=plan.data_parallel)
        samplers = TrainSampler(TRAIN, BATCH, plan.micro_batch, uniforms=4, **place), EvalSampler(EVAL, 8, **place)
        loaders = [Loader(sampler, NoiseReader()) for sampler in samplers]
        engine, train_loader, eval_loader, _ = initialize(model, optimizer, nn.CrossEntropyLoss(), *loaders, schedule)
        writers = dict(tensorboard=False, trackers=(), is_main=rank == 0)
        metrics = MetricsHook(plan, output, every=3, **writers, peak_samples_per_s=1.0)
        about = build_about() | {"plan": asdict(plan), "config": config}
        ema = [EmaHook(model, config["EMA"])] if config["EMA"] else []
        saved = dict(about=about, averages=ema[0].averages if ema else None)
        options = dict(every=every, keep=20, start_from=choose_checkpoint("auto", output))
        saver = CheckpointHook(output / "checkpoints", model, optimizer, metrics, **saved, **options)
        hooks = [metrics, *ema, saver] + ([StopAfter(*stop)] if stop else [])
        Trainer(engine).fit(train_loader, plan.epochs, plan.last_step, eval_loader, 1, hooks)
    assert stop_signals.deferring == bool(stop_signals.agreed)  # until the process ends
    return read_metrics(output) if rank == 0 else []


EVERYWHERE = [(1, False), (3, False), (4, False), (6, False), (8, False), (4, True), (8, True)]
ONE_EPOCH = {"NUM_EPOCHS": 1, "WARMUP_EPOCHS": 0}


@pytest.mark.parametrize(
    ("mode", "amp", "stops"),
    [
        ("none", "fp32", EVERYWHERE),
        *(("none", amp, [(3, False)]) for amp in AMP if amp != "fp32"),
        ("dp2", "fp32", [(3, False), (4, True)]),
        ("dp2", "TORCH float16", [(3, False)]),
        ("1d-2", "TORCH float16 head", [(3, False)]),
        *((mode, "fp32", [(3, False)]) for mode in ("1d-2", "2d-4", "3d-8", "dp2 x 1d-2", "zero 1 x 1d-2")),
        pytest.param("zero 3", "TORCH float16", [(4, True)], marks=pytest.mark.slow),
        pytest.param("2.5d-8", "fp32", [(3, False)], marks=pytest.mark.slow),
    ],
)
def test_resumes_bit_for_bit(mode: str, amp: str, stops: list[tuple[int, bool]], tmp_path: Path) -> None:
    gpus, parallel = CONFIGS.get(mode, (2, {"parallel": None}))
    settings = parallel | {"fp16": AMP[amp.removesuffix(" head")], "EMA": 0.0 if amp == "TORCH" else 0.9}
    settings["FREEZE"] = "body" if amp.endswith(" head") else None
    epochs, steps = 2, STEPS
    if mode in CONFIGS and gpus > 1:
        settings |= ONE_EPOCH
        epochs, steps = 1, STEPS // 2
    run_ranks(gpus, train, tmp_path / "whole", gpus, settings)
    whole = read_result(tmp_path / "whole")
    assert ("ema.safetensors" in whole) == (amp != "TORCH")
    assert whole["trainer.json"]["trainer"] == {
        "step": steps,
        "epoch": epochs,
        "epoch_step": 0,
        "evaluated_step": steps,
    }
    for number, stop in enumerate(stops):
        pieces = tmp_path / f"pieces {number}"
        run_ranks(gpus, train, pieces, gpus, settings, stop)
        run_ranks(gpus, train, pieces, gpus, settings)
        found = read_result(pieces)
        assert [file for file in whole if found[file] != whole[file]] == []


@pytest.mark.parametrize("frozen", [None, "body"])
def test_resumes_with_the_same_batches_in_another_mode(frozen: str | None, tmp_path: Path) -> None:
    """One process, then two of data parallelism, `zero` and four of 2d; without dropout the losses stay the same."""
    settings = {"FREEZE": frozen, "fp16": None}
    run_ranks(1, train, tmp_path / "whole", 1, settings)
    run_ranks(1, train, tmp_path / "run", 1, settings, (2, False))
    run_ranks(2, train, tmp_path / "run", 2, settings, (4, False))
    run_ranks(2, train, tmp_path / "run", 2, settings | {"zero": {"stage": 3}}, (6, False))
    run_ranks(4, train, tmp_path / "run", 4, settings | {"parallel": CASES["2d-4"][1]})
    whole, pieces = (read_metrics(tmp_path / name) for name in ("whole", "run"))
    assert [(r["kind"], r["step"]) for r in pieces] == [(r["kind"], r["step"]) for r in whole]
    for one, other in zip(whole, pieces, strict=True):
        # the masks of dropout, which a frozen body has none of, differ between ranks
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5 if frozen else 0.1)


def test_averages_begin_at_the_weights_of_a_checkpoint_that_has_none(tmp_path: Path) -> None:
    train(tmp_path, 1, {"parallel": None}, (3, False))
    weights = load_file(tmp_path / "checkpoints" / "step-00000003" / "model.safetensors")
    train(tmp_path, 1, {"parallel": None, "EMA": 0.9}, (4, True), every=1)
    last = tmp_path / "checkpoints" / "step-00000004"
    trained, averages = load_file(last / "model.safetensors"), load_file(last / "ema.safetensors")
    for name, average in averages.items():
        torch.testing.assert_close(average, weights[name].lerp(trained[name], 1 - 5 / 14))


def saved_steps(run: Path) -> list[int]:
    return [load_trainer_state(path)["trainer"]["step"] for path in list_checkpoints(run / "checkpoints")]


def test_saves_when_due_and_marks_the_best(tmp_path: Path) -> None:
    records = train(tmp_path, 1, {"parallel": None, "fp16": None}, every=3)
    top1 = {r["step"]: r["top1"] for r in records if r["kind"] == "eval"}
    assert saved_steps(tmp_path) == [8, 6, 4, 3]
    best = load_trainer_state(tmp_path / "checkpoints" / "best")
    assert best["best_top1"] == max(top1.values()) == top1[best["trainer"]["step"]]


def test_of_equal_accuracies_the_lower_loss_is_the_best() -> None:
    saved = []
    hook: Any = SimpleNamespace(best=(-1.0, 0.0), _save=lambda trainer, **_: saved.append(trainer.states["eval"]))
    for top1, loss in ((0.5, 2), (0.5, 3), (0.5, 1), (0.4, 0.1), (0.6, math.nan), (0.6, 5)):
        trainer: Any = SimpleNamespace(states={"eval": {"top1": top1, "loss": loss}})
        CheckpointHook.after_test(hook, trainer)
    assert [figures["loss"] for figures in saved] == [2, 1, 5]


def test_saves_after_minutes(tmp_path: Path) -> None:
    train(tmp_path, 1, {"parallel": None}, every="0.00001 min")
    assert saved_steps(tmp_path) == [8, 7, 6, 5, 4, 3, 2, 1]


@pytest.mark.parametrize(("text", "minutes"), [("10 min", 10), ("1.5min", 1.5), ("90 minutes", 90), ("1 minute", 1)])
def test_minutes(text: str, minutes: float) -> None:
    assert parse_minutes(text) == minutes


def write_with(monkeypatch: pytest.MonkeyPatch, before: Callable[[Path], None]) -> None:
    """Call ``before`` with the checkpoint's path before each write."""

    def write(path: Path, content: dict) -> None:
        before(path)
        write_checkpoint(path, content)

    monkeypatch.setattr("common.checkpoint.hook.write_checkpoint", write)


def test_a_failed_write_is_reported_and_training_continues(tmp_path: Path, monkeypatch, capsys) -> None:
    def fail_at_step_3(path: Path) -> None:
        if path.name == "step-00000003":
            raise OSError(28, "No space left on device", str(path))

    write_with(monkeypatch, fail_at_step_3)
    train(tmp_path, 1, {"parallel": None}, every=3)
    error = capsys.readouterr().err
    assert "warning: " in error
    assert "step-00000003 could not be written (No space left on device): it takes 0." in error
    assert "MB are free; the newest checkpoint is none; training continues" in error
    assert saved_steps(tmp_path)[0] == 8


def test_if_the_last_write_fails_the_run_fails(tmp_path: Path, monkeypatch) -> None:
    def fail(path: Path) -> None:
        raise OSError(30, "Read-only file system", str(path))

    write_with(monkeypatch, fail)
    with pytest.raises(UserError, match=r"step-00000008 could not be written \(Read-only file system\)"):
        train(tmp_path, 1, {"parallel": None}, every=3)
    stop_signals.deferring = False


def last_checkpoint_of_a_stopped_run(output: Path) -> str:
    train(output, 2, {}, stop=(2, False))
    return newest_checkpoint(output / "checkpoints").name


def test_no_rank_leaves_before_the_last_checkpoint_is_written(tmp_path: Path, monkeypatch) -> None:
    write_with(monkeypatch, lambda _: time.sleep(1))
    # the signal of step 2 is known to all after step 3
    assert run_ranks(2, last_checkpoint_of_a_stopped_run, tmp_path / "run") == ["step-00000003"] * 2


def agree_with_a_late_rank() -> tuple[float, list[tuple[bool, bool]]]:
    """Return how long the first call takes where the other rank is late, and what all calls return."""
    with launched():
        hook = CheckpointHook.__new__(CheckpointHook)
        hook.exchange, hook.every_steps, hook.every_seconds, hook.saved_at = None, None, 3600.0, time.monotonic()
        trainer: Any = SimpleNamespace(loader_failure="")
        rank, answers = torch.distributed.get_rank(), []
        if rank == 1:
            time.sleep(1)
            hook.saved_at -= 3600
        moments = [time.monotonic()]
        for step in (1, 2, 3, None):
            stop_signals.received = 15 if rank == 1 and step in (1, None) else 0
            answers.append(hook._agree(trainer, step))
            moments.append(time.monotonic())
        hook._finish_exchange()
        return moments[1] - moments[0], answers


def test_ranks_do_not_wait_for_each_other_and_agree_a_call_later() -> None:
    (first, answers), (_, others) = run_ranks(2, agree_with_a_late_rank)
    assert first < 0.5
    # a save is not due twice; in the evaluation at the end nothing is a call late
    assert answers == others == [(False, False), (True, True), (False, False), (True, False)]


def test_a_checkpoint_holds_the_state_of_its_own_step(tmp_path: Path, monkeypatch) -> None:
    """The checkpoints of a slow disk, written while training continues, equal those of a fast one."""
    train(tmp_path / "fast", 1, {"parallel": None}, every=3)
    write_with(monkeypatch, lambda _: time.sleep(0.3))
    train(tmp_path / "slow", 1, {"parallel": None}, every=3)
    for step in (3, 6, 8):
        fast, slow = (tmp_path / name / "checkpoints" / f"step-{step:08d}" for name in ("fast", "slow"))
        for file in ("model.safetensors", "optimizer.safetensors", "random.safetensors", "trainer.json"):
            assert (fast / file).read_bytes() == (slow / file).read_bytes()
