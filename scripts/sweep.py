"""Command line of common/tools/sweep.py."""

from common.errors import run_command
from common.tools.sweep import main

if __name__ == "__main__":
    run_command(main)
