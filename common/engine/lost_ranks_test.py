"""What ranks say of one that is missing at the start, dies or hangs."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

from common.engine import lost_ranks
from common.engine.groups import join_groups, shutdown
from common.engine.lost_ranks import POLL, Watcher, naming_lost_ranks, open_store, set_activity
from common.engine.upstream import gpc
from common.errors import RankError, UserError
from common.testing.commands import forked, run_python
from common.testing.ranks import free_port, launched, run_ranks

TIMEOUT = 8.0
SIZE = 3


def wait_for_the_others() -> None:
    dist.all_reduce(torch.ones(1))


def compute() -> None:
    # Stands for waiting for a GPU too: no error tells of the lost rank.
    time.sleep(1000)


kill = partial(signal.raise_signal, signal.SIGKILL)
stop = partial(signal.raise_signal, signal.SIGSTOP)


def train(
    rank: int,
    port: int,
    lost: int,
    fault: Callable[[], None],
    others: Callable[[], None],
    _: object,
) -> None:
    join_groups({}, rank, SIZE, "127.0.0.1", port, "gloo", verbose=False, timeout=TIMEOUT)
    with naming_lost_ranks():
        connections = psutil.Process().net_connections()
        assert {c.laddr.ip for c in connections if c.status == "LISTEN"} <= {"127.0.0.1"}
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
        for group in gpc._groups.values():
            options = group._get_backend(torch.device("cpu")).options
            assert options._timeout.total_seconds() == TIMEOUT
        # NCCL must not end the process before it has named the rank.
        assert gpc.timeout_of("nccl").total_seconds() > TIMEOUT + 60
        wait_for_the_others()
        set_activity(f"step 4 of rank {rank}")
        (fault if rank == lost else others)()
    shutdown()


@pytest.mark.parametrize(
    ("fault", "lost", "others", "seconds"),
    [
        (kill, 0, wait_for_the_others, 0),
        (kill, 1, compute, TIMEOUT),
        (stop, 0, wait_for_the_others, TIMEOUT),
        (compute, 1, wait_for_the_others, TIMEOUT),
    ],
)
def test_all_end_in_time_with_one_line_that_names_the_missing_one(fault, lost, others, seconds):
    port = free_port()
    hangs = fault is compute
    who = "one hangs (TIMEOUT=8)" if hangs else f"rank {lost} is missing, see its output"
    with ExitStack() as stack:
        mains = [partial(train, rank, port, lost, fault, others) for rank in range(SIZE)]
        ranks = [
            stack.enter_context(forked(main, RANK=str(rank))) for rank, main in enumerate(mains)
        ]
        started = time.monotonic()
        for rank, (process, _, err) in enumerate(ranks):
            if rank == lost and not hangs:
                continue
            process.join(60)
            assert process.exitcode == 2, err.read_text()
            (line,) = [line for line in err.read_text().splitlines() if line.startswith("error:")]
            phase = f"rank {rank} was at 'step 4 of rank {rank}'; rerun the command to resume"
            assert line == f"error: of 3 processes, {who}; {phase}"
        assert time.monotonic() - started < seconds + 20  # on a busy machine
        assert not hangs or "in compute" in ranks[lost][2].read_text()


OUT_OF_MEMORY = """
import atexit
from common import errors
from common.engine import groups
from common.engine.lost_ranks import naming_lost_ranks

@naming_lost_ranks()
def train(_):
    print("started")
    raise MemoryError("out of memory")

