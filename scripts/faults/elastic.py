"""Real torchrun: restarts after a killed rank, and with fewer ranks after a lost node."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil

from common.errors import run_command
from common.testing.ranks import free_port
from common.tools.harness import ROOT
from faults.lab import NO_CHANCE, TWO, Lab, Recovery, Trial, fault, read_result
from faults.places import Place, at, kill
from faults.processes import expect
from imagenet_dali import train_dali

# seconds until a lost node is noticed, and until the others stop waiting for it
RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=2,last_call_timeout=2"
LIMIT = 240.0  # seconds: each process imports torch
MARK = "FAULTS_TORCHRUN"  # environment variable of an agent and all its processes: the agent's log


def main(argv: list[str]) -> None:
    """Train as a process of torchrun; at step 8 of the first start, rank 1 or node 1 with its agent is killed."""
    node, rank = os.environ.get("NODE"), int(os.environ["RANK"])
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if node == "1":
            at(Place("step", 8), lambda: os.kill(os.getppid(), signal.SIGKILL))(rank)
        elif node is None:
            at(Place("step", 8), kill, 1)(rank)
    run_command(train_dali.main, argv)


class Torchrun:
    """A torchrun agent; its processes run ``trial``."""

    def __init__(self, trial: Trial, *options: str, **environ: str) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1", *options]
        self.log = trial.lab.new_folder()
        environ |= {"PYTHONPATH": f"{ROOT}:{ROOT}/scripts", "OMP_NUM_THREADS": "1", MARK: str(self.log)}
        with self.log.open("w") as log:
            command += ["-m", "faults.elastic", *trial.arguments]
            self.process = subprocess.Popen(command, env=os.environ | environ, stdout=log, stderr=log)

    def wait(self, code: int, until: float) -> str:
        """Wait for the agent to exit with ``code``, without leftover processes; return its output."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, until - time.monotonic()))
        left = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # ended, or another user's
                if process.environ().get(MARK) == str(self.log):
                    process.kill()
                    left.append(process.pid)
        self.process.wait()
        printed = self.log.read_text()
        expect(not left, f"the agent did not end, or left processes behind: {left}: {printed[-3000:]}")
        expect(self.process.returncode == code, f"exit status {self.process.returncode}: {printed[-3000:]}")
        return printed


@fault("torchrun --max-restarts: a rank is killed", 1, 0)
def restarted(lab: Lab, choice: random.Random) -> Recovery:
    trial = Trial(lab, TWO.but(NO_CHANCE))
    agent = Torchrun(trial, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    printed = agent.wait(0, time.monotonic() + LIMIT)
    expect("resuming from" in printed, printed[-3000:])
    return Recovery(trial.compare().equal)


@fault("torchrun --nnodes 1:2: a node is killed", 1, 0)
def fewer_nodes(lab: Lab, choice: random.Random) -> None:
    """Kill one of two nodes of ``--nnodes 1:2``, agent and process: the other continues alone."""
    trial, until = Trial(lab, TWO.but(NO_CHANCE)), time.monotonic() + LIMIT
    place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", str(trial.output)]
    place += ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3"]
    agents = [
        Torchrun(trial, *place, "--rdzv-conf", f"{RENDEZVOUS},is_host={node == 0}", NODE=str(node)) for node in range(2)
    ]
    for agent, code in zip(agents, (0, -signal.SIGKILL), strict=True):
        agent.wait(code, until)
    starts = json.loads((trial.output / "config.json").read_text())["starts"]
    expect([start["gpus"] for start in starts] == [2, 1], starts)
    expect(starts[1]["step"] > 0, starts)
    read_result(trial.output)


if __name__ == "__main__":
    main(sys.argv[1:])
