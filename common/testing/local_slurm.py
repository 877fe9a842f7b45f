"""A real Slurm on this machine, one node with two CPUs.

Needs root and Debian's packages slurm-wlm and munge. Uses free ports and a temporary folder; leaves no process behind.
"""

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

NODE = "localhost"
CONFIGURATION = """
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0
KillWait=5
NodeName={node} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes={node} Default=YES State=UP PriorityTier=1
PartitionName=urgent Nodes={node} State=UP PriorityTier=2
"""


@contextmanager
def local_slurm(timeout: float = 60) -> Iterator[dict[str, str]]:
    """Run Slurm inside the context; yield the environment variables that srun, sbatch and scontrol need.

    Raises RuntimeError if one does not start.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm")))
        folder.chmod(0o755)  # munged requires a socket folder that others can enter
        environ = {"SLURM_CONF": str(_write_configuration(folder))}
        for program, arguments in {
            "munged": [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
            + ["--foreground", f"--socket={folder}/munge.socket"],
            "slurmctld": ["-D", "-c"],
            "slurmd": ["-D", "-N", NODE],
        }.items():
            stack.enter_context(_daemon([program, *arguments], folder / f"{program}.out", environ))
            if program == "munged":
                _wait_until((folder / "munge.socket").exists, folder, timeout)
        _wait_until(
            lambda: _ask(environ, "sinfo", "--noheader", "--format=%T", "--partition=main") == "idle", folder, timeout
        )
        try:
            yield environ
        finally:
            _ask(environ, "scancel", "--user=root")
            _wait_until(lambda: not _ask(environ, "squeue", "--noheader"), folder, timeout)


def _write_configuration(folder: Path) -> Path:
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        ports = dict(controller_port=first.getsockname()[1], node_port=second.getsockname()[1])
    host = socket.gethostname().partition(".")[0]
    path = folder / "slurm.conf"
    path.write_text(CONFIGURATION.format(folder=folder, host=host, node=NODE, **ports))
    return path


@contextmanager
def _daemon(command: list[str], log: Path, environ: dict[str, str]) -> Iterator[None]:
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **environ})
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ask(environ: dict[str, str], *command: str) -> str:
    answer = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environ}, check=False)
    return answer.stdout.strip()


def _wait_until(condition: Callable[[], bool], folder: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            logs = "\n".join(f"--- {log.name}\n{log.read_text()[-2000:]}" for log in sorted(folder.glob("*.out")))
            raise RuntimeError(f"Slurm is not ready after {timeout:.0f} s\n{logs}")
        time.sleep(0.2)
