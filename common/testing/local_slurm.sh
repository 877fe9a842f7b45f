#!/usr/bin/env bash
# A real Slurm on this machine, one node with two CPUs, until standard input ends: local_slurm.sh CONTROLLER_PORT NODE_PORT
#
# Prints the path of its slurm.conf, for SLURM_CONF, once the node is idle. Needs root and Debian's packages slurm-wlm and
# munge. Uses a temporary folder; leaves no process behind.
set -euo pipefail

wait_until() { # ten times a second, for a minute
    for _ in {1..600}; do
        ! "$@" || return 0
        sleep 0.1
    done
    return 1
}
is_idle() { [ "$(sinfo --noheader --format=%T --partition=main 2>&1)" = idle ]; }
is_empty() { [ -z "$(squeue --noheader)" ]; }

folder=$(mktemp --directory /tmp/slurm.XXXXXX)
export SLURM_CONF=$folder/slurm.conf
finish() {
    scancel --user=root || true
    wait_until is_empty || true
    mapfile -t daemons < <(jobs -p)
    [ "${#daemons[@]}" = 0 ] || kill "${daemons[@]}" || true
    wait
    rm -rf "$folder"
}
trap finish EXIT

chmod 755 "$folder" # munged requires a socket folder that others can enter
mkdir "$folder/state" "$folder/spool"
(umask 077 && head -c 128 /dev/urandom >"$folder/munge.key")
cat >"$SLURM_CONF" <<END
ClusterName=local
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=$1
SlurmdPort=$2
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0
KillWait=5
NodeName=localhost NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=localhost Default=YES State=UP PriorityTier=1
PartitionName=urgent Nodes=localhost State=UP PriorityTier=2
END
files=()
for name in key pid log seed; do
    files+=("--$name-file=$folder/munge.$name")
done
munged --foreground --socket="$folder/munge.socket" "${files[@]}" >"$folder/munged.out" 2>&1 &
wait_until test -S "$folder/munge.socket"
slurmctld -D -c >"$folder/slurmctld.out" 2>&1 &
slurmd -D -N localhost >"$folder/slurmd.out" 2>&1 &
wait_until is_idle
echo "$SLURM_CONF"
cat >/dev/null
