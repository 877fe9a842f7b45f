"""What scripts written for Colossal-AI use beyond what our own train scripts do."""

import functools
import io
import os
import re
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import Tensor

from common.testing.ranks import run_ranks, slow

PORTED = Path(__file__).parents[1] / "testing" / "ported" / "train.py"
BENCHMARK = """
BATCH_SIZE, NUM_EPOCHS = 8, 2
TENSOR_PARALLEL_SIZE, TENSOR_PARALLEL_MODE = 1, None
parallel = dict(pipeline=dict(size=1),
                tensor=dict(size=TENSOR_PARALLEL_SIZE, mode=TENSOR_PARALLEL_MODE))
fp16 = dict(mode=AMP_TYPE.TORCH)
"""
AMP = """
from colossalai.amp import AMP_TYPE
BATCH_SIZE, NUM_EPOCHS = 4, 2
fp16 = dict(mode=AMP_TYPE.NAIVE)
gradient_accumulation, clip_grad_norm = 2, 1.0
dali = dict(gpu_aug=True, mixup_alpha=0.2)
"""


def run_script(path: Path, config: Path, *flags: str) -> None:
    sys.argv = [str(path), "--config", str(config), *flags]
    runpy.run_path(str(path), run_name="__main__")


@pytest.mark.parametrize(("ranks", "by_epoch"), [(1, False), (2, True)])
def test_the_benchmarks_script_trains_and_logs_with_every_hook(ranks, by_epoch, tmp_path, capfd):
    (tmp_path / "config.py").write_text(
        f"{BENCHMARK}BY_EPOCH, LOG_PATH = {by_epoch}, '{tmp_path}'\n"
    )
    flags = ("--use_trainer", "--from_torch", "--local-rank=0")
    run_ranks(ranks, run_script, PORTED, tmp_path / "config.py", *flags)
    printed = capfd.readouterr()
    words = " ".join(printed.out.split())
    for line in (
        # the full rate, after an epoch of warm-up
        r"1 / Train\]: Loss = \S+ \| LR = 0.002 \| Throughput = \d",
        r"2 / Train\]: Loss = \S+ \| LR = 0 \| Throughput = \d",
        r"2 / Test\]: Accuracy = \S+ \| Loss = \d\S+ \| Throughput = \d",
        r"2 / Train\]: Train-epoch: .* \| Train-step: last = \S+ s, mean = \S+ s \| #steps/epoch "
        r"= 3",
        r"2 / Test\]: Test-epoch: last = \S+ s, mean = \S+ s \| Test-step: last = \S+ s, mean = "
        r"\S+ s",
        r"2 / Test\]: peak memory (\d,)?\d{3} MB",
        r"2 / Test\]: Loss = \d\S+",  # by Trainer.evaluate
    ):
        assert re.search(rf"\[Epoch {line}", words), words
    assert words.count("[Epoch 1 / Train]: Loss") == 1  # only rank 0 prints it
    assert "[Epoch 1 / Test]: 100%" in printed.err
    assert "loss=" in printed.err
    saved = torch.load(tmp_path / "weights.pt")
    assert (saved["epoch"], list(saved["model"])) == (2, ["1.weight", "1.bias"])
    assert list((tmp_path / "tensorboard").rglob("events*"))


def test_the_amp_scripts_schedule_steps_once_per_optimizer_step(tmp_path, capfd):
    (tmp_path / "config.py").write_text(AMP)
    run_ranks(2, run_script, PORTED, tmp_path / "config.py")
    words = " ".join(capfd.readouterr().out.split())
    for line in (
        r"1 / Train\]: Loss = \S+ \| LR = 0.0108\b",
        r"2 / Train\]: Loss = \S+ \| LR = 0\b",
    ):  # 3/5 of 0.018
        assert re.search(rf"\[Epoch {line}", words), words


