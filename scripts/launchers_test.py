"""Real launchers: two processes train bit-identical weights, whatever started them.

Needs root and Debian's packages slurm-wlm, munge, openmpi-bin and iproute2. Not run by default:
``bash scripts/test.sh -m launchers scripts/launchers_test.py``.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from psutil import Process, process_iter, wait_procs

from common.checkpoint.save import newest_checkpoint
from common.files import ROOT
from common.metrics.metrics_file import read_metrics
from common.testing.commands import wait_until
from common.testing.ranks import free_port
from imagenet_dali.testing import prepare_data, run, write_config

pytestmark = [pytest.mark.launchers, pytest.mark.timeout(600)]

TASK = ROOT / "imagenet_dali"
NODE = "localhost"
STEPS = "--set MAX_STEPS=3"
SBATCH = (
    f"sbatch --ntasks 2 --cpus-per-task 1 --output job.out --parsable {ROOT}/scripts/train_slurm.sh"
)
OWN_TRAINING = """
import torch
from torch import nn
from common.engine.engine import initialize
from common.engine.trainer import Trainer
from common.engine.upstream import ParallelMode, gpc

model = nn.Linear(4, 3)
rank = gpc.get_global_rank()
batches = [(torch.randn(8, 4, generator=torch.Generator().manual_seed(rank)), torch.arange(8) % 3)]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine, loader, *_ = initialize(model, optimizer, nn.CrossEntropyLoss(), batches)
Trainer(engine).fit(loader, epochs=1)
world_size = gpc.get_world_size(ParallelMode.GLOBAL)
print("weights", model.weight.sum().item(), "of", world_size, flush=True)
colossalai.shutdown()
"""
Outcome = tuple[str, bytes]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return str(prepare_data(tmp_path_factory.mktemp("data")))


@pytest.fixture
def arguments(tmp_path) -> str:
    return f"--config={write_config(tmp_path)} --output={tmp_path}/run {STEPS}"


@contextmanager
def machine(script: str, *words: object) -> Iterator[str]:
    """Run a script of common/testing to the end of the context; yield its line when it is ready."""
    command = ["bash", ROOT / "common" / "testing" / script, *map(str, words)]
    streams = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen(command, **streams) as process:
        line = process.stdout.readline().strip()
        assert line, f"{script} has failed"
        yield line


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    """The variables that srun, sbatch and scontrol need."""
    with machine("local_slurm.sh", free_port(), free_port()) as path:
        yield {"SLURM_CONF": path}


@pytest.fixture(scope="module")
def expected(data, tmp_path_factory) -> Outcome:
    """The result of the tiny config with two processes of torchrun."""
    folder = tmp_path_factory.mktemp("expected")
    command = (
        "bash scripts/train_torchrun.sh imagenet_dali/train_dali.py "
        f"--config={write_config(folder)} {STEPS}"
    )
    return outcome(
        folder / "run", f"{command} --output={folder}/run", cwd=ROOT, DATA=data, NPROC_PER_NODE="2"
    )


def outcome(output: Path, command: str, **options: object) -> Outcome:
    """Run a command that trains into ``output``; return the last line and the weights' file."""
    stdout = run(command, **options).stdout
    lines = [line for line in stdout.splitlines() if line.startswith("top1=")]
    assert len(lines) == 1, stdout
    return lines[0], (newest_checkpoint(output / "checkpoints") / "model.safetensors").read_bytes()


# --- torchrun
# --------------------------------------------------------------------------------------------------


def test_torch_distributed_launch(data, arguments, expected, tmp_path):
    """Seed 003's command, with two processes on the CPU."""
    command = "python -m torch.distributed.launch --nproc_per_node 2 --master_addr localhost"
    command += f" --master_port {free_port()} train_dali.py --world_size 2 {arguments}"
    assert outcome(tmp_path / "run", command, DATA=data) == expected


