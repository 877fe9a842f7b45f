"""Evaluate a saved model: top-1, top-5, loss, a table of all classes, and the confusion matrix.

python scripts/evaluate.py outputs/vit-b16
torchrun --nproc_per_node 8 scripts/evaluate.py outputs/vit-b16/checkpoints/step-00011700 \
    --data /data/imagenet
python scripts/evaluate.py vit_small_patch16_224.augreg_in21k_ft_in1k --data /data/imagenet
"""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from common.checkpoint.classes import ORDER_HELP, ORDERS, match_classes, order_classes
from common.checkpoint.content import list_changes
from common.checkpoint.saved_run import SavedRun, build_parser
from common.checkpoint.weights import OTHERS, open_model
from common.colossal import ParallelMode, Predictor, all_reduce, naming_lost_ranks, shutdown
from common.config.plan import DataSummary
from common.data.image_folder import SPLITS, note_missing
from common.errors import UserError, format_table, list_some, print_wrapped
from common.files import own_file, short_path, write_csv
from common.hardware import describe_run
from common.launch.detect import add_launch_arguments, detect_launch, gather, start
from common.metrics.hook import best_classes, count_correct
from common.metrics.metrics_file import finite
from common.plot import build_figure, save_figure
from common.task import data_root, find_task

AT_EACH_END = 5  # classes of the table for the terminal
NAMED_CLASSES = 50  # classes up to which the picture names them
DRAWN = 2000  # classes up to which there is a picture


def main(argv: list[str]) -> None:
    parser = build_parser(__doc__, OTHERS)
    parser.add_argument("--data", metavar="DIR", help="the data set (default: the run's)")
    of_data = "of the data set (default: validation; of a folder of images without splits, all)"
    parser.add_argument("--class-order", choices=ORDERS, help=ORDER_HELP)
    parser.add_argument("--split", choices=sorted({*SPLITS.values()}), help=of_data)
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="default: evaluation/<checkpoint>[-raw][-<data>], in the run",
    )
    add_launch_arguments(parser)
    args = parser.parse_args(argv)
    launch = detect_launch(args, os.environ)
    run = open_model(
        args.run, args.set + [f"DATA.root={args.data}"] * bool(args.data), raw=args.raw
    )
    run.name_classes(args.classes)
    data = run.config["DATA"]
    task = find_task(run.about["task"])
    data["root"] = data_root(run.config, task.download)
    if args.split and not task.has_splits:
        raise UserError(f"--split {args.split}: {task.name} has one evaluation set; leave it out")
    if (args.data or args.split) and task.has_splits:
        data["eval_split"] = args.split or "validation"
    summary = task.describe(data)
    labels_of, warning = match_labels(run, summary, args.class_order)
    output = Path(args.output or run.folder / "evaluation" / _name_results(run, args, summary))
    own_file(
        output / "evaluation.json"
    )  # a place that cannot be written is refused before the work
    start(launch, run.config | {"parallel": None})  # the model is not cut
    if launch.rank == 0:
        print(f"checkpoint {short_path(run.checkpoint)} ({run.chosen})", flush=True)
        split = summary.validation or "its evaluation split"
        print_wrapped(f"data       {data['root']}: {summary.eval_samples:,} images, {split}", 11)
        if warning:
            print_wrapped(warning, is_warning=True)
        then = run.about["data"].get("fingerprint", summary.fingerprint)
        if then != summary.fingerprint and not (args.data or args.split):
            print_wrapped(
                "warning: the data set has changed: the model may have been trained on some of "
                "these",
                11,
            )
        for line in list_changes(run.about):
            print_wrapped(line)
    predict = Predictor(run.load_model(), run.config)
    ranks = dict(dp_rank=launch.rank, dp_size=launch.world_size, device=predict.device)
    loader = task.build_eval_loader(
        data, run.batch, image_size=run.config["MODEL"]["image_size"], **ranks
    )
    tally = Tally(predict.device)
    to_model = torch.tensor(labels_of, device=predict.device)
    with naming_lost_ranks():
        for images, labels in tqdm(
            loader, unit="batch", leave=False, disable=None if launch.rank == 0 else True
        ):
            answers = torch.where(labels < 0, labels, to_model[labels.clamp(min=0)])
            tally.add(predict(images), answers)
        loader.close()
        tally.sum_over_ranks()
    shutdown()
    if launch.rank == 0:
        _report(run, tally, "by number" if warning else "by name", output, argv)


