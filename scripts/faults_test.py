"""Faults injected into real runs, shortened, and what the table says where a run does not survive.

Not among the tests that run by default: ``bash scripts/test.sh -m faults scripts/faults_test.py``.
"""

import random
from pathlib import Path

import pytest
from faults import all_faults, has_survived, inject
from injection.bench import ONE, Bench, Fault, Recovery
from injection.processes import Ranks, RunLostError

from common.checkpoint.save import newest_checkpoint

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("fault", [fault for fault in all_faults(50) if fault.quick], ids=lambda fault: fault.name)
def test_a_run_survives(bench: Bench, fault: Fault) -> None:
    row = inject(fault, bench, 0, fault.quick)
    assert has_survived(row), row


def test_a_difference_is_seen(bench: Bench) -> None:
    output = bench.new_folder()
    bench.run(ONE, output).expect(0)
    assert bench.is_equal(ONE, output)
    for name in ("model.safetensors", "optimizer.safetensors"):
        file = newest_checkpoint(output / "checkpoints") / name
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert not bench.is_equal(ONE, output)
        file.write_bytes(content)


def test_what_does_not_survive_is_counted(bench: Bench) -> None:
    def lost(bench: Bench, choice: random.Random) -> Recovery:
        raise RunLostError("the reason")

    outcomes = iter((Recovery(True, 2.0), Recovery(False, 4.0)))
    row = inject(Fault("unequal", lambda *_: next(outcomes)), bench, 0, 2)
    assert list(row.values()) == ["unequal", 2, 2, 1, "3.0"]
    assert not has_survived(row)
    assert not has_survived(inject(Fault("lost", lost), bench, 0, 1))
    assert has_survived(inject(Fault("nothing to compare", lambda *_: Recovery()), bench, 0, 1))


def test_processes_that_are_left_are_seen(tmp_path: Path) -> None:
    def leave_one() -> None:
        import os
        import time

        if os.fork() == 0:
            time.sleep(60)

    with pytest.raises(RunLostError, match="processes left behind"):
        Ranks(2, leave_one, tmp_path).wait().expect(0)
