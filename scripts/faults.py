"""Inject faults into real runs: ``python scripts/faults.py --help`` says more."""

import sys

from faults.command import main

from common.errors import run_command

if __name__ == "__main__":
    run_command(lambda argv: sys.exit(main(argv)))