def _name_results(run: SavedRun, args: argparse.Namespace, data: DataSummary) -> str:
    """Return the name of the folder for the results: each data set has its own."""
    name = f"{run.checkpoint.name}{'-raw' * args.raw}"
    if args.data or args.split:
        root = os.path.basename(os.path.abspath(run.config["DATA"]["root"]))
        name += "-".join(["", root, *filter(None, [args.split]), data.fingerprint[:6]])
    return name


class Tally:
    """Counts over the evaluation set, [loss, top-1, top-5, samples], and in the end
    `describe_classes`'s answers.
    """

    def __init__(self, device: torch.device) -> None:
        self.totals = torch.zeros(4, dtype=torch.float64, device=device)
        self.batches: list[Tensor] = []  # [3, B]; a matrix of 21,843 classes would take 3.8 GB

    def add(self, logits_BC: Tensor, labels_B: Tensor) -> None:
        """Count a batch; labels below 0 do not count."""
        self.totals += count_correct(logits_BC, labels_B)
        best_BK = best_classes(logits_BC)
        self.batches.append(
            torch.stack([labels_B, best_BK[:, 0], (best_BK == labels_B[:, None]).any(1).long()])
        )

    def sum_over_ranks(self) -> None:
        """Add up what every process has counted; ``answers`` are those of all."""
        mine = torch.cat(self.batches, dim=1).cpu().numpy()
        mine = mine[:, mine[0] >= 0]  # here, as on a GPU it would wait
        self.answers = np.concatenate(gather(mine), axis=1)
        all_reduce(self.totals, ParallelMode.GLOBAL)


def match_labels(run: SavedRun, data: DataSummary, order: str | None) -> tuple[list[int], str]:
    """Return the model's class for each label of the data set, and a warning if no names say so.

    The classes of a model that names none are then those of the data set, in ``order``. Raises
    `UserError` for classes that the model does not know.
    """
    root, about, names = run.config["DATA"]["root"], run.about["data"], data.class_names
    count = run.config["MODEL"]["num_classes"]
    about["class_names"], warning = order_classes(about["class_names"], names, order, count)
    known = [about["class_names"], run.class_names]
    has_words = not any(map(str.isdecimal, known[0]))
    if has_words:
        known.append([*map(str, range(len(known[1])))])  # ImageNetV2's folders are numbers
    labels = match_classes(known, names)
    unknown = [name for name, label in zip(names, labels, strict=True) if label is None]
    if unknown:
        raise UserError(
            f"{root}: the model knows no class {list_some(unknown)} ({len(unknown)} of "
            f"{len(names)}), it learned {list_some(known[0])}: rename or remove these, or pass its "
            "own data set with --data"
        )
    if has_words and all(map(str.isdecimal, names)):
        warning = (
            f"warning: numbers name the classes of {root}: they count as the model's labels, "
            f"{names[0]} as {known[1][labels[0]]!r}; --classes FILE names these"
        )
    return labels, warning  # pyright: ignore[reportReturnType]


