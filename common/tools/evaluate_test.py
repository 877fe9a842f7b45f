"""Evaluating a saved model: as in training, and as scikit-learn of timm's predictions."""

import csv
import json
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from PIL import Image, ImageOps
from safetensors.torch import load_file, save_file
from sklearn.metrics import (
    accuracy_score,
    confusion_matrix,
    f1_score,
    log_loss,
    precision_score,
    recall_score,
    top_k_accuracy_score,
)
from torchvision.datasets import ImageFolder

from common.checkpoint.saved_run import SavedRun, open_run
from common.config.plan import DataSummary
from common.engine.groups import shutdown
from common.errors import UserError
from common.metrics.metrics_file import read_metrics
from common.testing.commands import run_forked
from common.testing.ranks import run_ranks
from common.testing.tiny_task import NAMES, SAMPLES, timm_logits, train, write_images
from common.tools import classes, evaluate, export, predict


def read_record(folder: Path) -> dict:
    return json.loads((folder / "evaluation.json").read_text())


def read_rows(folder: Path) -> list[dict[str, str]]:
    """Return the table of the classes."""
    table = (folder / "classes.csv").read_text()
    return list(csv.DictReader(table.splitlines()))


def folder_of(run: Path) -> Path:
    """Return where an evaluation of the last checkpoint is, without other settings."""
    return run / "evaluation" / "step-00000010"


def read(run: Path) -> dict:
    return read_record(folder_of(run))


def evaluate_run(*words: object) -> None:
    evaluate.main([*map(str, words)])


def metrics_of(record: dict) -> dict:
    return {name: record[name] for name in ("loss", "top1", "top5", "samples")}


def of_training(run: Path) -> dict:
    """Return the metrics of the last evaluation in training."""
    last = read_metrics(run)[-1]
    return metrics_of(last)


def pictures_and_labels(data: Path) -> tuple[list[Image.Image], list[int]]:
    pictures = []
    labels = []
    for picture, label in ImageFolder(data / "test"):
        pictures.append(picture)
        labels.append(label)
    return pictures, labels


@pytest.mark.parametrize("mode", ["TORCH", "NAIVE", "APEX"])
def test_equals_the_evaluation_in_training_in_every_precision(data, tmp_path, mode):
    level = ", opt_level='O3'" if mode == "APEX" else ""
    precision = f"fp16=dict(mode=AMP_TYPE.{mode}, dtype='bfloat16'{level})"
    run = train(data, tmp_path / "run", precision, "LEARNING_RATE=5e-4")
    evaluate_run(run)
    record = read(run)
    assert metrics_of(record) == of_training(run)
    assert 1 / 7 < record["top1"] < 1
    evaluate_run(run, "--set=fp16=None", "--output", tmp_path / "float32")
    exact = read_record(tmp_path / "float32")
    assert exact["loss"] != record["loss"]


def test_other_settings_have_results_of_their_own(run, tmp_path, capsys):
    without_evaluations = shutil.ignore_patterns("evaluation")
    copy = shutil.copytree(run, tmp_path / "run", ignore=without_evaluations)
    names = tmp_path / "names.txt"
    names.write_text("\n".join(NAMES))
    long = f"DATA.mean=({0.4:.300f},0.5"  # more than a file's name holds
    commands = [
        [],
        ["--set=DATA.eval_crop=0.5"],
        ["--set=DATA.eval_crop=0.75"],
        [f"--set={long},0.5)"],
        ["--set", f"{long},1.0)"],
        ["--classes", names],
    ]
    for words in commands:
        evaluate_run(copy, *words)
        assert "replaced" not in capsys.readouterr().out
    folders = [path.name for path in (copy / "evaluation").iterdir()]
    assert len(folders) == len(commands)
    assert "step-00000010" in folders
    assert any(name.startswith("step-00000010-DATA.eval_crop=0.5-") for name in folders)
    evaluate_run(copy)
    said = " ".join(capsys.readouterr().out.split())
    assert "reliability.png (earlier ones are replaced) top1=" in said


def test_the_averages_are_evaluated_unless_the_weights_are_asked_for(data, tmp_path):
    run = train(data, tmp_path / "run", "EMA=0.9")
    evaluate_run(run)
    evaluate_run(run, "--raw", "--output", tmp_path / "raw")
    averages = read(run)
    weights = read_record(tmp_path / "raw")
    assert metrics_of(averages) == of_training(run)
    assert averages["loss"] != weights["loss"]
    assert averages["weights"] == open_run(str(run), raw=False).weights
    assert weights["weights"] == open_run(str(run), raw=True).weights
    assert averages["weights"] != weights["weights"]


