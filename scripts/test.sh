#!/usr/bin/env bash
# Set up, then run the tests in three processes, as many tests wait, the long files first. Arguments are passed to pytest
# instead:
#   bash scripts/test.sh common/config/plan_test.py -k batch
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
[ $# -gt 0 ] || set -- --numprocesses 3 --dist loadfile --no-loadscope-reorder
# Under nohup, or in a script's background, the programs under test would ignore signals.
exec env --default-signal=INT,HUP .venv/bin/python -m pytest "$@"
