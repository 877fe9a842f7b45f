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
#
# The pods of a Kubeflow PyTorchJob or TrainJob have torchrun's variables (PET_NNODES, ...), or WORLD_SIZE and RANK, which count
# pods there: the script takes these where NNODES is not set. Elastic jobs, with PET_RDZV_ENDPOINT, are left to torchrun.
set -euo pipefail

fail() {
    echo "error: $1" >&2
    exit 2
}

[ $# -gt 0 ] || fail "train_torchrun.sh needs a training script: bash scripts/train_torchrun.sh SCRIPT ARGUMENT..."
for file in "$1" "$0"; do # a task of the user's own lies elsewhere
    python=$(dirname "$(readlink -f "$file")")/../.venv/bin/python
    [ ! -x "$python" ] || break
done
[ -x "$python" ] || python=python
"$python" -c 'import importlib.util as util; exit(not util.find_spec("torch"))' ||
    fail "$python has no torch: activate the environment that has it, or run scripts/setup.sh"
processes=${NPROC_PER_NODE:-${PET_NPROC_PER_NODE:-auto}}
if [ "$processes" = auto ]; then
    processes=1 # nvidia-smi is not asked: a container with GPUs may lack it
    ! "$python" -c 'import torch; exit(not torch.cuda.is_available())' || processes=gpu
fi

nodes=${NNODES:-${PET_NNODES:-}} rank=${NODE_RANK:-${PET_NODE_RANK:-}} why=
host=${MASTER_ADDR:-${PET_MASTER_ADDR:-}} port=${MASTER_PORT:-${PET_MASTER_PORT:-}}
if [ -z "$nodes" ] && [ -n "${WORLD_SIZE:-}" ] && [ -n "${RANK:-}" ] && [ -z "${LOCAL_RANK:-}" ]; then
    nodes=$WORLD_SIZE rank=$RANK why=", as RANK and WORLD_SIZE say (NNODES=1: train on this node alone)"
fi
nodes=${nodes:-1}
if [ -z "${NNODES:-}" ] && [ -n "${PET_RDZV_ENDPOINT:-}" ]; then
    place=()
elif [ "$nodes" = 1 ] && [ -z "$port" ]; then
    place=(--standalone --nnodes=1 --local_addr=127.0.0.1)
else
    [ "$nodes" = 1 ] || [ -n "$host" ] || fail "NNODES=$nodes needs MASTER_ADDR: the first node's name or address$why"
    [ "$nodes" = 1 ] || [ -n "$rank" ] || fail "NNODES=$nodes needs NODE_RANK: 0 on the first node, 1 on the next"
    rank=${rank:-0} host=${host:-127.0.0.1} port=${port:-29500}
    [ "$rank" != 0 ] || ! (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null ||
        fail "MASTER_PORT=$port is in use on this node: choose another"
    [ "$nodes" = 1 ] || echo "node $rank of $nodes$why; training starts when all have joined at $host:$port" >&2
    place=(--nnodes="$nodes" --node_rank="$rank" --master_addr="$host" --master_port="$port")
fi
exec "$python" -m common.launch.signals --nproc_per_node="$processes" "${place[@]}" "$@"