HEAD = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from colossalai.legacy.nn import CrossEntropyLoss
from common import colossal as colossalai
from common.colossal import AMP_TYPE, Accuracy, ParallelMode, Trainer, get_dataloader, gpc, hooks
from common.config.load import load_config
from common.testing.parity_cases import build_tiny_model
colossalai.launch_from_torch(config=CONFIG, verbose=False)
torch.manual_seed(0)
x, y = torch.randn(17, 3, 4, 4), torch.arange(17) % 4
model = nn.Sequential(nn.Flatten(), nn.Linear(48, 4))
def start(model=model):
    loaders = (get_dataloader(dataset=TensorDataset(x, y), batch_size=4) for _ in range(2))
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=1.0), nn.CrossEntropyLoss()
    return colossalai.initialize(model, optimizer, loss, *loaders, verbose=False)
"""
STEP = """
before = model[1].weight.detach().clone(), model[1].bias.detach().clone()
engine, *_ = start()
engine.optimizer.zero_grad()
engine.optimizer.backward(engine.criterion(engine(x), y))
engine.optimizer.step()
moved = [after - old for after, old in zip(model[1].parameters(), before)]
print(f"moved by {torch.cat([m.flatten() for m in moved]).norm():.4f}")
"""
TWO = """
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = model
    def forward(self, x):
        logits = self.model(x)
        return logits, {"class": logits.argmax(1)}
logits, other = start(Two())[0](x)
print(logits.dtype, other["class"].dtype)
"""
EVALUATE = """
engine, train, test, _ = start()
trainer = Trainer(engine)
metrics = [hooks.AccuracyHook(Accuracy()), hooks.LossHook()]
trainer.fit(train, 1, test_dataloader=test, hooks=metrics)
of_test = trainer.states["metrics"]["test"]
# a second hook reads the same value
assert of_test["Loss"].get_accumulated_value() == of_test["Loss"].get_accumulated_value() > 0
found = of_test["Accuracy"].get_accumulated_value()
with torch.no_grad():
    print("differs by", round(found - (model(x).argmax(1) == y).double().mean().item(), 6))
"""
SHOW_CONFIG = """
expected = EXPECTED
print("as expected", all(gpc.config[key] == value for key, value in expected.items()),
      gpc.tensor_parallel_size, gpc.config.parallel.tensor.size, torch.distributed.get_backend())
# upstream's 2d takes logits for shards
logits, labels = torch.eye(4), torch.tensor([0, 1, 2, 0])
assert Accuracy()(logits, labels) == 3
assert CrossEntropyLoss()(logits, labels) == nn.functional.cross_entropy(logits, labels)
total = nn.functional.cross_entropy(logits, labels, reduction="sum")
assert CrossEntropyLoss("sum")(logits, labels) == total
"""
# Colossal-AI's printed configs use AMP_TYPE without an import.
OWN_FILE = """
MY_KEY = 7
TENSOR_PARALLEL_SIZE, TENSOR_PARALLEL_MODE = 1, None
fp16 = dict(mode=AMP_TYPE.TORCH)
"""
RECIPE = "load_config('vit_s16_2d') | {'MY_KEY': 7}"
OWN_KEYS = "dict(TENSOR_PARALLEL_SIZE=2, TENSOR_PARALLEL_MODE='1d', BATCH_SIZE=7)"
SAVE = """
model = build_tiny_model()
full = {name: tensor.clone() for name, tensor in model.state_dict().items()}
model = colossalai.shard_model(model)
hooks.save_checkpoint("weights.pt", 1, model)
torch.distributed.barrier()
saved = torch.load("weights.pt")["model"]
print("saved", saved.keys() == full.keys() and all(torch.equal(saved[n], full[n]) for n in full))
"""
LAMB = """
model = colossalai.shard_model(build_tiny_model())
colossalai.initialize(model, colossalai.Lamb(model.parameters()))
"""
PADDED = "cnn.VocabParallelEmbedding1D(8, 16, padding_idx=1)"
SHARED = "cnn.Classifier1D(16, 8, weight=cnn.VocabParallelEmbedding1D(8, 16).weight)"
LARS = f"from colossalai.nn.optimizer import Lars{LAMB.replace('colossalai.Lamb', 'Lars')}"
ADAFACTOR = LAMB.replace("colossalai.Lamb", "torch.optim.Adafactor")
CAME = LARS.replace("Lars", "CAME").replace("parameters()", "parameters(), lr=1.0")
SRUN = """
import os
colossalai.shutdown()
os.environ |= dict(SLURM_PROCID="1", SLURM_NPROCS="2")
colossalai.launch_from_slurm({}, "node", None)
"""
MPIRUN = """
import os
colossalai.shutdown()
for name, value in dict(RANK="1", SIZE="2", LOCAL_RANK="1").items():
    os.environ[f"OMPI_COMM_WORLD_{name}"] = value
