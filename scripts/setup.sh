#!/usr/bin/env bash
# Create .venv from requirements.txt and install the project into it, editable. Does nothing if neither has changed.
#   PYTHON=python3.12 bash scripts/setup.sh    chooses the interpreter (3.11 to 3.14)
set -euo pipefail
cd "$(dirname "$0")/.."

stamp=.venv/.installed
wanted=$(cat requirements.txt setup.cfg pyproject.toml scripts/setup.sh | cksum)
[ "$(cat "$stamp" 2>/dev/null)" = "$wanted $PWD" ] && exit 0

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null || {
    version=$("$python" --version 2>/dev/null) || version="no Python that runs"
    echo "error: $python is $version: Python 3.11 to 3.14 is needed; choose one with PYTHON=python3.12, for example" >&2
    exit 2
}
echo "setting up .venv (a few minutes and 7 GB the first time) ..."
rm -f "$stamp"
[ -x .venv/bin/pip ] || "$python" -m venv .venv # pip: Debian without python3-venv makes half a .venv
export PIP_DISABLE_PIP_VERSION_CHECK=1
# --no-deps: requirements.txt lists every package, and colossalai 0.5.0 pins obsolete versions.
.venv/bin/python -m pip install --quiet --no-deps --requirement requirements.txt
.venv/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
echo "$wanted $PWD" >"$stamp"
