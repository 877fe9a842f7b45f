"""The list of careless lines is one of today's lines."""

import shlex

from common.files import ROOT
from common.testing.mutate import read_mutations


def test_every_mutation_has_its_line_and_its_tests():
    for title, files, old, _, tests in read_mutations():
        assert all((ROOT / file).read_text().count(old) == 1 for file in files.split()), title
        assert all((ROOT / word).exists() for word in shlex.split(tests) if "/" in word), title