colossalai.launch_from_openmpi({}, "node", None)
"""
NO_PORT = "--host=node --port=None: set them to the first node, and a free port on it"
LAYERS = """
from colossalai.legacy import nn as cnn
from common.optim.build import build_optimizer
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = cnn.LayerNorm(16)
        self.mlp = nn.Sequential(cnn.Linear(16, 32), nn.GELU(), cnn.Linear(32, 16))
    def forward(self, x):
        return x + self.mlp(self.norm(x))
class First(nn.Module):
    def forward(self, logits):
        return logits[:, 0]
body = [cnn.PatchEmbedding(4, 2, 3, 16), Block(), Block()]
model = nn.Sequential(*body, cnn.Classifier(16, 4), First())
def load(model):
    # the same full weights in every mode
    torch.manual_seed(0)
    shapes = {name: getattr(p, "sharding", p).shape for name, p in model.named_parameters()}
    model.load_state_dict({name: 0.3 * torch.randn(shape) for name, shape in shapes.items()})
"""
CURVE = """
load(model)
optimizer = OPTIMIZER
engine, *_ = colossalai.initialize(model, optimizer, CrossEntropyLoss(label_smoothing=0.1))
engine.train()
rank, ranks = gpc.get_local_rank(ParallelMode.DATA), gpc.get_world_size(ParallelMode.DATA)
for step in range(4):
    images, labels = x[step:step + 8][rank::ranks], y[step:step + 8][rank::ranks]
    engine.zero_grad()
    logits = engine(images)
    loss = engine.criterion(logits, labels)
    engine.backward(loss)
    engine.step()
    # tensor-parallel ranks have the same, data-parallel ranks their samples'
    figures = torch.stack([loss.detach(), Accuracy()(logits, labels) / len(labels)])
    torch.distributed.all_reduce(figures)
    figures /= torch.distributed.get_world_size()
    print("figures", *figures.tolist(), engine.optimizer.grad_norm.item())
trainer = Trainer(engine)
metrics = [hooks.LossHook(), hooks.AccuracyHook(Accuracy())]
trainer.evaluate(get_dataloader(dataset=TensorDataset(x[:16], y[:16]), batch_size=4), metrics)
of_test = trainer.states["metrics"]["test"]
print("figures", *(of_test[name].get_accumulated_value() for name in ("Loss", "Accuracy")), 0)
hooks.save_checkpoint("weights.pt", 1, model)
"""
# The arguments of upstream's functions, by position and with their defaults.
UPSTREAM = """
from colossalai.legacy.zero.gemini import BaseOpHook
class Said(BaseOpHook):
    def pre_fwd_exec(self, module, *args): print("forward of", type(module).__name__, end=", ")
    def post_fwd_exec(self, module, *args): print("after it", end=", ")
    def pre_bwd_exec(self, module, input, output): print("backward", end=", ")
    def post_bwd_exec(self, module, input): pass
    def post_iter(self): print("end of the micro-batch")
