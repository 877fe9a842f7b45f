"""torchrun for real: it restarts the ranks after one was killed, and fewer of them after a node was lost."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from common.errors import run_command
from common.testing.ranks import free_port
from faults.lab import NO_CHANCE, TWO, Lab, Recovery, Trial, fault, result
from faults.places import Place, at, kill
from faults.processes import expect
from imagenet_dali import train_dali

ROOT = Path(__file__).resolve().parents[2]
# for a node that is gone to be noticed, and for the others no longer to wait for it, in seconds
RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=2,last_call_timeout=2"
LIMIT = 240.0  # seconds: each process imports torch
MARK = "FAULTS_TORCHRUN"  # in the environment of an agent and all its processes: the agent's log


def main(argv: list[str]) -> None:
    """Train as a process of torchrun, whose first life ends at step 8: of rank 1 alone, or of node 1 with its agent."""
    node, rank = os.environ.get("NODE"), int(os.environ["RANK"])
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if node == "1":
            at(Place("step", 8), lambda: os.kill(os.getppid(), signal.SIGKILL))(rank)
        elif node is None:
            at(Place("step", 8), kill, 1)(rank)
    run_command(train_dali.main, argv)


class Torchrun:
    """An agent of torchrun, whose processes train into ``output``."""

    def __init__(self, lab: Lab, output: Path, *options: str, node: int | None = None) -> None:
        arguments = lab.arguments(TWO.but(NO_CHANCE), output)
        command = [sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1", *options]
        self.log = lab.new_folder()
        environ = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/scripts", "OMP_NUM_THREADS": "1", MARK: str(self.log)}
        environ |= {} if node is None else {"NODE": str(node)}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "-m", "faults.elastic", *arguments], env=environ, stdout=log, stderr=log
            )

    def wait(self, until: float) -> str:
        """Return what was printed, once the agent has ended; it and all its processes are then gone."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, until - time.monotonic()))
        processes = self._processes()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        ended = self.process.poll() is not None
        self.process.wait()
        printed = self.log.read_text()
        expect(ended, f"the agent did not end: {printed[-3000:]}")
        left = [process.pid for process in processes if process.pid != self.process.pid]
        expect(not left, f"processes left behind: {left}")
        return printed

    def _processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # it has ended, or is another user's
                found += [process] * (process.environ().get(MARK) == str(self.log))
        return found


@fault("torchrun --max-restarts: a rank is killed", 1, 0)
def restarted(lab: Lab, choice: random.Random) -> Recovery:
    """Kill a rank under ``--max-restarts``: torchrun restarts all ranks, and they resume."""
    trial = Trial(lab, TWO.but(NO_CHANCE))
    agent = Torchrun(lab, trial.output, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    printed = agent.wait(time.monotonic() + LIMIT)
    expect(agent.process.returncode == 0 and "resuming from" in printed, printed[-3000:])
    return Recovery(trial.is_equal())


@fault("torchrun --nnodes 1:2: a node is killed", 1, 0)
def fewer_nodes(lab: Lab, choice: random.Random) -> Recovery:
    """Kill one of two nodes of ``--nnodes 1:2``, agent and process: the other continues alone."""
    output, started = lab.new_folder(), time.monotonic()
    place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", str(output)]
    place += ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3"]
    agents = [
        Torchrun(lab, output, *place, "--rdzv-conf", f"{RENDEZVOUS},is_host={node == 0}", node=node)
        for node in range(2)
    ]
    printed = [agent.wait(started + LIMIT) for agent in agents]
    expect([agent.process.returncode for agent in agents] == [0, -signal.SIGKILL], printed[0][-3000:])
    starts = json.loads((output / "config.json").read_text())["starts"]
    expect([start["gpus"] for start in starts] == [2, 1], starts)
    expect(starts[1]["step"] > 0, starts)
    result(output)
    return Recovery()


if __name__ == "__main__":
    main(sys.argv[1:])
