"""Faults injected into real runs, shortened, and what the table says where a run does not survive.

Not among the tests that run by default: ``bash scripts/test.sh -m faults scripts/faults_test.py``.
"""

import random

import pytest
from faults.command import has_survived, inject
from faults.lab import FAULTS, ONE, Fault, Lab, Recovery, Trial
from faults.processes import Ranks, RunLostError

from common.checkpoint.save import newest_checkpoint

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.quick], ids=lambda fault: fault.name)
def test_a_run_survives(lab: Lab, fault: Fault) -> None:
    row = inject(fault, lab, 0, fault.quick)
    assert has_survived(row), row


def test_a_difference_is_seen(lab: Lab) -> None:
    trial = Trial(lab, ONE)
    trial.run().expect(0)
    assert trial.compare().equal
    for name in ("model.safetensors", "optimizer.safetensors"):
        file = newest_checkpoint(trial.checkpoints) / name
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert not trial.compare().equal
        file.write_bytes(content)


def test_what_does_not_survive_is_counted(lab: Lab) -> None:
    def lost(lab: Lab, choice: random.Random) -> Recovery:
        raise RunLostError("the reason")

    def crashing(lab: Lab, choice: random.Random) -> Recovery:
        raise SystemExit(1)

    outcomes = iter((Recovery(True, 2.0), Recovery(False, 4.0)))
    row = inject(Fault("unequal", lambda *_: next(outcomes)), lab, 0, 2)
    assert list(row.values()) == ["unequal", 2, 2, 1, "3.0"]
    assert not has_survived(row)
    assert not has_survived(inject(Fault("lost", lost), lab, 0, 1))
    assert not has_survived(inject(Fault("crashing", crashing), lab, 0, 1))
    assert has_survived(inject(Fault("nothing to compare", lambda *_: Recovery()), lab, 0, 1))


def test_processes_that_are_left_are_seen() -> None:
    def leave_one() -> None:
        import os
        import time

        if os.fork() == 0:
            time.sleep(60)

    with pytest.raises(RunLostError, match="processes left behind"):
        Ranks(2, leave_one).wait().expect(0)


def test_every_fault_is_there() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names) >= 56  # two more as root
