"""Command line of common/tools/export.py."""

from common.errors import run_command
from common.tools.export import main

if __name__ == "__main__":
    run_command(main)
