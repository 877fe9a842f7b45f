"""A real Slurm on this machine, one node with two CPUs.

Needs root and Debian's packages slurm-wlm and munge. Uses free ports and a temporary folder; leaves
no process behind.
"""

import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from common.testing.commands import wait_until
from common.testing.ranks import free_port

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
def local_slurm() -> Iterator[dict[str, str]]:
    """Run Slurm inside the context; yield the variables that srun, sbatch and scontrol need."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm")))
        folder.chmod(0o755)  # munged requires a socket folder that others can enter
        environ = {"SLURM_CONF": str(_write_configuration(folder))}
        for program, arguments in {
            "munged": [
                f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")
            ]
            + ["--foreground", f"--socket={folder}/munge.socket"],
            "slurmctld": ["-D", "-c"],
            "slurmd": ["-D", "-N", NODE],
        }.items():
            out = stack.enter_context((folder / f"{program}.out").open("wb"))
            daemon = subprocess.Popen(
                [program, *arguments], stdout=out, stderr=out, env=os.environ | environ
            )
            stack.enter_context(daemon)
            stack.callback(daemon.terminate)
            if program == "munged":
                wait_until((folder / "munge.socket").exists)
        wait_until(
            lambda: (
                _ask(environ, "sinfo", "--noheader", "--format=%T", "--partition=main") == "idle"
            )
        )
        try:
            yield environ
        finally:
            _ask(environ, "scancel", "--user=root")
            wait_until(lambda: not _ask(environ, "squeue", "--noheader"))


def _write_configuration(folder: Path) -> Path:
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    host, ports = (
        socket.gethostname().partition(".")[0],
        dict(controller_port=free_port(), node_port=free_port()),
    )
    path = folder / "slurm.conf"
    path.write_text(CONFIGURATION.format(folder=folder, host=host, node=NODE, **ports))
    return path


def _ask(environ: dict[str, str], *command: str) -> str:
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | environ
    ).stdout.strip()