@pytest.mark.parametrize(
    ("size", "rank"),
    [("NNODES", "NODE_RANK"), ("WORLD_SIZE", "RANK"), ("PET_NNODES", "PET_NODE_RANK")],
)
def test_torchrun_on_two_hosts(data, arguments, expected, tmp_path, size, rank):
    """As two pods of Kubeflow, too."""
    command = f"bash scripts/train_torchrun.sh imagenet_dali/train_dali.py {arguments}"
    environ = {size: "2", "MASTER_ADDR": "node0", "DATA": data}
    with machine("two_hosts.sh") as names:
        hosts = names.split()
        words = ["ip", "netns", "exec", hosts[1], *command.split()]
        others = os.environ | environ | {rank: "1"}
        with subprocess.Popen(words, cwd=ROOT, env=others, stdout=subprocess.DEVNULL) as second:
            try:
                first = f"ip netns exec {hosts[0]} {command}"
                assert (
                    outcome(tmp_path / "run", first, cwd=ROOT, **{rank: "0"}, **environ) == expected
                )
                assert second.wait(60) == 0
            finally:
                second.terminate()


@contextmanager
def training(start: str, folder: Path, **environ: str) -> Iterator[subprocess.Popen]:
    """Train without an end in two processes; yield their launcher once there are records."""
    settings = (
        f"--config={write_config(folder)} --output={folder}/run --set NUM_EPOCHS=9999 --set "
        "EVAL_EVERY=9999"
    )
    words = f"{start} imagenet_dali/train_dali.py {settings}".split()
    streams = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    environ = os.environ | environ | {"NPROC_PER_NODE": "2"}
    with subprocess.Popen(words, cwd=ROOT, env=environ, **streams) as launcher:
        wait_until(
            lambda: (folder / "run/metrics.jsonl").exists() and read_metrics(folder / "run"),
            seconds=120,
        )
        yield launcher


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_torchrun_saves_a_checkpoint_and_prints_no_traceback(data, tmp_path, number):
    with training("bash scripts/train_torchrun.sh", tmp_path, DATA=data) as process:
        process.send_signal(number)
        printed = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + number
    assert "Traceback" not in printed
    assert "rerun the command to resume from" in printed
    assert newest_checkpoint(tmp_path / "run/checkpoints") is not None


def test_when_a_rank_is_killed_the_other_ends_and_says_so_in_one_line(data, tmp_path):
    with training("bash scripts/train_torchrun.sh", tmp_path, DATA=data) as launcher:
        ranks = Process(launcher.pid).children()
        (lost,) = [rank for rank in ranks if rank.environ().get("RANK") == "1"]
        lost.kill()
        assert not wait_procs(ranks, timeout=30)[1]
        printed = launcher.communicate(timeout=30)[0]
    (line,) = [line for line in printed.splitlines() if line.startswith("error: of 2 processes")]
    assert "rank 1 is missing, see its output; rank 0 was at 'step " in line
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("script", "environ", "words"),
    [
        ("train_torchrun", dict(NNODES="2", MASTER_ADDR="localhost"), "NNODES=2 needs NODE_RANK"),
        ("train_torchrun", dict(NNODES="2", NODE_RANK="0"), "NNODES=2 needs MASTER_ADDR"),
        ("train_torchrun", dict(WORLD_SIZE="2", RANK="1"), "MASTER_ADDR: the first node's name or"),
        ("train_slurm", {}, "not in a Slurm job"),
        ("setup", dict(PYTHON="bash"), "PYTHON=bash: .venv is there, with Python 3."),
    ],
)
def test_what_the_scripts_refuse(script, environ, words):
    answer = run(f"bash scripts/{script}.sh train.py", cwd=ROOT, code=2, **environ)
    assert answer.stderr.startswith("error: ")
    assert words in answer.stderr


# --- mpirun
# --------------------------------------------------------------------------------------------------


MPIRUN = "mpirun --allow-run-as-root --oversubscribe --bind-to none -n 2"


def test_mpirun(data, arguments, expected, tmp_path):
    command = f"{MPIRUN} python train_dali.py {arguments}"
    assert outcome(tmp_path / "run", command, DATA=data) == expected


def test_ranks_end_with_an_mpirun_that_is_killed(data, tmp_path):
    with training(f"{MPIRUN} {sys.executable}", tmp_path, DATA=data) as launcher:
        ranks = Process(launcher.pid).children()
        launcher.kill()
        assert not wait_procs(ranks, timeout=60)[1]
    assert newest_checkpoint(tmp_path / "run/checkpoints") is not None


# --- Slurm
# --------------------------------------------------------------------------------------------------


def test_srun_of_the_training_script(slurm, data, arguments, expected, tmp_path):
    """Seed 000's command, typed into a shell that has no such variables."""
    flags = "--local_rank=$SLURM_PROCID --world_size=$SLURM_NPROCS --host=$HOST"
    command = f"srun -n 2 python train_dali.py {flags} --port={free_port()} {arguments}"
    assert outcome(tmp_path / "run", command, DATA=data, HOST=NODE, **slurm) == expected


