#!/usr/bin/env bash
# Set up, then run the tests in three processes, because many wait. Arguments replace that and go to pytest:
#   bash scripts/test.sh common/config/batch_plan_test.py -k batch
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
[ $# -gt 0 ] || set -- --numprocesses 3 --dist loadfile
# Below nohup, or in the background of a script, the tests' own programs would ignore the signals that they are sent.
exec env --default-signal=INT,HUP .venv/bin/python -m pytest "$@"
