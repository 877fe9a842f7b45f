import os

from common.data.fingerprint import fingerprint_of


def test_parts_are_told_apart_and_keep_their_order():
    different = [[], [""], ["ab"], ["a", "b"], ["b", "a"], ["a", "b", ""], [1], [11], [1, 1], [os.fsdecode(b"\xff")]]
    assert len({fingerprint_of(parts) for parts in different}) == len(different)
    assert fingerprint_of(["a", 1]) == fingerprint_of(iter(("a", "1")))