def test_srun_of_the_slurm_script(slurm, data, expected, tmp_path):
    """Seed 003's command as printed, from a task's folder that has the scripts in it."""
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    with write_config(tmp_path).open("a") as config:
        config.write("MAX_STEPS = 3\n")
    (tmp_path / "train.py").symlink_to(TASK / "train_dali.py")
    environ = dict(SLURM_NTASKS="2", HOST=NODE, CONFIG="tiny.py", DATA=data)
    command = "srun bash ./scripts/train_slurm.sh"
    assert (
        outcome(tmp_path / "outputs" / "tiny", command, cwd=tmp_path, **environ, **slurm)
        == expected
    )


def test_srun_of_a_script_of_ones_own(slurm, tmp_path):
    """Seed 003's snippet and command, as the documentation prints them; then a training step."""
    page = (ROOT / "docs" / "from-colossalai-examples.md").read_text()
    snippet = re.search(
        r"^```python\n(from common import colossal.*?)^```$", page, re.MULTILINE | re.DOTALL
    )[1]
    (tmp_path / "script.py").write_text(f"{snippet}\n{OWN_TRAINING}")
    config = ROOT / "configs" / "config_AMP_torch.py"
    command = (
        f"srun -n 2 bash {ROOT}/scripts/train_slurm.sh {tmp_path}/script.py --config {config} "
        f"--host {NODE}"
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    answer = run(command, PYTHONPATH=str(ROOT), HOST="elsewhere", PATH=path, **slurm)
    one, other = re.findall(r"weights (\S+) of 2", answer.stdout)
    assert one == other


def test_when_a_rank_under_srun_is_killed_the_other_ends_and_says_so_in_one_line(
    slurm, data, tmp_path
):
    """No launcher tells the other: srun waits for all."""
    with training(f"srun -n 2 {sys.executable}", tmp_path, DATA=data, **slurm) as launcher:
        # they are the node's children, not srun's
        ranks = {}
        for process in process_iter(["cmdline", "environ"]):
            if f"--output={tmp_path}/run" in (process.info["cmdline"] or ()):
                ranks.setdefault((process.info["environ"] or {}).get("SLURM_PROCID"), process)
        ranks["0"].kill()
        assert not wait_procs([ranks["0"], ranks["1"]], timeout=60)[1]
        printed = launcher.communicate(timeout=60)[0]
    (line,) = [line for line in printed.splitlines() if line.startswith("error: of 2 processes")]
    assert "rank 0 is missing, see its output; rank 1 was at 'step " in line
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    "interrupt", ["scancel --batch --signal=USR1 {job}", "srun --partition urgent -n 2 true"]
)
def test_a_job_that_is_interrupted_requeues_itself_and_resumes(slurm, data, tmp_path, interrupt):
    """No step is lost or repeated; one signal is --signal=B:USR1's."""
    settings = "--set NUM_EPOCHS=60 --set EVAL_EVERY=60 --set CHECKPOINT_EVERY=20 --set LOG.every=1"
    arguments = f"--config={write_config(tmp_path)} {settings}"
    command = f"{SBATCH} {TASK}/train_dali.py {arguments} --output={tmp_path}/run"
    job = run(command, cwd=tmp_path, DATA=data, **slurm).stdout.strip()

    def says(state: str) -> bool:
        return state in run(f"scontrol show job {job}", **slurm).stdout

    wait_until(lambda: list((tmp_path / "run").glob("checkpoints/step-*/COMPLETE")), seconds=120)
    run(interrupt.format(job=job), **slurm)
    wait_until(lambda: says("Restarts=1"), seconds=120)
    # instead of Slurm's two minutes; a job cannot start in the second in which it was ended
    run(f"scontrol update jobid={job} starttime=now+3", **slurm)
    wait_until(lambda: says("JobState=COMPLETED"), seconds=300)
    out = (tmp_path / "job.out").read_text()
    assert len(re.findall(r"^resuming from .*/step-\d+$", out, re.MULTILINE)) == 1
    steps = [
        record["step"] for record in read_metrics(tmp_path / "run") if record["kind"] == "train"
    ]
    assert steps == list(range(1, 181))
