#!/usr/bin/env bash
# Train under Slurm, with one task per GPU.
#
#   HOST=<node name> srun bash ./scripts/train_slurm.sh [SCRIPT ARGUMENT...]
#   sbatch --nodes 2 --ntasks-per-node 8 --gpus-per-node 8 scripts/train_slurm.sh [SCRIPT ARGUMENT...]
#   sbatch ... scripts/train_slurm.sh imagenet_dali/train_dali.py --config vit-b16 --output /shared/vit-b16
#
# Without arguments: SCRIPT (default: train.py of this folder, else caltech101_amp/train.py) --config CONFIG (default:
# config_AMP_torch). HOST, the host of rank 0, defaults to the first node, and PORT to one derived from the job's number.
# With plain srun, add --kill-on-bad-exit, so that a failing task ends the others.
#
# Each task gets 8 cores for decoding: set sbatch --cpus-per-task N to the node's cores per GPU.
#
# A batch job sends SIGUSR1 to the training two minutes before its time limit: training saves a checkpoint and exits, and
# the job is requeued, as it also is when it is preempted or a node fails. It then resumes from its newest checkpoint.
# Use --signal=B:USR1@SECONDS if two minutes are too short for a step and a checkpoint.
#SBATCH --job-name=train
#SBATCH --cpus-per-task=8
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
set -euo pipefail

[ -n "${SLURM_JOB_ID:-}" ] || {
    echo "error: train_slurm.sh is not in a Slurm job: start it with srun or sbatch" >&2
    exit 2
}
if [ $# = 0 ]; then
    here=train.py
    [ -f "$here" ] || here=caltech101_amp/train.py
    set -- "${SCRIPT:-$here}" --config "${CONFIG:-config_AMP_torch}"
fi
for file in "$1" "$0"; do # a task of the user's own lies elsewhere
    python=$(dirname "$(readlink -f "$file")")/../.venv/bin/python
    [ ! -x "$python" ] || break
done
[ -x "$python" ] || python=python
((${SLURM_STEP_ID:-0xFFFFFFFF} < 0xFFFFFFF0)) || unset HOST # which sbatch inherits: tcsh exports the login node's
# A container lacks scontrol: each task then takes the first node of its step's list.
host=${HOST:-$(scontrol show hostnames "${SLURM_STEP_NODELIST:-$SLURM_JOB_NODELIST}" 2>/dev/null | sed -n 1p)} || host=
port=${PORT:-$((20000 + SLURM_JOB_ID * 8 % 12000 + ${SLURM_STEP_ID:-0} % 8))}
set -- "$python" "$1" ${host:+--host="$host"} --port="$port" "${@:2}" # the user's own --host is the last, which counts

# Job steps are numbered from 0; the shell of sbatch or salloc has no number or a reserved one.
if ((${SLURM_STEP_ID:-0xFFFFFFFF} < 0xFFFFFFF0)); then
    exec "$@"
fi

# srun itself no longer takes this over from sbatch (Slurm 22.05).
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
warned=
srun --kill-on-bad-exit=1 "$@" &
step=$!
trap 'warned=yes; kill -USR1 "$step"' USR1 # srun passes it on to the tasks
status=0
wait "$step" || status=$?
requeue=
while [ "$warned" ]; do # each signal ends a wait
    warned= requeue=yes status=0
    wait "$step" || status=$?
done
[ -z "$requeue" ] || [ "$status" = 0 ] || scontrol requeue "$SLURM_JOB_ID"
exit "$status"
