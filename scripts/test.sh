#!/usr/bin/env bash
# Set up, then run the tests. Arguments go to pytest: bash scripts/test.sh common/plan_test.py -k batch
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
exec .venv/bin/python -m pytest "$@"