def test_the_classes_of_the_lowest_recall_are_printed(run, capsys, monkeypatch):
    monkeypatch.setattr(classes, "SHOWN_CLASSES", 2)
    evaluate_run(run)
    said = capsys.readouterr().out
    assert "the 2 of 7 classes with the lowest recall" in said
    recall = {row["class"]: float(row["recall"]) for row in read_rows(folder_of(run))}
    lowest_first = sorted(recall, key=lambda name: (recall[name], name))
    assert recall[lowest_first[0]] < recall[lowest_first[-1]]
    shown = []
    for line in said.splitlines():
        if line.startswith("|"):
            _, _, name, *_ = line.split("|")
            shown.append(name.strip())
    assert shown[2:4] == lowest_first[:2]


def test_equals_it_in_two_processes(run, tmp_path):
    run_ranks(2, evaluate_run, run, "--output", tmp_path, "--set=MICRO_BATCH_SIZE=4")
    found = metrics_of(read_record(tmp_path))
    expected = of_training(run) | {"samples": SAMPLES["test"]}
    assert found == pytest.approx(expected, rel=1e-6)


def test_the_table_is_scikit_learns_of_timms_answers(run, data):
    pictures, labels = pictures_and_labels(data)
    logits = timm_logits(run, pictures)
    answers = logits.argmax(1)
    evaluate_run(run)
    rows = read_rows(folder_of(run))
    assert [row["class"] for row in rows] == list(NAMES)

    samples = np.bincount(labels)
    top5 = np.average([float(row["top5"]) for row in rows], weights=samples)
    expected_top5 = top_k_accuracy_score(labels, logits, k=5)
    assert top5 == pytest.approx(expected_top5, abs=1e-4)
    expected = {
        "samples": samples,
        "recall": recall_score(labels, answers, average=None),
        "precision": precision_score(labels, answers, average=None, zero_division=np.nan),
    }
    for name, values in expected.items():
        found = [float(row[name] or "nan") for row in rows]
        assert found == pytest.approx(values, abs=1e-4, nan_ok=True)

    mistakes = confusion_matrix(labels, answers)
    np.fill_diagonal(mistakes, 0)
    for row, wrong in zip(rows, mistakes, strict=True):
        mistake = f"{NAMES[wrong.argmax()]} ({wrong.max()}x)" if wrong.any() else ""
        assert row["mistaken for"] == mistake


def test_the_picture_is_scikit_learns_confusion_matrix(run, data):
    pictures, labels = pictures_and_labels(data)
    answers = timm_logits(run, pictures).argmax(1)
    with mock.patch.object(classes, "save_figure", wraps=classes.save_figure) as saved:
        evaluate_run(run)
    figure, *_ = saved.call_args.args
    shares = figure.axes[0].images[0].get_array()
    expected = confusion_matrix(labels, answers, normalize="true")
    np.testing.assert_allclose(shares, expected)


def test_means_over_classes_are_scikit_learns_and_in_their_intervals(run, data, capsys):
    pictures, labels = pictures_and_labels(data)
    answers = timm_logits(run, pictures).argmax(1)
    evaluate_run(run)
    said = " ".join(capsys.readouterr().out.split())
    record = read(run)
    expected = {
        "top1": accuracy_score(labels, answers),
        "mean_recall": recall_score(labels, answers, average="macro"),
        "macro_f1": f1_score(labels, answers, average="macro"),
    }
    for name, value in expected.items():
        assert record[name] == pytest.approx(value)
        low, high = record["intervals_95"][name].values()
        assert low <= value <= high
        assert f"| {name} | {value:.4f} | {low:.4f} to {high:.4f} |" in said


def test_a_vit_is_evaluated_at_another_size_as_by_timm(run, data, tmp_path, capsys):
    pictures, labels = pictures_and_labels(data)
    logits = timm_logits(run, pictures, size=24)
    expected = log_loss(labels, logits.double().softmax(1))
    evaluate_run(run, "--set=MODEL.image_size=24", "--output", tmp_path)
    assert "images of 24 pixels, not 16 as in training" in capsys.readouterr().out
    record = read_record(tmp_path)
    assert record["loss"] == pytest.approx(expected, rel=1e-4)
    assert record["loss"] != pytest.approx(of_training(run)["loss"], rel=1e-3)