def _report(run: SavedRun, tally: Tally, how: str, output: Path, argv: list[str]) -> None:
    loss, top1, top5, samples = tally.totals.tolist()
    metrics = {
        "loss": loss / samples,
        "top1": top1 / samples,
        "top5": top5 / samples,
        "samples": int(samples),
    }
    rows = describe_classes(run.class_names, tally.answers)
    about = {
        "checkpoint": str(run.checkpoint),
        "weights": run.weights,
        "data": run.config["DATA"]["root"],
    }
    about |= describe_run(argv)
    own_file(output / "evaluation.json").write_text(
        json.dumps(finite(metrics | about), indent=2) + "\n"
    )
    write_csv(rows, output / "classes.csv")
    pictures = ", confusion.png" * draw_confusion(
        run.class_names, tally.answers, output / "confusion.png"
    )
    print_extremes(rows)
    learned = run.class_names[: len(run.about["data"]["class_names"])]
    print_wrapped(note_missing(f"labels     {how}", learned, tally.answers[0]), 11)
    print_wrapped(f"results    {short_path(output)}: evaluation.json, classes.csv{pictures}", 11)
    print(
        "top1={top1:.4f} top5={top5:.4f} loss={loss:.4f} samples={samples}".format(**metrics),
        flush=True,
    )
    if missing := np.count_nonzero(tally.answers[1] < 0):
        raise UserError(
            f"{missing:,} of {samples:,.0f} images have no answer, which counts as wrong: the "
            "model's outputs are not finite (NaN); --set fp16=None computes in float32, or name an "
            "earlier checkpoint"
        )


def describe_classes(names: Sequence[str], answers: np.ndarray) -> list[dict[str, Any]]:
    """Return a row for each class that has samples.

    ``answers`` holds [label, answer, whether the label is among the first five answers] in its
    rows, by samples; an answer of -1 is none (NaN). ``top1``, ``top5`` and ``precision`` (correct
    answers of all such answers; empty where there is none) are fractions of 1.
    """
    labels, best, is_among_5 = answers
    is_right = labels == best
    samples, right, top5, answered = (
        np.bincount(of, minlength=len(names))
        for of in (labels, labels[is_right], labels[is_among_5 > 0], best[best >= 0])
    )
    pairs, counts = np.unique(answers[:2, ~is_right], axis=1, return_counts=True)
    named = [*names, "NaN"]  # the last is that of answer -1
    mistakes: dict[int, str] = {}  # the most frequent wrong answer, and how often, by label
    for at in np.argsort(-counts, kind="stable"):
        mistakes.setdefault(int(pairs[0, at]), f"{named[pairs[1, at]]} ({counts[at]})")
    return [
        {
            "label": label,
            "class": names[label],
            "samples": int(samples[label]),
            "top1": f"{right[label] / samples[label]:.4f}",
            "top5": f"{top5[label] / samples[label]:.4f}",
            "precision": f"{right[label] / answered[label]:.4f}" if answered[label] else "",
            "mistaken for": mistakes.get(label, ""),
        }
        for label in np.flatnonzero(samples).tolist()
    ]


def print_extremes(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the classes by top-1, the lowest first; of many only the first and the last."""
    ordered = sorted(rows, key=lambda row: (row["top1"], row["class"]))
    if len(ordered) <= 2 * AT_EACH_END:
        print(f"classes by top-1, the lowest first\n{format_table(ordered)}")
        return
    print(
        f"the {AT_EACH_END} classes of {len(ordered)} with the lowest "
        f"top-1\n{format_table(ordered[:AT_EACH_END])}\n"
    )
    print(f"the {AT_EACH_END} with the highest\n{format_table(ordered[-AT_EACH_END:])}\n")


def draw_confusion(names: Sequence[str], answers: np.ndarray, path: Path) -> bool:
    """Draw which shares of each class's images are taken for which; return False if there are more
    than `DRAWN`.
    """
    count = len(names)
    if count > DRAWN:
        return False
    samples = np.bincount(answers[0], minlength=count)
    labels, best, _ = answers[:, answers[1] >= 0]
    confusion = np.bincount(labels * count + best, minlength=count**2).reshape(count, count)
    side = max(5.0, min(14.0, 0.35 * count))
    figure, axes = build_figure(side + 1.5, side)
    axes.grid(False)
    shares = confusion / np.maximum(samples, 1)[:, None]
    figure.colorbar(
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1), label="share of the class's images"
    )
    axes.set(
        xlabel="predicted",
        ylabel="true class",
        title=f"Confusion matrix, {samples.sum():,} images",
    )
    if count <= NAMED_CLASSES:
        axes.set_xticks(range(count), names, rotation=90, parse_math=False)  # "$" is no formula
        axes.set_yticks(range(count), names, parse_math=False)
    save_figure(figure, path)
    return True
