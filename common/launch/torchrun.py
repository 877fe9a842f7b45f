"""torchrun without its traceback: ``python -m common.launch.torchrun`` takes torchrun's arguments.

A training script that exits with status 2 has printed its error; torchrun would add some 45 lines.
"""

import logging
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

MISTAKE = 2  # exit status of a training script after its own error message


def run() -> None:
    for name in ("api", "errors", "errors.error_handler"):  # each has its own level
        logging.getLogger(f"torch.distributed.elastic.multiprocessing.{name}").setLevel(logging.CRITICAL)
    try:
        main()
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        if MISTAKE in codes:  # torchrun sent SIGTERM to the others
            sys.exit(MISTAKE)
        sys.stderr.write(f"{error}\n")
        sys.exit(codes[0] if codes[0] > 0 else 128 - codes[0])


if __name__ == "__main__":
    run()
