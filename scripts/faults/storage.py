"""Data in an S3 server whose requests fail, and a cache whose disk does."""

import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from common.testing.object_store import running_store
from faults.disks import IS_ROOT, LATER, SAVED, fill_disk, small_disk
from faults.lab import BLOCKS, Lab, Recovery, Trial, fault
from faults.places import at, choose_place, in_order, kill

UNRELIABLE = (None, None, None, 500, 503, "cut", "short")


@contextmanager
def unreliable_store(lab: Lab, choice: random.Random) -> Iterator[str]:
    """Run a server with the lab's data set, some requests for whose shards fail; yield its URL."""
    with running_store() as store, mock.patch.dict(os.environ, store.environ):
        store.fault = lambda method, path: choice.choice(UNRELIABLE) if "/train/" in path else None
        yield store.upload(lab.data)


@fault("s3: requests fail, and kill -9 of a rank", 5)
def killed(lab: Lab, choice: random.Random) -> Recovery:
    """Kill a rank at a random place, and resume: the result is that of the same data in a folder."""
    with unreliable_store(lab, choice) as url:
        trial = Trial(lab, BLOCKS, settings=[f"DATA.cache={lab.new_folder()}"], data=url)
        rank, place = BLOCKS.choose_rank(choice), choose_place(choice)
        print(f"    rank {rank} is killed at {place}", flush=True)
        trial.run(at(place, kill, rank)).expect_code(rank, -9)
        return trial.resume()


def cache_fails(lab: Lab, choice: random.Random) -> Recovery:
    with unreliable_store(lab, choice) as url, small_disk(lab.new_folder()) as disk:
        cache, ballast = disk / "cache", disk / "ballast"
        cache.mkdir()
        (cache / ".used").touch()
        fill_disk(ballast)
        trial = Trial(lab, BLOCKS, settings=[f"DATA.cache={cache}", "DATA.cache_gb=0.004"], data=url)
        free = at(SAVED, lambda: ballast.unlink(missing_ok=True))
        wipe = at(LATER, lambda: shutil.rmtree(cache, ignore_errors=True))
        trial.run(in_order(free, wipe)).expect(0, "No space left on device; continuing without it")
        return trial.compare()


if IS_ROOT:
    fault("s3: the cache's disk is full, and wiped")(cache_fails)
