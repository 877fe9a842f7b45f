"""For all tests."""

import gc
import os

# What tests left for the garbage collector is their own process's to collect. One forked from it that does so crashes,
# or waits for ever: DALI's pipelines, for one, end threads that a fork does not copy.
os.register_at_fork(after_in_child=gc.freeze)
