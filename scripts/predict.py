"""Command line of common/tools/predict.py."""

from common.errors import run_command
from common.tools.predict import main

if __name__ == "__main__":
    run_command(main)
