"""Command line of common/tools/evaluate.py."""

from common.errors import run_command
from common.tools.evaluate import main

if __name__ == "__main__":
    run_command(main)
