"""Launch detection, for every command line in the documents of Colossal-AI's examples."""

import argparse
import os
from collections.abc import Mapping
from unittest.mock import Mock

import pytest
import torch

from common.engine.groups import shutdown
from common.errors import RankError, UserError
from common.hardware import rank_cores
from common.launch.detect import Launch, add_launch_arguments, detect_launch, init_distributed
from common.testing.ranks import run_ranks


def variables(text: str) -> dict[str, str]:
    return dict(setting.split("=") for setting in text.split())


TORCHRUN = variables("RANK=3 LOCAL_RANK=1 WORLD_SIZE=4 MASTER_ADDR=node0 MASTER_PORT=29500")
EMPTY = variables("LOCAL_RANK= MASTER_ADDR= MASTER_PORT=")
MPIRUN = variables("""
    OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_SIZE=4
    OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=3231121409
""")
SRUN = variables("""
    SLURM_JOB_ID=77 SLURM_STEP_ID=0 SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NTASKS=4
    SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=gpu[003-004,9],login
""")
MPICH = variables("PMI_RANK=3 MPI_LOCALRANKID=1 PMI_SIZE=4 MPI_LOCALNRANKS=4")
PALS = variables("PMI_RANK=3 PMI_LOCAL_RANK=1 PMI_SIZE=4 PMI_LOCAL_SIZE=2 PALS_APID=7")
RENDEZVOUS = variables("MASTER_ADDR=m MASTER_PORT=5 WORLD_SIZE=4")  # without RANK
SBATCH_SHELL = variables("SLURM_JOB_ID=77 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=4")
BY_TORCHRUN = ("torch", 3, 1, 4, "node0", 29500)
ALONE = ("single", 0, 0, 1, "127.0.0.1", 0)


def detect(line: str, environ: Mapping[str, str]) -> Launch:
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--config")
    add_launch_arguments(parser)
    return detect_launch(parser.parse_args(line.split()), environ)


@pytest.mark.parametrize(
    ("line", "environ", "expected"),
    [
        # srun python train_dali.py --local_rank=$SLURM_PROCID --world_size=$SLURM_NPROCS
        # --host=$HOST --port=29500
        (
            "--local_rank=3 --world_size=4 --host=h --port=29500",
            SRUN | RENDEZVOUS,
            ("slurm", 3, 1, 4, "h", 29500),
        ),
        # the same, expanded by a shell that has none of the variables
        (
            "--rank= --local_rank= --world_size= --host= --port=29500",
            SRUN,
            ("slurm", 3, 1, 4, "gpu003", 29500),
        ),
        ("--local_rank=1 --rank 3", SRUN, ("slurm", 3, 1, 4, "gpu003", 25_873)),
        ("--local_rank=0", SRUN | RENDEZVOUS, ("slurm", 3, 1, 4, "m", 5)),
        # python -m torch.distributed.launch --nproc_per_node 4 train_dali.py --world_size 4
        ("--local-rank=1 --world_size 4 --config c", TORCHRUN, BY_TORCHRUN),
        ("--rank 3 --local_rank=1 --host=node0 --port=29500", TORCHRUN | EMPTY, BY_TORCHRUN),
        # torchrun ... train.py --config=CONFIG_FILE, also inside a Slurm step
        ("--config=c", SRUN | TORCHRUN, BY_TORCHRUN),
        # python train.py --world_size=4 --rank=3 --local_rank=1 --host=node0 --port=29500
        (
            "--world_size=4 --rank=3 --local_rank=1 --host=h --port=9",
            SBATCH_SHELL,
            ("args", 3, 1, 4, "h", 9),
        ),
        (
            "--world-size=4 --rank=3 --host=h --port=9 --backend nccl",
            {},
            ("args", 3, 3, 4, "h", 9, "nccl"),
        ),
        # mpirun, also inside a Slurm step
        ("--host h --port 9", MPIRUN, ("openmpi", 3, 1, 4, "h", 9)),
        (
            "",
            SRUN | MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
            ("openmpi", 3, 1, 4, "127.0.0.1", 22_876),
        ),
        # mpiexec of MPICH or Intel MPI, whose proxy srun may have started; of HPE Cray
        ("", MPICH | SRUN, ("mpich", 3, 1, 4, "127.0.0.1", 20_000)),
        ("--host h", PALS, ("pals", 3, 1, 4, "h", 25_346)),
        ("", SRUN | {"PMI_RANK": "3", "PMI_SIZE": "4"}, ("slurm", 3, 1, 4, "gpu003", 25_873)),
        # python train_dali.py, also in the shell of salloc (a step with a reserved number)
        ("--host=", SBATCH_SHELL | {"SLURM_STEP_ID": "4294967290"}, ALONE),
        ("--world_size=1 --rank=0", TORCHRUN | SRUN, ALONE),
        ("", {"RANK": "", "WORLD_SIZE": "4", "PMI_RANK": "0", "PMI_SIZE": "1"}, ALONE),
    ],
)
def test_command_lines(line, environ, expected):
    assert detect(line, environ) == Launch(*(*expected, "gloo")[:7])


