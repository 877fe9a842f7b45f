"""What the tests of the tools share: one finished run."""

from pathlib import Path

import pytest

from common.testing.tiny_task import train


@pytest.fixture(scope="session")
def run(data: Path) -> Path:
    """The folder of a run of ten steps, to which tests only add files."""
    return train(data, data.parent / "run")
