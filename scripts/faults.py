"""Inject faults into real runs; see ``python scripts/faults.py --help``."""

import sys

from faults.command import main

from common.errors import run_command

if __name__ == "__main__":
    run_command(lambda argv: sys.exit(main(argv)))
