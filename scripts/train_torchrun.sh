#!/usr/bin/env bash
# Train with torchrun, one process per GPU, or a single process without a GPU.
#
#   bash scripts/train_torchrun.sh imagenet_dali/train_dali.py --config vit-b16      on one node
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 bash scripts/train_torchrun.sh ...        on each of several, here the first
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=node0 bash scripts/train_torchrun.sh ...
#
# MASTER_PORT, a port of MASTER_ADDR, defaults to a free port on one node and to 29500 on several.
# NPROC_PER_NODE sets the number of processes on this node (default: one per GPU).
set -euo pipefail

fail() {
    echo "error: $1" >&2
    exit 2
}

[ $# -gt 0 ] || fail "train_torchrun.sh needs a training script: bash scripts/train_torchrun.sh SCRIPT ARGUMENT..."
python=$(dirname "$(readlink -f "$1")")/../.venv/bin/python
[ -x "$python" ] || python=python
processes=${NPROC_PER_NODE:-1}
[ -n "${NPROC_PER_NODE:-}" ] || ! nvidia-smi --list-gpus >/dev/null 2>&1 ||
    ! "$python" -c 'import torch; exit(not torch.cuda.is_available())' || processes=gpu

nodes=${NNODES:-1} rank=${NODE_RANK:-0} port=${MASTER_PORT:-29500}
if [ "$nodes" = 1 ] && [ -z "${MASTER_PORT:-}" ]; then
    place=(--standalone --local_addr=127.0.0.1)
else
    [ "$nodes" = 1 ] || [ -n "${MASTER_ADDR:-}" ] || fail "NNODES=$nodes needs MASTER_ADDR: the first node's name or address"
    [ "$nodes" = 1 ] || [ -n "${NODE_RANK:-}" ] || fail "NNODES=$nodes needs NODE_RANK: 0 on the first node, 1 on the next"
    [ "$rank" != 0 ] || ! (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null ||
        fail "MASTER_PORT=$port is in use on this node: choose another"
    place=(--nnodes="$nodes" --node_rank="$rank" --master_addr="${MASTER_ADDR:-127.0.0.1}" --master_port="$port")
fi
exec "$python" -m common.launch.signals --nproc_per_node="$processes" "${place[@]}" "$@"
