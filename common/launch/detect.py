"""Detect the launcher (torchrun, srun, mpirun, flags, or none) and initialise the process group."""

import re
import zlib
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from common.engine.collectives import gather
from common.engine.groups import join_groups, shutdown
from common.errors import RankError, UserError
from common.files import Values
from common.hardware import cpu_limits, limit_threads, set_processes
from common.launchers import LAUNCHERS
from common.process import at_end, is_script

LOOPBACK = "127.0.0.1"
MPI = ("openmpi", "mpich", "pals")  # their mpirun, or its daemon, is a rank's parent process
FLAGS = ("rank", "local_rank", "world_size", "host", "port")


@dataclass(frozen=True)
class Launch:
    """How one of ``world_size`` processes was started.

    Rank 0 listens on ``host:port``, which a single process does not need.
    """

    launcher: str
    rank: int
    local_rank: int
    world_size: int
    host: str
    port: int
    backend: str


def add_launch_arguments(parser: ArgumentParser) -> None:
    """Add the launch flags; an empty value, as of an unset shell variable, counts as not given."""
    group = parser.add_argument_group(
        "launch", "needed only without a launcher; otherwise must match its environment"
    )
    add = group.add_argument
    add("--rank", type=integer, help="rank over all nodes")
    add("--local_rank", "--local-rank", type=integer, help="rank on this node; selects the GPU")
    add("--world_size", "--world-size", type=integer, help="number of processes")
    add("--host", help="host of rank 0")
    add("--port", type=integer, help="a free port on that host")
    add("--backend", choices=("nccl", "gloo"), help="default: nccl with GPUs, gloo without")


def integer(text: str) -> int | None:
    """Return the value of a flag; argparse has the function's name in its message."""
    return int(text) if text else None


def detect_launch(args: Namespace, environ: Mapping[str, str]) -> Launch:
    """Return how this process was started, from its flags and environment.

    The innermost launcher applies: torchrun, mpirun, srun (not the shell of sbatch or salloc),
    flags, else a single process. ``--world_size 1`` overrules them. Empty variables count as not
    set. Raises `UserError` for a rank that cannot be, and for a flag that is missing or contradicts
    the launcher.
    """
    # A shell passes a variable that is not set on as an empty one.
    environ = {name: value for name, value in environ.items() if value}
    launcher = _find_launcher(args, environ)
    values: dict[str, Any] = dict(rank=0, local_rank=0, world_size=1, host=LOOPBACK, port=0)
    if launcher in LAUNCHERS:
        values = _from_environment(launcher, args, environ)
    elif launcher == "args":
        values = _from_flags(args)
    if not 0 <= values["rank"] < values["world_size"]:
        raise RankError(
            f"rank={values['rank']} is out of range: expected 0 to {values['world_size'] - 1}"
        )
    return Launch(
        launcher,
        **values,
        backend=args.backend or ("nccl" if torch.cuda.is_available() else "gloo"),
    )


def init_distributed(
    launch: Launch, config: Values, shared: Mapping[str, str] | None = None
) -> None:
    """Join the process group, set device and seed, and put ``config`` into ``gpc.config``.

    The ranks of a host divide its cores. Raises `UserError` if ranks differ in ``shared``.
    """
    gpus = torch.cuda.device_count()
    # Slurm and Open MPI may show each process its own GPU only; flags may be given per machine
    may_be_bound = launch.launcher == "args" or (gpus == 1 and launch.launcher != "torch")
    if launch.backend == "nccl" and launch.local_rank >= gpus and not may_be_bound:
        raise RankError(
            f"process {launch.local_rank} of this node has no GPU, torch finds {gpus}: start "
            "fewer, or --backend gloo"
        )
    join_groups(
        config,
        launch.rank,
        launch.world_size,
        launch.host,
        launch.port,
        launch.backend,
        # A process that sees only its own GPU has it as number 0.
        local_rank=launch.local_rank % gpus if gpus else launch.local_rank,
        seed=config.get("SEED", 1024),
        verbose=False,
        timeout=config.get("TIMEOUT"),
        shared=shared,
    )
    # The groups of a script that fails may never end: its process does.
    if not is_script():
        at_end(shutdown)
    set_processes(gather(cpu_limits()))
    limit_threads()