colossalai.shutdown()
colossalai.launch(CONFIG, 0, 1, "localhost", 29500, "gloo", None, 7, False)
assert torch.initial_seed() == 7
loader = get_dataloader(TensorDataset(x, y), True, 1024, True, False, False, 0, batch_size=17)
sgd = lambda parameters: torch.optim.SGD(parameters, lr=1.0)
loss = nn.CrossEntropyLoss()
arguments = lambda: model, sgd, loss, loader, None, None
engine, train, *_ = colossalai.initialize(*arguments, None, False)
Trainer(engine, None, None).fit(train, 1, None, None, 1, None, False, True)
engine, train, *_ = colossalai.initialize(*arguments, [Said()], False)
Trainer(engine).fit(train, 1)
Trainer(engine).evaluate(train, None, False, True)
"""
OPHOOKS = "forward of Linear, after it, backward, end of the micro-batch forward of Linear"
ENGINE = "colossalai.Engine(model, torch.optim.SGD(model.parameters(), lr=1.0))"
TENSOR = "dict(parallel=dict(data=1, pipeline=1, tensor=dict(size=2, mode='1d')))"
SQUARE = "dict(parallel=dict(pipeline=dict(size=1), tensor=dict(size=4, mode='2d')))"
# ranks, config, script, what it prints or the error that ends it
SCRIPTS = [
    (1, "dict(clip_grad_norm=0.125)", STEP, "moved by 0.1250"),
    (1, "{}", "start()[0].step()", r"call engine.backward\(loss\) before, not loss.backward"),
    (1, "dict(fp16=dict(mode=AMP_TYPE.TORCH, dtype='bfloat16'))", TWO, "torch.float32 torch.int64"),
    (1, "{}", UPSTREAM, OPHOOKS),
    (1, "{}", ENGINE, r"Engine\(...\): initialize\(...\) builds it"),
    (2, TENSOR, "", "config: without effect here: parallel.data"),
    (2, TENSOR, "start()", r"parallel.tensor.size=2: the model is not sharded: call shard_model"),
    (2, "dict(zero=dict(stage=1))", "start()", r"zero={'stage': 1}: the model is not sharded"),
    (2, TENSOR, f"{LAYERS}colossalai.shard_model(model)", "leave shard_model and zero out"),
    (4, SQUARE, f"{LAYERS}start(nn.Sequential(model, nn.Linear(4, 4)))", "1.weight belongs to no"),
    (2, TENSOR, f"{LAYERS}cnn.Embedding(8, 16, max_norm=1.0)", "not support max_norm: leave it"),
    (
        2,
        TENSOR,
        LAYERS + LAMB.replace("colossalai.shard_model(build_tiny_model())", "model"),
        "norm",
    ),
    (1, "dict(gradient_acumulation=2)", "", "config: unknown key gradient_acumulation; did you"),
    (1, "dict(gradient_accumulation=9)", EVALUATE, "fewer batches than gradient_accumulation"),
    (2, "{}", EVALUATE, r"differs by -?0\.0( |$)"),
    (4, "{}", EVALUATE, r"differs by -?0\.0( |$)"),
    (4, RECIPE, SHOW_CONFIG.replace("EXPECTED", RECIPE), "as expected True 4 4 gloo"),
    (
        1,
        "'own_config.py'",
        SHOW_CONFIG.replace("EXPECTED", "dict(MY_KEY=7, fp16=dict(mode=AMP_TYPE.TORCH))"),
        "as expected True 1 1 gloo",
    ),
    (2, OWN_KEYS, SHOW_CONFIG.replace("EXPECTED", "dict(BATCH_SIZE=7)"), "True 2 2 gloo"),
    (2, TENSOR, SAVE, "saved True"),
    (2, TENSOR, LAMB, "Lamb would take norms of shards"),
    (2, TENSOR, LARS, "Lars would take norms of shards"),
    (2, TENSOR, ADAFACTOR, "Adafactor would take norms of shards"),
    (2, TENSOR, CAME, "CAME would take norms of shards"),
    (1, "{}", SRUN, NO_PORT),
    (1, "{}", MPIRUN, NO_PORT),
]


@pytest.mark.parametrize(("ranks", "config", "script", "expected"), SCRIPTS)
def test_a_script_of_ones_own(ranks, config, script, expected, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own_config.py").write_text(OWN_FILE)
    Path("own.py").write_text((HEAD + script).replace("CONFIG", config))
    try:
        run_ranks(ranks, run_script, tmp_path / "own.py", tmp_path)
        said = capfd.readouterr().out
    except RuntimeError as error:
        said = str(error)
    assert re.search(expected, " ".join(said.split())), said


@functools.cache
def curve(
    ranks: int, parallel: str, optimizer: str, head: str = "", fp16: str = "None"
) -> tuple[list[float], list[Tensor]]:
    """Return what a script prints that trains Colossal-AI's layers, and the weights it saves."""
    parallel = f"dict(pipeline=dict(size=1), tensor={parallel})"
    config = f"dict(parallel={parallel}, clip_grad_norm=0.5, fp16={fp16})"
    script = HEAD.replace("CONFIG", config) + LAYERS + CURVE.replace("OPTIMIZER", optimizer)
    with TemporaryDirectory() as folder:
        Path(folder, "own.py").write_text(
            script.replace("Classifier(16, 4", f"Classifier(16, 4{head}")
        )
        printed = run_ranks(ranks, run_in, folder)
        saved = torch.load(Path(folder, "weights.pt"))["model"]
    figures = re.findall(r"figures (\S+) (\S+) (\S+)", printed[0])
    return [float(figure) for line in figures for figure in line], list(saved.values())


