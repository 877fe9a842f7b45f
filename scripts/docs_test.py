"""Every command of README.md and docs/ runs, on CPUs and tiny images, here or in the test that `ELSEWHERE` names.

Not run by default: ``bash scripts/test.sh -m docs -s scripts/docs_test.py`` prints what was run.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.testing.commands import copy_working_tree
from imagenet_dali.testing import LAUNCHERS, MODEL, prepare_data

pytestmark = [pytest.mark.docs, pytest.mark.timeout(900)]  # a page is one test

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")])

# Replacements for the data and the hardware that a command names, in this order.
SUBSTITUTIONS = {
    r"/data/imagenet\b": "data/shards",  # 65 images of three colours
    r"/data/caltech101/101_ObjectCategories\b": "data/images",
    r"/data/caltech\b": "data/caltech",
    r"\bIMAGES\b": "data/images",
    r"\bDEST\b": "data/shards",
    r"\bFOLDER\b": "data/folder",
    r"TOTAL_BATCH_SIZE = 512": "TOTAL_BATCH_SIZE = 16",
    r"\bcat\.jpg\b": "data/images/r/0.jpg",
    r"\bphotographs/": "data/images/g",
    r"\boutputs/lr\b": "outputs",  # holds a run, as a sweep's folder does
    r"\bRUN\b": "outputs/vit-b16",  # trained for two steps before the commands
    r"torchrun --nproc_per_node \d+": "torchrun --standalone --nproc_per_node 2",
    r"\b1000\)": "1000, img_size=16, patch_size=8, embed_dim=32, depth=2, num_heads=2, mlp_ratio=2)",
}
# Added to every training: a smaller recipe, two steps.
TINY = {
    "TOTAL_BATCH_SIZE": 16,
    "MICRO_BATCH_SIZE": None,
    "gradient_accumulation": 1,
    "NUM_EPOCHS": 4,
    "WARMUP_EPOCHS": 1,
    "MAX_STEPS": 2,
    "DATA.workers": 1,
    "LOG.tensorboard": False,
} | {f"MODEL.{key}": value for key, value in MODEL.items() if key != "num_classes"}
TRAINING = r"imagenet_dali/train(_dali)?\.py (?!.*--dry-run(?!.*DATA))"  # a dry run that counts data is one too
NARROW = r"--dry-run|scripts/(report|evaluate|predict)\.py (?!.*--json)"  # fits a terminal of 80 columns, besides paths
QUICKSTART = " --set NUM_EPOCHS=1 --set WARMUP_EPOCHS=0"  # of 11 steps
# By the beginning of the command: the test that runs it, or an equivalent.
ELSEWHERE = {
    r"sbatch ": "scripts/launchers_test.py::test_sbatch",
    r"srun python ": "scripts/launchers_test.py::test_srun_of_the_training_script",
    r"srun .* python ": "scripts/launchers_test.py::test_srun_of_the_training_script",
    r"HOST=node0 srun bash ": "scripts/launchers_test.py::test_srun_of_the_slurm_script",
    r"scancel --signal=TERM ": "scripts/launchers_test.py::test_a_job_that_is_stopped_saves_and_ends",
    r"mpirun ": "scripts/launchers_test.py::test_mpirun",
    r"NNODES=2 ": "scripts/launchers_test.py::test_torchrun_on_two_hosts",
    r"torchrun --nproc_per_node 2 cifar10_benchmark/train.py ": (
        "cifar10_benchmark/train_test.py::test_two_processes_train_as_one_does"
    ),
    r"python -m common.colossal.tensor_parallel.parity_test": (
        "common/colossal/tensor_parallel/parity_test.py::test_equals_one_process"
    ),
    r"python -m imagenet_dali.prepare .*s3://": "imagenet_dali/remote_test.py::test_preparation_is_resumed",
    r"moto_server |curl -X PUT |export AWS_": "imagenet_dali/remote_test.py::test_preparation_is_resumed",
    r"torchrun .*=s3://": "imagenet_dali/remote_test.py::test_training_and_evaluation",
    r"python scripts/sweep.py ": "common/tools/sweep_test.py::test_parallel_modes_are_compared",
    r"from configs\.|parallel = |from colossalai\.amp": "common/config/load_test.py::test_every_config_snippet_loads",
    r"from common import colossal": "scripts/launchers_test.py::test_srun_of_a_script_of_ones_own",
    r"bash scripts/test.sh": ".ci/run",
    r"\.venv/bin/python -m pytest ": "imagenet_dali/large_step_test.py",
    r"(\.venv/bin/)?python -m pip install ": "scripts/setup.sh",  # the same installer, from requirements.txt
}
RUN = r"((\w+=\S+ )*(python|\.venv/bin/python|torchrun|bash) |export \w+=|source )"


def commands(page: str) -> list[tuple[str, str]]:
    """Return (language, command) of the code blocks: each shell command, and each Python block as a whole."""
    found = []
    for language, block in re.findall(r"^```(?!mermaid)(\w+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        if language == "python":
            found.append((language, block))
        else:
            lines = (re.sub(r"(^|\s+)# .*$", "", line) for line in block.replace("\\\n", " ").splitlines())
            found += [(language, " ".join(line.split())) for line in lines if line.strip()]
    return found


def elsewhere(command: str) -> str | None:
    """Return the other test that runs ``command``, if there is one."""
    return next((test for beginning, test in ELSEWHERE.items() if re.match(beginning, command)), None)


def substitute(command: str) -> str:
    """Return the command that is run instead."""
    for pattern, replacement in SUBSTITUTIONS.items():
        command = re.sub(pattern, replacement, command)
    if re.search(TRAINING, command):
        command += "".join(f" --set {key}={value}" for key, value in TINY.items())
    return command + QUICKSTART if command == "bash scripts/quickstart.sh" else command


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A copy of the working tree with tiny data and a finished run of vit-b16."""
    folder = copy_working_tree(ROOT, tmp_path_factory.mktemp("clone"))
    data = folder / "data"
    data.mkdir()
    prepare_data(data)
    for split in ("train", "val"):
        shutil.copytree(data / "images", data / "folder" / split)
    run("DATA=/data/imagenet python imagenet_dali/train_dali.py --config vit-b16", folder)
    return folder


