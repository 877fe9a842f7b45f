"""The list of careless lines is one of today's lines."""

import shlex

from common.files import ROOT
from common.testing.mutate import read_mutations


def test_every_mutation_has_its_line_and_its_tests():
    for title, files, old, _, tests in read_mutations():
        for file in files.split():
            source = (ROOT / file).read_text()
            assert source.count(old) == 1, title
        for word in shlex.split(tests):
            if "/" in word:
                assert (ROOT / word).exists(), title
