"""Command line of common/tools/report.py."""

from common.errors import run_command
from common.tools.report import main

if __name__ == "__main__":
    run_command(main)
