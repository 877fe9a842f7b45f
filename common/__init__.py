"""What the tasks share: config, launch, data, model, optimizer, checkpoint, tools."""

import signal
import sys
from pathlib import Path

# Ctrl-C while one of the project's scripts imports ends it without a traceback: the first import of
# `common` comes before the slow ones, and `run_command` handles Ctrl-C from then on. A notebook, or
# a program that imports the project, keeps its own handler.
_file = getattr(sys.modules["__main__"], "__file__", None)
_is_module = sys.argv[:1] == ["-m"]  # python -m common.launch.signals, whose file is not known yet
_is_ours = _file and Path(__file__).resolve().parents[1] in Path(_file).resolve().parents[1:2]
if (_is_module or _is_ours) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
