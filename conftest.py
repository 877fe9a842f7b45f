"""For all tests."""

import gc
import os

# What a test left for the garbage collector is its own process's to collect. A process forked from it that does so
# waits for ever: DALI's pipelines, for one, join threads that a fork does not copy.
os.register_at_fork(after_in_child=gc.freeze)
