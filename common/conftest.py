"""What the tests of several rooms share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The images of the tiny task."""
    from common.testing.tiny_task import write_images  # most tests need nothing of it

    return write_images(tmp_path_factory.mktemp("task") / "data")
