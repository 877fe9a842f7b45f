"""Command line of common/tools/results_table.py."""

from common.errors import run_command
from common.tools.results_table import main

if __name__ == "__main__":
    run_command(main)