def run_in(folder: str) -> str:
    """Run the script of ``folder`` there; return what it prints."""
    os.chdir(folder)
    with redirect_stdout(io.StringIO()) as printed:
        run_script(Path("own.py"), Path())
    torch.distributed.barrier()
    return printed.getvalue()


SGD = "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)"
OWN_LAMB = "build_optimizer(model, 'lamb', 0.01)"
ALONE = (1, "dict(size=1, mode=None)")
LAYOUTS = {
    "1d": (2, "dict(size=2, mode='1d')"),
    "dp2 x 1d": (4, "dict(size=2, mode='1d')"),
    "2d": (4, "dict(size=4, mode='2d')"),
    "2.5d": (4, "dict(size=4, mode='2.5d', depth=1)"),
    "2.5d of depth 2": (8, "dict(size=8, mode='2.5d', depth=2)"),
    "3d": (8, "dict(size=8, mode='3d')"),
}
SPLIT_CLASSES = ", vocab_parallel_limit=1"
# layout, optimizer, arguments of the classifier
QUICK = [
    ("1d", SGD, ""),
    ("1d", SGD, SPLIT_CLASSES),
    ("dp2 x 1d", OWN_LAMB, ""),
    ("2d", SGD, ""),
    ("2d", OWN_LAMB, ""),
    ("2d", SGD, SPLIT_CLASSES),
]
CURVES = [
    (layout, *variant)
    for layout in LAYOUTS
    for variant in ((SGD, ""), (OWN_LAMB, ""), (SGD, SPLIT_CLASSES))
]


@pytest.mark.parametrize(
    ("layout", "optimizer", "head"),
    [*QUICK, *(slow(*row) for row in CURVES if row not in QUICK)],
)
def test_colossal_ais_layers_train_as_in_one_process(layout, optimizer, head):
    figures, weights = curve(*LAYOUTS[layout], optimizer, head)
    expected_figures, expected_weights = curve(*ALONE, optimizer)
    # loss, accuracy and gradient norm of four steps; loss and accuracy of an evaluation, and 0
    assert len(figures) == 15
    torch.testing.assert_close(figures, expected_figures, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["TORCH", "NAIVE"])
@pytest.mark.parametrize("layout", ["2d", *(slow(name) for name in LAYOUTS if name != "2d")])
def test_colossal_ais_layers_train_in_half_precision(layout, mode):
    fp16 = f"dict(mode=AMP_TYPE.{mode}, dtype='bfloat16')"
    figures, _ = curve(*LAYOUTS[layout], SGD, fp16=fp16)
    expected, _ = curve(*ALONE, SGD)
    # losses; bfloat16 has three digits
    torch.testing.assert_close(figures[::3], expected[::3], rtol=0.02, atol=0)
    assert figures[::3] != expected[::3]
