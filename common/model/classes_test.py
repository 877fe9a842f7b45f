"""Which class of a model a name means."""

import pytest

from common.model.classes import match_classes


@pytest.mark.parametrize(
    ("known", "names", "labels"),
    [
        (
            [["crane", "tench"]],
            ["tench", "crane", "emu"],
            [1, 0, None],
        ),
        (
            [["crane", "crane"]],
            ["crane"],
            [None],  # which of the two is not known
        ),
        (
            [["crane", "crane"]],
            ["crane", "crane"],
            [0, 1],
        ),
        (
            [["n1", "n2"], ["crane", "tench"]],
            ["tench", "n1"],
            [1, 0],
        ),
        (
            [["crane", "tench"], ["tench", "crane"]],
            ["crane"],
            [None],
        ),
    ],
)
def test_a_name_means_the_class_that_alone_has_it(known, names, labels):
    assert match_classes(known, names) == labels
