"""What README.md and docs/ name exists, and README's commands run.

The commands run on CPUs and tiny images, with ``bash scripts/test.sh -m docs scripts/docs_test.py``
only.
"""

import json
import re
import runpy
import shlex
import shutil
import sys
from contextlib import redirect_stdout, suppress
from functools import cache
from importlib import metadata
from io import StringIO
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from safetensors.torch import save_file
from scipy.io import savemat
from timm import create_model

from common.config.load import find_config
from common.config.schema import find_key
from common.files import ROOT
from common.metrics.metrics_file import read_metrics
from common.testing.commands import Ended, in_words, run_forked
from common.testing.photographs import write_photographs
from common.tools import evaluate, export, predict
from imagenet_dali.testing import MODEL, prepare_data, run


def pages(pattern: str) -> list[str]:
    """Return the paths of the files from the root of the project."""
    return sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern))


PAGES = ["README.md", *pages("docs/*.md")]
OTHER_PAGES = ["CONTRIBUTING.md", "CHANGELOG.md", *pages("*/README.md")]
# docs/fine-tune.md and docs/unequal-classes.md have their content
OWN_CONFIGS = ("mine.py", "small.py", "caltech.py", "lite.py")
# Replacements for the data and the hardware that a command of README.md names, in this order.
SUBSTITUTIONS = {
    r"/data/imagenet\b": "data/shards",  # 65 images of three colours
    r"/data/cifar10\b": "data/cifar10",  # 10 classes of photographs
    r"\bIMAGES\b": "data/images",
    r"\bDEST\b": "data/shards2",
    r"\bcat\.jpg\b": "data/images/r/0.jpg",
    r"\bphotographs/": "data/images/g",
    r"torchrun --nproc_per_node \d+": "torchrun --standalone --nproc_per_node 2",
    r"quickstart.sh": "quickstart.sh --set NUM_EPOCHS=1 --set WARMUP_EPOCHS=0",
    # its weights are on the Hub; here those of a new model
    r"MODEL.pretrained=True": "MODEL.image_size=28 --init data/dinov2.safetensors",
}
# Added to every training: a smaller recipe, two steps.
TINY = {
    "TOTAL_BATCH_SIZE": 16,
    "MICRO_BATCH_SIZE": None,
    "gradient_accumulation": 2,
    "NUM_EPOCHS": 60,
    "WARMUP_EPOCHS": 1,
    "MAX_STEPS": 2,
    "DATA.workers": 1,
    "LOG.tensorboard": False,
}
for key, value in MODEL.items():
    if key != "num_classes":
        TINY[f"MODEL.{key}"] = value
TRAINING = r"train_dali\.py (?!.*(--dry-run|--find-lr|--find-batch|--profile|--init))"
# run by launchers_test.py and .ci/run, or by hand
ELSEWHERE = r"sbatch |mpirun |bash scripts/test.sh|(uv )?pip install"