def test_a_picture_that_is_left_out_is_said(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(evaluate, "DRAWN", 2)
    evaluate_run(run, "--output", tmp_path)
    said = " ".join(capsys.readouterr().out.split())
    assert "classes.csv, no confusion.png (only up to 2 classes), reliability.png" in said
    assert not (tmp_path / "confusion.png").exists()


def test_outputs_that_are_not_finite_are_wrong_answers(run, data, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    file = copy / "checkpoints/step-00000010/model.safetensors"
    weights = load_file(file)
    weights["head.bias"][0] = np.nan
    save_file(weights, file)
    line = "error: 45 of 45 images have no answer, which counts as wrong: "
    ended = run_forked(evaluate.main, [copy], code=2)
    assert ended.stderr.startswith(line)
    record = read(copy)
    assert record["loss"] is None
    assert record["top1"] == 0
    assert record["top5"] == 0
    ended = run_forked(predict.main, [copy, data / "test/red/04.png", "--json"], code=2)
    assert json.loads(ended.stdout)["classes"] is None
    assert "04.png: the model's outputs are not finite (NaN)\n" in ended.stderr


@pytest.mark.parametrize("names", [["n01", "n02"], ["tench", "goldfish"], ["0", "1"]])
def test_imagenets_classes_may_have_synsets_words_or_no_names(names):
    of_training = {
        "class_names": ["n01", "n02"],
        "descriptions": ["tench", "goldfish"],
    }
    config = {
        "DATA": {"root": ""},
        "MODEL": {"num_classes": 2},
    }
    run = SavedRun(Path(), Path(), "", config, {"data": of_training})
    summary = DataSummary(2, 2, 2, "", names)
    outputs, *_ = evaluate.match_labels(run, summary, None)
    assert outputs == [0, 1]


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "timm"
    export.main([str(run), "--to", "timm", "--output", str(folder)])
    return folder


# The model's class names in the order of its outputs; the test folder of each of these classes,
# "-" for none, "/" after the name of an empty one; flags; whether the accuracy is that of the
# images that are there; what is printed.
CASES = """
0 1 10 11 2 3 4      | 0 1 - - 2       |                    | right | 4 of 7 classes: 10, 11, 3, 4
a b c d e f g        | - - c           |                    | right | by name; no images of 6 of 7
a b c d e f g        | a b/ c          |                    | right | 5 of 7 classes: b, d, e, f, g
caf\u00e9 b c d e f g    | cafe\u0301 b         |                    | right | no images of 5 of 7
0 1 2 3 4 10 11      | g f e           | --classes FILE     | right | by name; no images of 4 of 7
a b c d e f g        | 0 1 2           |                    | right | 0 as 'a'; --classes FILE names
                     | a b c d e f g   |                    | right | names no classes
                     | 0 1 2 3 4 10 11 |                    | wrong | timm's is 0, 1, 2, 3, 4 and 2
                     | a B c D e F g   |                    | wrong | timm's is a, B, c, D, e and 2
                     | 0 1 2 3 4 10 11 | --class-order timm | right | labels by name results
                     | 0 1 10 11 2 3 4 | --class-order text | right | labels by name results
                     | g f             | --classes FILE     | right | no images of 5 of 7
                     | a b c           |                    | wrong | none of its 7 classes
a b c d e f g        | a h             |                    | wrong | knows no class h (1 of 2), it
a b c d e f g        | 0 7             |                    | wrong | knows no class 7 (1 of 2), it
a b c d e f g        | a b             | --classes LICENSE  | wrong | names, the model has 7 classes
a b c d e f g        | a b             | --class-order timm | wrong | the model names its classes
"""


def with_class_names(exported: Path, names: list[str], folder: Path) -> Path:
    """Copy the exported model, with other names of its classes."""
    model = shutil.copytree(exported, folder)
    file = model / "config.json"
    hf_config = json.loads(file.read_text())
    hf_config["label_names"] = names
    file.write_text(json.dumps(hf_config))
    return model


@pytest.mark.parametrize("case", CASES.strip().splitlines())
def test_labels_are_matched_by_name(exported, run, data, tmp_path, capsys, case):
    known, folders, flags, is_right, said = map(str.strip, case.split("|"))
    model = with_class_names(exported, known.split(), tmp_path / "model")
    (tmp_path / "FILE").write_text("\ufeffg\nf\ne\nd\nc\nb\na\n")
    images = tmp_path / "images"
    images.mkdir()
    present = []
    for label, name in enumerate(folders.split()):
        if name.endswith("/"):
            (images / name).mkdir()
        elif name != "-":
            (images / name).symlink_to(data / "test" / NAMES[label])
            present.append(label)
    pictures, labels = pictures_and_labels(data)
    answers = timm_logits(run, pictures).argmax(1)
    is_present = np.isin(labels, present)
    is_answer_right = np.equal(labels, answers.numpy())
    top1 = is_answer_right[is_present].mean()
    words = flags.replace("FILE", str(tmp_path / "FILE")).split()
    words += ["--data", images, "--set=DATA.loader=torchvision", "--set=DATA.workers=0"]
    try:
        evaluate_run(model, *words)
    except UserError as error:
        printed = str(error)
    else:
        captured = capsys.readouterr()
        printed = " ".join([*captured.out.split(), *captured.err.split()])
    assert said in printed
    is_top1_printed = f"top1={top1:.4f}" in printed
    assert is_top1_printed == (is_right == "right")
    shutdown()


def test_a_class_named_as_a_formula_is_text_to_a_spreadsheet(exported, data, tmp_path):
    names = ["e=1", "+b", "-c", "@d", "=1+1", "f", "g"]
    model = with_class_names(exported, names, tmp_path / "model")
    images = tmp_path / "images"
    images.mkdir()
    for name, folder in zip(names, NAMES, strict=True):
        (images / name).symlink_to(data / "test" / folder)
    words = ["--data", images, "--set=DATA.loader=torchvision"]
    evaluate_run(model, *words, "--output", tmp_path)
    rows = read_rows(tmp_path)
    written = [row["class"] for row in rows]
    assert written == ["e=1", "'+b", "'-c", "'@d", "'=1+1", "f", "g"]
    mistakes = [row["mistaken for"] for row in rows if row["mistaken for"]]
    assert mistakes == ["'=1+1 (6x)"]


def test_other_data_is_refused_unless_its_labels_mean_the_same(run, data, tmp_path, capsys):
    evaluate_run(run, "--data", data, "--raw")
    pattern = f"step-00000010-raw-{data.name}-??????/evaluation.json"
    assert [*(run / "evaluation").glob(pattern)]

    other = write_images(tmp_path / "other")
    warning = "warning: the data set has changed"
    evaluate_run(run, f"--set=DATA.root={other}")
    assert warning not in capsys.readouterr().out
    (other / "train" / "red" / "04.png").unlink()
    evaluate_run(run, f"--set=DATA.root={other}")
    assert warning in capsys.readouterr().out

    for split in ("train", "test"):
        (other / split / "red").rename(other / split / "orange")
    with pytest.raises(UserError, match="knows no class orange .* or pass its own data set with"):
        evaluate_run(run, "--data", other)
    with pytest.raises(UserError, match="--split test: tiny has one evaluation set; leave it out"):
        evaluate_run(run, "--split", "test")
    shutdown()


def test_two_views_average_the_probabilities_of_an_image_and_its_mirror_image(
    run, data, tmp_path, capsys
):
    pictures, labels = pictures_and_labels(data)
    mirrored = [ImageOps.mirror(picture) for picture in pictures]
    first = timm_logits(run, pictures).double().softmax(1)
    second = timm_logits(run, mirrored).double().softmax(1)
    means = (first + second) / 2
    expected = {
        "loss": log_loss(labels, means),
        "top1": top_k_accuracy_score(labels, means, k=1),
        "top5": top_k_accuracy_score(labels, means, k=5),
        "macro_f1": f1_score(labels, means.argmax(1), average="macro"),
    }
    assert expected["loss"] != pytest.approx(log_loss(labels, first), rel=1e-4)

    run_ranks(2, evaluate_run, run, "--views=2", "--output", tmp_path, "--set=MICRO_BATCH_SIZE=4")
    record = read_record(tmp_path)
    assert metrics_of(record) == pytest.approx(of_training(run), rel=1e-6)
    two_views = record["two_views"]
    found = {name: two_views[name] for name in expected}
    assert found == pytest.approx(expected, rel=1e-4)

    evaluate_run(run, "--views=2")
    said = capsys.readouterr().out
    line = "two views  top1={top1:.4f} top5={top5:.4f} loss={loss:.4f}".format(**two_views)
    assert line in said
    assert [*(run / "evaluation").glob("step-00000010-views=2-??????/evaluation.json")]
    evaluate_run(run)
    assert read(run)["two_views"] == {}
    assert "two views" not in capsys.readouterr().out


def test_the_second_view_of_symmetric_images_changes_nothing(run, data, tmp_path):
    for file in data.glob("*/*/*.png"):
        half = Image.open(file).crop((0, 0, 10, 24))
        picture = Image.new("RGB", (20, 24))
        picture.paste(half)
        picture.paste(ImageOps.mirror(half), (10, 0))
        symmetric = tmp_path / "images" / file.relative_to(data)
        symmetric.parent.mkdir(parents=True, exist_ok=True)
        picture.save(symmetric)
    evaluate_run(run, "--views=2", "--data", tmp_path / "images", "--output", tmp_path)
    record = read_record(tmp_path)
    of_two_views = metrics_of(record["two_views"])
    assert of_two_views == pytest.approx(metrics_of(record), rel=1e-5)