@pytest.mark.parametrize(
    ("line", "environ", "message"),
    [
        ("--world_size 8", TORCHRUN, "--world_size=8 contradicts WORLD_SIZE=4: omit the flag"),
        ("--local_rank=2", SRUN, "--local_rank=2 contradicts SLURM_LOCALID=1"),
        ("--rank 0", MPIRUN, "--rank=0 contradicts OMPI_COMM_WORLD_RANK=3"),
        (
            "--world_size 4 --rank 1",
            {},
            "--host, --port missing: without a launcher, set --rank, --world_size, ",
        ),
        (
            "",
            SRUN | MPIRUN,
            "--host missing: on several nodes mpirun does not set the host of rank 0",
        ),
        (
            "",
            TORCHRUN | {"LOCAL_RANK": ""},
            "LOCAL_RANK not set: set all of RANK, LOCAL_RANK, WORLD_SIZE, ",
        ),
        (
            "",
            MPICH | {"MPI_LOCALRANKID": ""},
            "MPI_LOCALRANKID not set: set all of PMI_RANK, MPI_LOCALRANKID, PMI_SIZE, or none",
        ),
        ("", PALS, "--host missing: on several nodes mpirun"),
        ("", TORCHRUN | {"RANK": "4"}, "rank=4 is out of range: expected 0 to 3"),
        ("", TORCHRUN | {"RANK": "abc"}, "RANK=abc: expected an integer"),
        ("", MPICH | {"MASTER_PORT": "x"}, "MASTER_PORT=x: expected an integer"),
    ],
)
def test_what_is_refused(line, environ, message):
    with pytest.raises(UserError) as refusal:
        detect(line, environ)
    assert str(refusal.value).startswith(message)
    assert isinstance(refusal.value, RankError) == message.startswith(
        ("rank=", "--rank=", "--local_rank=", "RANK=", "MASTER_PORT=")
    )


@pytest.mark.parametrize(
    ("launcher", "gpus", "end"),
    [("torch", 1, RankError), ("slurm", 5, RankError), ("slurm", 1, OSError), ("args", 4, OSError)],
)
def test_a_process_without_a_gpu_of_its_own_is_refused(launcher, gpus, end, monkeypatch):
    """Two processes on one GPU end in NCCL's "Duplicate GPU".

    A launcher may show each process its own GPU only.
    """
    join = Mock(side_effect=OSError)  # of what is not refused
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr("common.launch.detect.join_groups", join)
    with pytest.raises(end):
        init_distributed(Launch(launcher, 5, 5, 8, "localhost", 1, "nccl"), {"SEED": 7})
    if end is OSError:
        options = join.call_args.kwargs
        assert (options["local_rank"], options["seed"]) == (5 % gpus, 7)


def start(environ: dict[str, str]) -> tuple[int, int]:
    """Return this rank's cores and threads, once the ranks have met."""
    torch.set_num_threads(2)
    rank = os.environ["RANK"]
    environ = environ | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NTASKS": "2"}
    init_distributed(detect("", environ), {})
    shutdown()
    return rank_cores(), torch.get_num_threads()


def test_ranks_meet_at_a_name_and_the_derived_port_and_divide_the_cores():
    environ = SRUN | {"SLURM_JOB_ID": str(os.getpid()), "MASTER_ADDR": "localhost"}
    cores = max(1, len(os.sched_getaffinity(0)) // 2)
    for found in run_ranks(2, start, environ):
        assert found == (cores, min(2, cores))
