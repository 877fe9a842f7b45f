"""torchrun without its traceback: ``python -m common.launch.torchrun`` takes torchrun's arguments.

A training script that exits with status 2 has printed its error; torchrun would add some 45 lines. After SIGTERM or
Ctrl-C, which torchrun passes on, the exit status is 128 plus the signal's number. Under nohup it ignores SIGHUP.
"""

import logging
import signal
import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

MISTAKE = 2  # exit status of a training script after its own error message


def run() -> None:
    for name in ("multiprocessing.api", "multiprocessing.errors", "multiprocessing.errors.error_handler"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)  # each has its own level
    is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # which torchrun overrides by default
    try:
        main(["--signals-to-handle=SIGTERM,SIGINT,SIGQUIT"] * is_nohup + sys.argv[1:])
    except SignalException as error:
        sys.exit(128 + error.sigval)
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        if MISTAKE in codes:  # torchrun sent SIGTERM to the others
            sys.exit(MISTAKE)
        sys.stderr.write(f"{error}\n")
        sys.exit(codes[0] if codes[0] > 0 else 128 - codes[0])


if __name__ == "__main__":
    run()
