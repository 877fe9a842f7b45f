"""torchrun for real: after a kill it starts again by itself, and with fewer nodes after one is lost."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from injection.bench import NO_CHANCE, TWO, Bench, Fault, Recovery, result
from injection.processes import expect, free_port
from injection.victims import Place, at, kill

from common.errors import run_command
from imagenet_dali import train_dali

ROOT = Path(__file__).resolve().parents[2]
# for a node that is gone to be noticed, and for the others no longer to wait for it, in seconds
RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=2,last_call_timeout=2"
LIMIT = 240.0  # seconds: each process imports torch


def main(argv: list[str]) -> None:
    """Train as a process of torchrun, whose first life ends at step 8: of rank 1 alone, or of node 1 with its agent."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if os.environ.get("NODE") == "1":
            at(Place("step", 8), lambda: os.kill(os.getppid(), signal.SIGKILL))
        elif os.environ.get("NODE") is None and os.environ["RANK"] == "1":
            at(Place("step", 8), kill)
    run_command(train_dali.main, argv)


class Torchrun:
    """An agent of torchrun, whose processes train into ``output``; ``left`` finds those by their environment."""

    def __init__(self, bench: Bench, output: Path, *options: str, node: int | None = None) -> None:
        arguments = bench.arguments(TWO.but(NO_CHANCE), output)
        command = [sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1", *options]
        self.log = bench.new_folder()
        self.mark = f"INJECTED={self.log}"
        environ = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/scripts", "OMP_NUM_THREADS": "1"}
        environ |= dict([self.mark.split("=")]) | ({} if node is None else {"NODE": str(node)})
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "-m", "injection.elastic", *arguments], env=environ, stdout=log, stderr=log
            )

    def wait(self, until: float) -> str:
        """Return what was said, once the agent has ended; it and all its processes are then gone."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, until - time.monotonic()))
        left = [pid for pid in self._processes() if pid != self.process.pid]
        for pid in self._processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ended = self.process.poll() is not None
        self.process.wait()
        said = self.log.read_text()
        expect(ended, f"the agent did not end: {said[-3000:]}")
        expect(not left, f"processes left behind: {left}")
        return said

    def _processes(self) -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # it has ended
                if self.mark.encode() in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found


def restarted(bench: Bench, choice: random.Random) -> Recovery:
    """Kill a rank under ``--max-restarts``: torchrun starts all again, and they go on."""
    mode, output = TWO.but(NO_CHANCE), bench.new_folder()
    bench.reference(mode)
    agent = Torchrun(bench, output, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    said = agent.wait(time.monotonic() + LIMIT)
    expect(agent.process.returncode == 0 and "going on from" in said, said[-3000:])
    return Recovery(bench.is_equal(mode, output))


def fewer_nodes(bench: Bench, choice: random.Random) -> Recovery:
    """Kill one of two nodes of ``--nnodes 1:2``, agent and process: the other goes on alone."""
    output, started = bench.new_folder(), time.monotonic()
    place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", output.name]
    place += ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3"]
    agents = [
        Torchrun(bench, output, *place, "--rdzv-conf", f"{RENDEZVOUS},is_host={node == 0}", node=node)
        for node in range(2)
    ]
    said = [agent.wait(started + LIMIT) for agent in agents]
    expect([agent.process.returncode for agent in agents] == [0, -signal.SIGKILL], f"{said[0][-3000:]}")
    starts = json.loads((output / "config.json").read_text())["starts"]
    expect([start["gpus"] for start in starts] == [2, 1], starts)
    expect(starts[1]["step"] > 0, starts)
    result(output)
    return Recovery()


def elastic_faults() -> list[Fault]:
    """Return the rows."""
    return [
        Fault("torchrun --max-restarts: a rank is killed", restarted, 1, 0),
        Fault("torchrun --nnodes 1:2: a node is killed", fewer_nodes, 1, 0),
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
