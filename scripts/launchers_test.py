"""Real launchers: two processes train bit-identical weights, whatever started them.

Needs root and Debian's packages slurm-wlm, munge, openmpi-bin and iproute2. Not run by default:
``bash scripts/test.sh -m launchers scripts/launchers_test.py``.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from psutil import Error, Process, process_iter, wait_procs

from common.checkpoint.save import newest_checkpoint
from common.files import ROOT
from common.metrics.metrics_file import read_metrics
from common.testing.commands import copy_working_tree, in_words, wait_until
from common.testing.local_slurm import NODE, local_slurm
from common.testing.ranks import free_port
from imagenet_dali.testing import prepare_data, run, write_config

pytestmark = [pytest.mark.launchers, pytest.mark.timeout(600)]

TASK = ROOT / "imagenet_dali"
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


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    with local_slurm() as environ:
        yield environ


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


@contextmanager
def two_hosts() -> Iterator[list[str]]:
    """Yield the names of two connected network namespaces, 10.77.0.1 and 10.77.0.2 on their eth0.

    This machine's name resolves to 127.0.1.1 in both, as Debian has it; node0 is the first, where
    it does so too.
    """
    names = [f"launchers{os.getpid()}-{number}" for number in (1, 2)]
    try:
        for name in names:
            run(f"ip netns add {name} && ip -n {name} link set lo up")
        run(f"ip -n {names[0]} link add eth0 type veth peer name eth0 netns {names[1]}")
        for number, name in enumerate(names, 1):
            hosts = Path("/etc/netns") / name / "hosts"  # in place of /etc/hosts
            hosts.parent.mkdir(parents=True)
            node0 = "127.0.1.1" if number == 1 else "10.77.0.1"
            hosts.write_text(
                f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n{node0} node0\n"
            )
            run(
                f"ip -n {name} address add 10.77.0.{number}/24 dev eth0 && ip -n {name} link set "
                "eth0 up"
            )
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


@pytest.mark.parametrize(
    ("size", "rank"),
    [("NNODES", "NODE_RANK"), ("WORLD_SIZE", "RANK"), ("PET_NNODES", "PET_NODE_RANK")],
)
def test_torchrun_on_two_hosts(data, arguments, expected, tmp_path, size, rank):
    """As two pods of Kubeflow, too."""
    command = f"bash scripts/train_torchrun.sh imagenet_dali/train_dali.py {arguments}"
    environ = {size: "2", "MASTER_ADDR": "node0", "DATA": data}
    with two_hosts() as hosts:
        words, others = (
            ["ip", "netns", "exec", hosts[1], *command.split()],
            os.environ | environ | {rank: "1"},
        )
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


@pytest.mark.parametrize(
    ("script", "environ", "words"),
    [
        ("train_torchrun", dict(NNODES="2", MASTER_ADDR="localhost"), "NNODES=2 needs NODE_RANK"),
        ("train_torchrun", dict(NNODES="2", NODE_RANK="0"), "NNODES=2 needs MASTER_ADDR"),
        (
            "train_torchrun",
            dict(MASTER_PORT="{taken}"),
            "MASTER_PORT={taken} is in use on this node: choose another",
        ),
        ("train_torchrun", dict(WORLD_SIZE="2", RANK="1"), "MASTER_ADDR: the first node's name or"),
        ("train_slurm", {}, "not in a Slurm job"),
        ("setup", dict(PYTHON="bash"), "PYTHON=bash: .venv is there, with Python 3."),
    ],
)
def test_what_the_scripts_refuse(script, environ, words):
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = str(server.getsockname()[1])
        environ = {name: value.format(taken=taken) for name, value in environ.items()}
        answer = run(f"bash scripts/{script}.sh train.py", cwd=ROOT, code=2, **environ)
    assert answer.stderr.startswith("error: ")
    assert words.format(taken=taken) in answer.stderr


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


@pytest.mark.parametrize(
    ("start", "lost"), [("bash scripts/train_torchrun.sh", 1), (f"srun -n 2 {sys.executable}", 0)]
)
def test_when_a_rank_is_killed_the_other_ends_and_says_so_in_one_line(
    slurm, data, tmp_path, start, lost
):
    with training(start, tmp_path, DATA=data, **slurm) as launcher:
        ranks = {
            rank: process
            for process in reversed([*process_iter()])
            if (rank := rank_in(process, tmp_path))
        }
        ranks[str(lost)].kill()
        assert not wait_procs(ranks.values(), timeout=30)[1]
        printed = launcher.communicate(timeout=30)[0]
    (line,) = [line for line in printed.splitlines() if line.startswith("error: of 2 processes")]
    assert f"rank {lost} is missing, see its output; rank {1 - lost} was at 'step " in line
    assert "Traceback" not in printed


def rank_in(process: Process, folder: Path) -> str | None:
    """Return the rank of a process that trains into ``folder``."""
    with suppress(Error):  # it has ended meanwhile
        if f"--output={folder}/run" in process.cmdline():
            return process.environ().get("RANK", process.environ().get("SLURM_PROCID"))
    return None


@pytest.mark.parametrize(
    "interrupt", ["scancel --batch --signal=USR1 {job}", "srun --partition urgent -n 2 true"]
)
def test_a_job_that_is_interrupted_requeues_itself_and_resumes(slurm, data, tmp_path, interrupt):
    """Steps and weights are those of an uninterrupted run; one signal is --signal=B:USR1's."""
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
    command = (
        f"bash scripts/train_torchrun.sh {TASK}/train_dali.py {arguments} "
        f"--output={tmp_path}/uninterrupted"
    )
    run(command, cwd=ROOT, DATA=data, NPROC_PER_NODE="2")
    ours, expected = (
        newest_checkpoint(tmp_path / name / "checkpoints") for name in ("run", "uninterrupted")
    )
    assert (ours / "model.safetensors").read_bytes() == (
        expected / "model.safetensors"
    ).read_bytes()


def test_an_ordinary_user_without_git_in_a_path_with_a_space(tmp_path):
    """The quickstart as a user without root, with a read-only home, in the C locale."""
    clone = copy_working_tree(ROOT, tmp_path / "a clone")
    home, programs = tmp_path / "home", tmp_path / "bin"
    home.mkdir(mode=0o555)
    programs.mkdir()
    for program in Path("/usr/bin").iterdir():
        if not program.name.startswith("git"):
            (programs / program.name).symlink_to(program)
    environ = {"PATH": str(programs), "HOME": str(home), "LANG": "C", "PYTHONPATH": str(clone)}
    steps = in_words("MAX_STEPS=2", "NUM_EPOCHS=1", "WARMUP_EPOCHS=0")
    command = ["unshare", "--user", "--map-user=1000", "bash", "scripts/quickstart.sh", *steps]
    done = subprocess.run(
        command, cwd=clone, env=environ, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("top1=0.")
    assert "Traceback" not in done.stderr
    assert (
        json.loads((clone / "outputs" / "quickstart" / "config.json").read_text())["commit"] is None
    )