groups.join_groups({}, 0, 1, "", 0, "gloo", verbose=False, timeout=60)
atexit.register(print, "cleaned up")
groups.gpc.watcher = groups.Watcher(0, 1, 60)
groups.dist.get_backend = lambda: "nccl"
errors.explain_errors(str)
errors.run_command(train)
"""


def test_with_nccl_a_process_ends_without_clean_up_but_with_its_output_and_status():
    ended = run_python(OUT_OF_MEMORY)
    expected = (2, "started\n", "error: out of memory\n")
    assert (ended.returncode, ended.stdout, ended.stderr) == expected


def test_progress_restarts_the_clock():
    watcher = Watcher(0, 1, timeout=3 * POLL)
    polls = iter(range(99))
    watcher.woken = SimpleNamespace(
        wait=lambda _: set_activity("a step") if next(polls) in (1, 3, 5) else None
    )
    watcher._is_asked = lambda: False
    watcher._find_missing = lambda: watcher.__setattr__("state", "failed")
    watcher._run()
    assert next(polls) == 9


def join(absent: int, seeds: str, *backends: str) -> list[str]:
    """Return what this rank says of a launch without ``absent``, while it waits and at last."""
    rank = int(os.environ["RANK"])
    port = int(os.environ["MASTER_PORT"])
    said: list[str] = []
    if rank == absent:
        return said
    lost_ranks.LATE = 0.2  # changes this forked process only
    lost_ranks.print_wrapped = lambda text, **_: said.append(text)
    shared = {"SEED": seeds[rank], "EMA": "0.9"}
    with pytest.raises(UserError) as caught:
        # The address may be written as in a URL.
        open_store(rank, SIZE, "[127.0.0.1]", port, 1.0, backends[rank], shared)
    return [*said, str(caught.value)]


def test_ranks_that_do_not_join_or_differ_are_named():
    waits = "for 0.2 s so far; RANK and WORLD_SIZE are set, --world_size 1 overrules them"
    first, _, third = run_ranks(SIZE, join, 1, "000", "gloo", "", "gloo")
    assert first[0].startswith("waiting for rank 1")  # on a busy machine it is "1, 2"
    assert first[0].endswith(f" of 3 processes, {waits}")
    assert first[1:] == third == ["rank 1 of 3 processes did not start within 1 s (TIMEOUT)"]
    said, refused = run_ranks(SIZE, join, 0, "000", "", "gloo", "gloo")[1]
    address = f"--host=[127.0.0.1] --port={refused.partition('port=')[2].partition(':')[0]}"
    assert said == f"waiting for rank 0 of 3 processes at {address}, {waits}"
    assert refused == f"{address}: rank 0 was not found there within 1 s (TIMEOUT)"
    for said in run_ranks(SIZE, join, 3, "000", "nccl", "gloo", "nccl"):
        assert said[-1] == (
            "torch finds no GPU on rank 1: check nvidia-smi there, or start all with --backend gloo"
        )
    for said in run_ranks(SIZE, join, 3, "005", "gloo", "gloo", "gloo"):
        assert said[-1].startswith("rank 2 was started with SEED=5 (rank 0: 0); all ranks of a run")


def join_again() -> list[str]:
    """Return what other runs say that are started on the port of a run, which goes on."""
    rank = int(os.environ["RANK"])
    port = int(os.environ["MASTER_PORT"])
    said = []
    with launched():
        # A run of as many processes, and one of more.
        for other, size in ((rank, 2), (rank + 1, 3)):
            with pytest.raises(RankError) as caught:
                open_store(other, size, "127.0.0.1", port, 5.0, "gloo", {})
            said.append(str(caught.value))
        wait_for_the_others()
    return said


def test_a_second_run_on_the_port_is_refused_and_the_first_goes_on():
    first, second = run_ranks(2, join_again)
    assert "Address already in use" in first[0]
    assert "rank 1 of 3 does not belong to the run of 2 processes there, or has" in first[1]
    assert "rank 1 of 2 does not belong to the run of 2 processes there, or has" in second[0]
    assert "rank 2 of 3 does not belong to the run of 2 processes there, or has" in second[1]


@pytest.mark.parametrize(
    ("host", "port", "message"),
    [
        ("a..b", 9, "--host=a..b --port=9: .*; give a name or address of rank 0's host"),
        ("127.0.0.1.9", 9, ".* --port=9: .* not known; give a name or address"),
        ("127.0.0.1", 70_000, "--port=70000: set them to the first node, and a free port"),
    ],
)
def test_an_impossible_address_is_refused_at_once(host, port, message):
    with pytest.raises(UserError, match=message):
        open_store(1, 2, host, port, 600.0, "gloo", {})


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_interface_that_is_not_there_is_refused(world_size, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib7")
    with pytest.raises(UserError, match="^GLOO_SOCKET_IFNAME=ib7: .* no such interface, but lo"):
        gpc.init_global_dist(0, world_size, "gloo", "127.0.0.1", 9)


def test_a_restart_finds_nothing_of_the_attempt_before(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,lo")
    agents = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for attempt in "01":
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        store = open_store(0, 1, "127.0.0.1", agents.port, 1.0, "gloo", {})
        assert not store.check(["asked"])
        store.set("asked", "")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo,lo"
