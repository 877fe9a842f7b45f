"""torchrun without its traceback: ``python -m common.launch.torchrun`` takes torchrun's arguments.

A training script that exits with status 2 has printed one line that says what is wrong; torchrun would add some 45.
"""

import logging
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

MISTAKE = 2  # what a training script exits with after a line of its own


def run() -> None:
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    try:
        main()
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode != MISTAKE:
            sys.stderr.write(f"{error}\n")
        sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)


if __name__ == "__main__":
    run()
