"""For all tests."""

import gc
import os

# One thread a process, also in those that tests start: models are tiny and the ranks many.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# What tests left for the garbage collector is their own process's to collect. One forked from it that does so crashes,
# or waits for ever: DALI's pipelines, for one, end threads that a fork does not copy.
os.register_at_fork(after_in_child=gc.freeze)