def output_of(training: str) -> str:
    """Return the output folder of a training command."""
    output = re.search(r"--output (\S+)", training)
    return output[1] if output else "outputs/" + Path(re.search(r"--config[= ](\S+)", training)[1]).stem


def run(command: str, folder: Path, language: str = "shell") -> None:
    """Run a command as a user would, in the clone; it must succeed. A training starts from scratch."""
    actual = substitute(command)
    if re.search(TRAINING, command) and not re.search("--find-lr|--profile", command):
        shutil.rmtree(folder / output_of(command), ignore_errors=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS) and name != "DATA"}
    kept |= {
        "PATH": f"{sys.prefix}/bin:{kept['PATH']}",
        "PYTHONPATH": str(folder),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "80",
    }
    words = [sys.executable, "-c", actual] if language == "python" else ["bash", "-c", actual]
    answer = subprocess.run(words, cwd=folder, env=kept, capture_output=True, text=True, timeout=300, check=False)
    assert answer.returncode == 0, f"{command}\nrun as {actual}\n{answer.stdout[-3000:]}\n{answer.stderr[-3000:]}"
    assert "Traceback" not in answer.stderr, answer.stderr
    wide = [line for line in answer.stdout.splitlines() if len(line) > 80 and str(folder) not in line]
    assert not (wide and re.search(NARROW, command)), f"{command} prints more than 80 columns: {wide}"


@pytest.mark.parametrize("name", PAGES)
def test_every_command(name, clone):
    for language, command in commands((ROOT / name).read_text()):
        shown = command.partition("\n")[0]
        if file := re.match(r"# (\w+\.py)\n", command):  # which the commands after it read
            (clone / file[1]).write_text(substitute(command))
            continue
        if test := elsewhere(command):
            print(f"{name}: {shown}\n    run by {test}")
            continue
        assert language == "python" or re.match(RUN, command), f"{name}: no way is known to run {command!r}"
        started = time.monotonic()
        run(command, clone, language)
        print(f"{name}: {shown}\n    run in {time.monotonic() - started:.1f} s")


def test_the_other_tests_exist():
    for where in ELSEWHERE.values():
        path, _, test = where.partition("::")
        assert (ROOT / path).exists(), where
        assert not test or f"\ndef {test}(" in (ROOT / path).read_text(), where


def test_finds_commands_and_knows_what_it_does_not_know():
    page = "```shell\na \\\n    b   # why\n\n# only words\nX=1 d\n```\n```\noutput\n```\n```python\nx = 1  # y\n```\n"
    assert commands(page) == [("shell", "a b"), ("shell", "X=1 d"), ("python", "x = 1  # y\n")]
    assert re.match(RUN, "X=1 python a.py")
    assert not re.match(RUN, "docker run python a.py")
    assert elsewhere("docker run python a.py") is None