def commands(page: str) -> list[str]:
    """Return the shell commands of the page, each in one line with what it exports put in."""
    text = (ROOT / page).read_text()
    blocks = re.findall(r"^```shell\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    exported: dict[str, str] = {}

    def value_of(variable: re.Match) -> str:
        return exported.get(variable[1], variable[0])

    found = []
    for line in lines:
        without_comment = re.sub(r"(^|\s+)# .*$", "", line)
        command = " ".join(without_comment.split())
        export = re.fullmatch(r'export (\w+)="(.*)"', command)
        if export:
            exported[export[1]] = export[2]
        if command:
            found.append(re.sub(r"\$(\w+)", value_of, command))
    return found


@cache
def help_of(program: str) -> str:
    """Return what a script, given by its path, or a module prints with --help."""
    file = program if program.endswith(".py") else f"{program.replace('.', '/')}.py"
    with (
        redirect_stdout(StringIO()) as printed,
        suppress(SystemExit),
        mock.patch("signal.signal"),  # scripts/prepare.py calls it
        mock.patch.object(sys, "argv", [file, "--help"]),
    ):
        runpy.run_path(file, run_name="__main__")
    return printed.getvalue()


@pytest.mark.parametrize("page", PAGES)
def test_what_it_names_exists(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = (ROOT / page).read_text()
    for command in commands(page):
        found = re.search(r"(?:\bpython -m |^| )((?<=-m )[\w.]+|\S+\.py) (.*)", command)
        if not found or found[1] in ("pip", "pytest", "gpu", "timeit"):
            continue
        assert "usage: " in help_of(found[1])
        quote = "'" if "bash -c '" in command else ""  # ends the command that bash runs
        flags = shlex.split(found[2].removesuffix(quote))
        for flag, value in zip(flags, [*flags[1:], ""], strict=True):
            name, _, joined = flag.partition("=")
            if name.startswith("--"):
                assert re.search(rf"{name}\b", help_of(found[1])), f"{command}: {name}"
            if name in ("--set", "--grid") and not value.startswith("CONFIG="):
                find_key(value.partition("=")[0])
            if name == "--config" and (joined or value) not in OWN_CONFIGS:
                find_config(joined or value, "vit_s16_vanilla")
    for key in re.findall(r"`((?:DATA|MODEL|LOG|OPTIMIZER|zero)\.\w+)", text):
        find_key(key)
    rooms = "common|imagenet_dali|caltech101_amp|cifar10_benchmark"
    paths = re.findall(rf"\b(?:{rooms})/[\w/]+\.(?:py|sh)\b", text)
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert missing == []


def anchors(page: Path) -> set[str]:
    """Return the anchors that a Markdown viewer gives the page's headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        words = re.sub(r"[^\w -]", "", heading).lower()
        found.add(words.replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES])
def test_its_links_lead_to_files_and_headings(page):
    path = ROOT / page
    wrong = []
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", path.read_text()):
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert wrong == []


def test_the_pages_that_messages_and_docstrings_name_exist():
    files = []
    for folder in ("common", "configs", "scripts", "imagenet_dali", "cifar10_benchmark"):
        files += sorted((ROOT / folder).rglob("*.py"))
    missing = []
    for file in files:
        if file.name.endswith("_test.py"):  # tests make pages of their own
            continue
        for page in re.findall(r"docs/[\w-]+\.md", file.read_text()):
            if not (ROOT / page).exists():
                missing.append((file.name, page))
    assert missing == []


def library_examples() -> list[str]:
    """Return the programs of docs/library.md."""
    text = (ROOT / "docs" / "library.md").read_text()
    return re.findall("```python\n(.*?)```", text, re.DOTALL)


def test_the_librarys_example_trains_resumes_and_its_metric_chooses_the_best(tmp_path, monkeypatch):
    text = (ROOT / "docs" / "library.md").read_text()
    # A score may be any number.
    code = library_examples()[1].replace(".item()}", ".item() - 9}")
    (tmp_path / "own.py").write_text(code)
    command = re.search("`python (own.py .*)`", text)[1]
    monkeypatch.chdir(tmp_path)

    def start(epochs: int, code: int = 0) -> Ended:
        settings = f"--set WARMUP_EPOCHS=0 --set NUM_EPOCHS={epochs} --output run"
        monkeypatch.setattr(sys, "argv", shlex.split(f"{command} {settings}"))
        return run_forked(lambda _: runpy.run_path("own.py", run_name="__main__"), code=code)

    assert "top1=" in start(1).words
    assert "resuming from" in start(2).words
    assert "this run is finished" in start(2).words
    (tmp_path / "own.py").write_text(code.replace("def state_dict", "def state"))
    refused = start(3, code=2)
    assert (
        "error: the training loader has no state_dict and load_state_dict, which a checkpoint "
        in refused.stderr
    )
    evaluations = [line for line in read_metrics(tmp_path / "run") if line["kind"] == "eval"]
    best_score = max(line["score"] for line in evaluations)
    best_top1 = max(line["top1"] for line in evaluations)
    assert best_score < best_top1  # so that the best shows which one chose
    state = (tmp_path / "run" / "checkpoints" / "best" / "trainer.json").read_text()
    assert json.loads(state)["best_top1"] == best_score


FLOWERS = 102


def write_flowers(folder: Path) -> Path:
    """Write two images a class for training, and one for evaluation, as Flowers-102 has them."""
    numbers = np.arange(1, 3 * FLOWERS + 1)
    write_photographs(folder, ["jpg"], count=len(numbers) + 1, width=16, height=16)
    labels = (numbers - 1) % FLOWERS + 1
    numbers_of_split = {
        "trnid": numbers[: 2 * FLOWERS],
        "valid": numbers[2 * FLOWERS :],
    }
    savemat(folder / "imagelabels.mat", {"labels": labels})
    savemat(folder / "setid.mat", numbers_of_split)
    return folder


def test_the_librarys_task_trains_and_the_tools_take_it(tmp_path, monkeypatch):
    (tmp_path / "flowers.py").write_text(library_examples()[0])
    data = write_flowers(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    settings = [
        f"DATA.root={data}",
        "MODEL=dict(image_size=16, patch_size=8, width=32, depth=1, heads=2)",
        "TOTAL_BATCH_SIZE=51",
        "MAX_STEPS=4",
        "DATA.workers=0",
        "LOG.tensorboard=False",
    ]
    words = ["flowers.py", "--config=vit-b16", "--output=run"]
    monkeypatch.setattr(sys, "argv", [*words, *in_words(*settings)])
    ended = run_forked(lambda _: runpy.run_path("flowers.py", run_name="__main__"))
    assert "204 training and 102 evaluation images, 102 classes" in ended.words

    own = ["run", "--task=flowers.py"]
    assert "102 images" in run_forked(evaluate.main, own).words
    assert "flower " in run_forked(predict.main, [*own, "data/jpg/image_00001.jpg"]).words
    run_forked(export.main, [*own, "--to=timm", "--output=exported"])
    exported = json.loads(Path("exported/config.json").read_text())
    assert exported["num_classes"] == FLOWERS
    refused = run_forked(evaluate.main, ["run"], 2).stderr
    assert "task='flowers' is none of imagenet_dali, " in refused
    assert "add --task FILE, the script that trained it" in refused


@pytest.mark.docs
def test_uv_resolves_the_readmes_line_to_the_pinned_versions(tmp_path):
    (line,) = [line for line in commands("README.md") if line.startswith("uv pip install")]
    run(f"python -m venv --without-pip {tmp_path}", ROOT)
    resolved = run(f"{sys.prefix}/bin/{line} --dry-run", ROOT, VIRTUAL_ENV=str(tmp_path))
    for name in ("torch", "timm", "colossalai"):
        version, _, _ = metadata.version(name).partition("+")
        assert f" + {name}=={version}\n" in resolved.stderr


def tiny_settings(command: str) -> str:
    """Return the words that make a training command small."""
    unset: tuple[str, ...] = ()
    if "MODEL." in command:
        unset = ("MODEL.",)  # those of a plain ViT
    if "cifar10" in command:
        unset = ("MODEL.", "DATA.")  # CIFAR-10 is in memory, without workers
    settings = []
    for key, value in TINY.items():
        if not key.startswith(unset):
            settings.append(f"--set {key}={value}")
    return " ".join(settings)


@pytest.mark.docs
@pytest.mark.timeout(1800)
def test_the_commands_of_the_readme_run(tmp_path):
    """As a user without root and git, with a read-only home, in a path with a space."""
    folder = tmp_path / "a clone"
    home = tmp_path / "home"
    programs = tmp_path / "bin"
    folder.mkdir()
    home.mkdir(mode=0o555)
    programs.mkdir()
    for program in Path("/usr/bin").iterdir():
        if not program.name.startswith("git"):
            (programs / program.name).symlink_to(program)
    listed = "git ls-files -co --exclude-standard -z"
    run(f"{listed} | tar --null --ignore-failed-read -cT - | tar -xC '{folder}'", ROOT)
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "scripts" / "setup.sh").write_text("exit 0\n")
    prepare_data(folder / "data")
    for split in ("train", "test"):
        cifar10 = folder / "data" / "cifar10" / split
        write_photographs(cifar10, "abcdefghij", count=40, width=32, height=32)
    dinov2 = create_model("vit_small_patch14_dinov2", img_size=28)
    save_file(dinov2.state_dict(), folder / "data" / "dinov2.safetensors")
    environ = dict(
        PATH=f"{sys.prefix}/bin:{programs}",
        HOME=str(home),
        LANG="C",
        PYTHONPATH=str(folder),
    )
    for command in commands("README.md"):
        if re.match(ELSEWHERE, command):
            continue
        if re.search(TRAINING, command):  # from its start
            shutil.rmtree(folder / "outputs" / "vit-b16", ignore_errors=True)
        if re.search(r"train(_dali)?\.py", command) and "--dry-run" not in command:
            command += f" {tiny_settings(command)}"
        for pattern, replacement in SUBSTITUTIONS.items():
            command = re.sub(pattern, replacement, command)
        words = f"unshare --user --map-user=1000 bash -c {shlex.quote(command)}"
        run(words, folder, **environ)
