"""The environment variables of launchers, and which of a run's processes is the first."""

import os
from typing import NamedTuple


class LauncherVariables(NamedTuple):
    """The environment variables in which a launcher tells a process its rank."""

    rank: str
    local_rank: str
    world_size: str
    host: str = ""  # the address of rank 0
    port: str = ""
    local_size: str = ""  # the processes on this node
    job: str = ""  # a job's own name, from which its port is derived


# Where the variables of several are set, the first of these has started the process.
LAUNCHERS = {
    "torch": LauncherVariables("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "openmpi": LauncherVariables(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_SIZE",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        job="PMIX_NAMESPACE",
    ),
    # mpiexec of MPICH and Intel MPI
    "mpich": LauncherVariables(
        "PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", local_size="MPI_LOCALNRANKS"
    ),
    # mpiexec of HPE Cray
    "pals": LauncherVariables(
        "PMI_RANK", "PMI_LOCAL_RANK", "PMI_SIZE", local_size="PMI_LOCAL_SIZE", job="PALS_APID"
    ),
    # Last: an mpirun or torchrun inside a Slurm job inherits Slurm's variables.
    "slurm": LauncherVariables("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
}


def is_first_process() -> bool:
    """Return whether this process is the first of its run, as far as the environment says.

    A process with an invalid rank counts as first, so that it prints its own error.
    """
    for variables in LAUNCHERS.values():
        rank, size = map(os.environ.get, (variables.rank, variables.world_size))
        if rank and size:
            return not (rank.isdecimal() and size.isdecimal() and 0 < int(rank) < int(size))
    return True
