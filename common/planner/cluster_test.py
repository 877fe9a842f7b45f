import argparse

import pytest

from common.errors import UserError
from common.planner.cluster import LATENCY, Cluster, add_cluster_arguments, parse_cluster
from common.run.arguments import parse_arguments

CLUSTER = Cluster(memory=80e9, node=8, inside=400e9, between=50e9)


def test_the_time_of_a_collective_is_that_of_its_slowest_link():
    def seconds(*ranks: int) -> float:
        return CLUSTER.seconds("all_reduce", ranks, 3, 10**9) - 3 * LATENCY

    assert seconds(0, 1) == pytest.approx(2 * 1 / 2 * 1e9 / 400e9)
    assert seconds(0, 8) == pytest.approx(2 * 1 / 2 * 1e9 / 50e9)
    assert seconds(0, 1, 8, 9) == pytest.approx(2 * 3 / 4 * 1e9 / 100e9)
    assert seconds(*range(16)) == pytest.approx(2 * 15 / 16 * 1e9 / 400e9)
    assert CLUSTER.seconds("all_reduce", (0,), 3, 10**9) == 0


def test_bytes_are_told_apart_by_whether_their_group_leaves_a_node():
    routes = {("all_gather", (0, 1)): 100, ("all_reduce", (0, 8)): 1000, ("broadcast", (0,)): 7}
    assert CLUSTER.sent(routes) == (1 / 2 * 100, 2 * 1 / 2 * 1000)


def test_flags_describe_the_cluster():
    parser = argparse.ArgumentParser()
    add_cluster_arguments(parser)
    words = "--gpu-memory 40 --gpus-per-node 4 --links 300 25 --images-per-s 500"
    assert parse_cluster(parser.parse_args(words.split())) == Cluster(40e9, 4, 300e9, 25e9, images_per_s=500)
    assert parse_cluster(parser.parse_args([])) == Cluster()
    for flags in (["--links", "300", "0"], ["--links", "nan", "1"], ["--images-per-s", "nan"], ["--gpu-memory", "inf"]):
        with pytest.raises(UserError, match=f"{flags[0]} .*: must be above 0 and finite"):
            parse_cluster(parser.parse_args(flags))


@pytest.mark.parametrize("flag", ["--gpu-memory 40", "--links 300 25"])
def test_flags_that_nothing_would_read_are_refused(flag):
    with pytest.raises(UserError, match=flag.split()[0] + ": requires --dry-run --gpus N"):
        parse_arguments(["--config", "quickstart", "--dry-run", *flag.split()], "")
