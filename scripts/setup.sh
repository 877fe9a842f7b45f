#!/usr/bin/env bash
# Create .venv from the pinned requirements and install the project into it, editable. Does nothing if neither has changed.
# uv installs, in a third of pip's time. Where uv cannot be had, or fails, pip installs the same packages.
#   PYTHON=python3.12 bash scripts/setup.sh    chooses the interpreter (3.11.4 or later)
#   TORCH_INDEX=https://download.pytorch.org/whl/cpu bash scripts/setup.sh
#                                              takes torch from there, and leaves out CUDA's libraries (not run)
set -euo pipefail
cd "$(dirname "$0")/.."

[ -z "${PYTHON:-}" ] || [ ! -x .venv/bin/python ] || [ "$("$PYTHON" --version)" = "$(.venv/bin/python --version)" ] || {
    echo "error: PYTHON=$PYTHON: .venv is there, with $(.venv/bin/python --version); remove it first, or unset PYTHON" >&2
    exit 2
}
stamp=.venv/.installed
wanted="$(cat requirements.txt requirements-colossalai.txt setup.cfg pyproject.toml scripts/setup.sh | cksum)"
[[ "$(cat "$stamp" 2>/dev/null)" = "$wanted "${TORCH_INDEX:-*}" $PWD" ]] && exit 0 # unset: what is installed stays

phase() { # prints a name, runs the command after it, prints its seconds
    local started=$SECONDS
    echo -n "  $1 ... "
    "${@:2}" || return
    echo "$((SECONDS - started)) s"
}

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11, 4))' 2>/dev/null || {
    version=$("$python" --version 2>/dev/null) || version="no Python that runs"
    echo "error: $python is $version: Python 3.11.4 or later is needed; choose one with PYTHON=python3.12, for example" >&2
    exit 2
}
echo "setting up .venv (one to three minutes and 7 GB the first time) ..."
[ -n "${TORCH_INDEX:-}" ] || compgen -G "/dev/nvidia[0-9]*" >/dev/null || [ -e /dev/dxg ] ||
    echo "  no NVIDIA device: TORCH_INDEX=https://download.pytorch.org/whl/cpu saves 5 GB, see README.md"
rm -f "$stamp"
export PIP_DISABLE_PIP_VERSION_CHECK=1
# pip: Debian without python3-venv makes half a .venv
[ -x .venv/bin/pip ] || phase "virtual environment" "$python" -m venv .venv
by_pip=(.venv/bin/python -m pip install --quiet --no-deps) # requirements.txt lists every package
by_uv=(.venv/bin/python -m uv pip install --quiet --no-config --no-deps --python .venv/bin/python)
phase "uv" "${by_pip[@]}" uv==0.13.9 2>/dev/null || { echo "not to be had" && by_uv=(false); }
install() { "${by_uv[@]}" "$@" || { echo -n "by pip ... " && "${by_pip[@]}" "$@"; }; }

listed=requirements.txt
if [ -n "${TORCH_INDEX:-}" ]; then
    listed=.venv/requirements.txt # of NVIDIA's packages, DALI needs these two
    awk '!/^(nvidia|cuda-|triton|torch)/ || /nvidia-(dali|nvimgcodec)/' requirements.txt >"$listed"
    mapfile -t torch < <(grep -E '^torch(vision)?==' requirements.txt)
    phase "torch" install --index-url "$TORCH_INDEX" "${torch[@]}"
fi
phase "packages" install --requirement "$listed" --requirement requirements-colossalai.txt
phase "this project" install --no-build-isolation --editable .
echo "$wanted ${TORCH_INDEX:-} $PWD" >"$stamp"