def _find_launcher(args: Namespace, environ: Mapping[str, str]) -> str:
    """Return the innermost launcher: a key of LAUNCHERS, "args" or "single"."""
    # The user overrules variables that may be left over.
    if args.world_size == 1:
        return "single"
    launchers = dict(LAUNCHERS)
    step = environ.get("SLURM_STEP_ID", "")
    # In the shell of sbatch or salloc, Slurm's variables describe no rank.
    if not step.isdigit() or int(step) >= 0xFFFFFFF0:
        del launchers["slurm"]
    for name, variables in launchers.items():
        # The first three are rank, local rank and number of processes.
        if all(variable in environ for variable in variables[:3]):
            return name
    # An incomplete set of variables: `_from_environment` says what is missing.
    for name, variables in launchers.items():
        if variables.rank in environ and environ.get(variables.world_size, "1") != "1":
            return name
    return "single" if all(getattr(args, flag) in (None, "") for flag in FLAGS) else "args"


def _from_environment(launcher: str, args: Namespace, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of FLAGS from the variables of ``launcher``, which flags must match."""
    # Only torchrun sets a host and a port: others have no name for these.
    names = {flag: name for flag in FLAGS if (name := getattr(LAUNCHERS[launcher], flag))}
    given = {flag: getattr(args, flag) for flag in names}
    # A flag stands in for a variable that is not set.
    from_flags = {names[flag]: str(value) for flag, value in given.items() if value is not None}
    environ = from_flags | dict(environ)
    missing = [name for name in names.values() if not environ.get(name)]
    if missing:
        remedy = f"set all of {', '.join(names.values())}, or none"
        if launcher == "torch":
            remedy += "; in Kubeflow's pods, start scripts/train_torchrun.sh"
        raise UserError(f"{', '.join(missing)} not set: {remedy}")
    values = {
        flag: environ[name] if flag == "host" else _integer(name, environ)
        for flag, name in names.items()
    }
    for flag, name in names.items():
        # scripts pass --local_rank=$SLURM_PROCID: the task's rank, or 0 from sbatch's shell
        also = (values["rank"], 0) if name == "SLURM_LOCALID" else ()
        if given[flag] not in (None, "", values[flag], *also):
            mistake = RankError if flag in ("rank", "local_rank") else UserError
            raise mistake(
                f"--{flag}={given[flag]} contradicts {name}={environ[name]}: omit the flag"
            )
    if launcher != "torch":
        values |= _rendezvous(launcher, args, environ)
    return values


def _integer(name: str, environ: Mapping[str, str]) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise RankError(f"{name}={environ[name]}: expected an integer, or unset {name}") from None


def _from_flags(args: Namespace) -> dict[str, Any]:
    """Return the values of FLAGS for a process that no launcher has started."""
    values = {flag: getattr(args, flag) for flag in FLAGS}
    if values["local_rank"] is None:
        # on one machine they are the same
        values["local_rank"] = values["rank"]
    missing = [
        f"--{flag}"
        for flag, value in values.items()
        if value in (None, "") and flag != "local_rank"
    ]
    if missing:
        raise UserError(
            f"{', '.join(missing)} missing: without a launcher, set --rank, --world_size, --host "
            "and --port"
        )
    return values


def _rendezvous(launcher: str, args: Namespace, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return host and port of rank 0.

    As given, else the first node of the step and a port that all processes derive from the job's
    number.
    """
    if launcher == "slurm":
        is_one_node = environ.get("SLURM_STEP_NUM_NODES") == "1"
        job = f"{environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}"
        nodes = environ.get("SLURM_STEP_NODELIST", "")
        # the first of gpu[003-007,9],login is gpu003
        first = re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodes).partition(",")[0]
    else:
        variables = LAUNCHERS[launcher]
        is_one_node = environ.get(variables.local_size) == environ[variables.world_size]
        job = environ.get(variables.job, "")
        first = ""
    host = args.host or environ.get("MASTER_ADDR") or (LOOPBACK if is_one_node else first)
    if not host:
        raise UserError("--host missing: on several nodes mpirun does not set the host of rank 0")
    # Not `hash`, whose value differs between processes.
    derived = 20_000 + zlib.crc32(job.encode()) % 12_000  # below the ephemeral ports
    port = _integer("MASTER_PORT", environ) if "MASTER_PORT" in environ else derived
    return {"host": host, "port": args.port or port}
