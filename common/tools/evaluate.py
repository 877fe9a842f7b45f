"""Evaluate a saved model: each metric with its 95 % interval, all classes, the confusion matrix.

python scripts/evaluate.py outputs/vit-b16
torchrun --nproc_per_node 8 scripts/evaluate.py outputs/vit-b16/checkpoints/step-00011700 \
    --data /data/imagenet
python scripts/evaluate.py vit_small_patch16_224.augreg_in21k_ft_in1k --data /data/imagenet
"""

import json
import os
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from common.checkpoint.content import list_changes
from common.checkpoint.saved_run import SavedRun
from common.checkpoint.weights import open_model
from common.config.plan import DataSummary
from common.data.image_folder import SPLITS, note_missing
from common.engine.collectives import gather
from common.engine.groups import shutdown
from common.engine.lost_ranks import naming_lost_ranks
from common.engine.predictor import Predictor
from common.engine.upstream import ParallelMode
from common.errors import UserError
from common.files import fingerprint_of, own_file, replacing, short_path, write_csv
from common.launch.detect import Launch, add_launch_arguments, detect_launch, init_distributed
from common.metrics.evaluation import Counts
from common.metrics.metrics_file import finite
from common.model.classes import ORDER_HELP, ORDERS, match_classes, order_classes
from common.process import ends_cleanly
from common.provenance import describe_run
from common.task import Task, data_root, find_task
from common.text import format_table, list_some, print_wrapped
from common.tools.arguments import (
    build_parser,
    name_classes,
    own_root,
    warn_of_training_images,
)
from common.tools.calibration import AS_IT_IS, calibrate, draw_reliability, scale
from common.tools.classes import describe_classes, draw_confusion, print_lowest
from common.tools.intervals import METHODS, Interval, measure_intervals

DRAWN = 2000  # most classes of which there is a picture


@ends_cleanly
def main(argv: list[str]) -> None:
    args = _build_parser().parse_args(argv)
    launch = detect_launch(args, os.environ)
    settings = list(args.set)
    if args.data:
        settings.append(f"DATA.root={args.data!r}")
    run = open_model(args.run, settings, raw=args.raw)
    name_classes(run, args.classes)
    task = find_task(run.metadata["task"])
    is_own_data = choose_images(run, task, args)
    summary = task.describe(run.config["DATA"])
    labels_of, warning = match_labels(run, summary, args.class_order)
    output = Path(args.output or run.folder / "evaluation" / _name_results(run, args, summary))
    own_file(output / "evaluation.json")  # refuses a path that cannot be written before the work
    init_distributed(launch, run.config | {"parallel": None})  # the model is not sharded
    if launch.rank == 0:
        _print_start(run, summary, warning, is_own_data=is_own_data)
        if not (is_own_data or args.split):
            warn_of_training_images(run, args.data)
    tally = count(run, task, labels_of, launch, args.views)
    shutdown()
    if launch.rank == 0:
        _report(run, tally, "by number" if warning else "by name", output, argv)


def _build_parser() -> ArgumentParser:
    parser = build_parser(__doc__, takes_others=True)
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="another data set, read by the run's DATA.loader: for folders of images add "
        "--set DATA.loader=torchvision (default: the run's)",
    )
    of_data = "of the data set (default: validation; of a folder of images without splits, all)"
    parser.add_argument("--class-order", choices=ORDERS, help=ORDER_HELP)
    parser.add_argument("--split", choices=sorted({*SPLITS.values()}), help=of_data)
    parser.add_argument(
        "--views",
        type=int,
        choices=(1, 2),
        help="2: also measure the mean of the probabilities of an image and its mirror image",
    )
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="default: evaluation/<checkpoint>[-raw][-<data>][-<settings>], in the run",
    )
    add_launch_arguments(parser)
    return parser


def choose_images(run: SavedRun, task: Task, args: Namespace) -> bool:
    """Set which images ``run.config`` evaluates; return whether they are the run's own."""
    data = run.config["DATA"]
    data["root"] = data_root(data, task.download)
    if args.split and not task.has_splits:
        raise UserError(f"--split {args.split}: {task.name} has one evaluation set; leave it out")
    # the folder that the run itself trained on has held-out images, whoever names it
    own = own_root(run)
    is_same = own and Path(args.data or own).resolve() == Path(own).resolve()
    is_own_data = not args.split and (is_same or not args.data)
    if not is_own_data and task.has_splits:
        data["eval_split"] = args.split or "validation"
    return bool(is_own_data)


def count(
    run: SavedRun, task: Task, labels_of: list[int], launch: Launch, views: int | None
) -> "Tally":
    """Evaluate the model on all ranks; ``labels_of`` are its classes by the data set's label."""
    predict = Predictor(run.load_model(), run.config)
    loader = task.build_eval_loader(
        run.config["DATA"],
        run.batch,
        image_size=run.config["MODEL"]["image_size"],
        dp_rank=launch.rank,
        dp_size=launch.world_size,
        device=predict.device,
    )
    tally = Tally(predict.device)
    two_views = Counts(predict.device)
    to_model = torch.tensor(labels_of, device=predict.device)
    with naming_lost_ranks(), closing(loader):
        # disable=None: no bar where stderr is no terminal
        hidden = None if launch.rank == 0 else True
        for images, labels in tqdm(loader, unit="batch", leave=False, disable=hidden):
            # padding, which has label -100, stays as it is
            answers = torch.where(labels < 0, labels, to_model[labels.clamp(min=0)])
            logits_BC = predict(images)
            tally.add(logits_BC, answers)
            if views == 2:
                logits_2BC = torch.stack([logits_BC, predict(images.flip(-1))]).double()
                # The sum of the probabilities: the loss and AUROC are those of the mean.
                two_views.add(logits_2BC.log_softmax(2).logsumexp(0), answers)
        tally.sum_over_ranks()
        if views == 2:
            tally.two_views = two_views.sum_over_ranks(ParallelMode.GLOBAL)
    return tally


def _print_start(run: SavedRun, data: DataSummary, warning: str, *, is_own_data: bool) -> None:
    """Print which checkpoint is evaluated on which images."""
    print(f"checkpoint {short_path(run.checkpoint)} ({run.chosen})", flush=True)
    split = data.validation or "its evaluation split"
    root = run.config["DATA"]["root"]
    print_wrapped(f"data       {root}: {data.eval_samples:,} images, {split}", 11)
    if warning:
        print_wrapped(warning, is_warning=True)
    trained_on = run.metadata["data"].get("fingerprint", data.fingerprint)
    if is_own_data and trained_on != data.fingerprint:
        changed = "warning: the data set has changed"
        print_wrapped(f"{changed}: the model may have been trained on some of these", 11)
    for line in list_changes(run.metadata):
        print_wrapped(line)


def _name_results(run: SavedRun, args: Namespace, data: DataSummary) -> str:
    """Return the name of the folder for the results: other data or settings have another."""
    parts = [run.checkpoint.name]
    if args.raw:
        parts.append("raw")
    if args.data or args.split:
        parts.append(os.path.basename(os.path.abspath(run.config["DATA"]["root"])))
        if args.split:
            parts.append(args.split)
        parts.append(data.fingerprint[:6])
    settings = list(args.set)
    named = {"classes": args.classes, "class_order": args.class_order, "views": args.views}
    settings += [f"{key}={value}" for key, value in named.items() if value]
    if settings:
        readable = re.sub(r"[^\w.=,+-]+", "_", ",".join(settings))
        # their values may be of any length
        parts.append(f"{readable[:40]}-{fingerprint_of(settings)[:6]}")
    return "-".join(parts)


class Tally:
    """Count over the evaluation set: ``metrics``; ``answers``, ``measured``, ``scaled_2TN`` by
    sample. ``two_views`` are metrics too, {} if not measured.
    """

    def __init__(self, device: torch.device):
        self.two_views: dict[str, float] = {}
        self.counts = Counts(device)
        self.batches: list[Tensor] = []  # [3, B]; a matrix of 21,843 classes would take 3.8 GB
        self.scaled: list[Tensor] = []  # [2, T, B], of `scale`
        self.losses: list[Tensor] = []  # [2, B], and of two classes how much more the second has

    def add(self, logits_BC: Tensor, labels_B: Tensor) -> None:
        """Count a batch; labels below 0 do not count."""
        best_BK = self.counts.add(logits_BC, labels_B)
        is_among_5_B = (best_BK == labels_B[:, None]).any(1).long()
        self.batches.append(torch.stack([labels_B, best_BK[:, 0], is_among_5_B]))
        self.scaled.append(scale(logits_BC, labels_B))
        loss_B = F.cross_entropy(logits_BC.float(), labels_B, reduction="none")
        # For AUROC, which only the order of these matters to: float32 would make ties.
        margin_B = logits_BC[:, -1].double() - logits_BC[:, 0].double()
        self.losses.append(torch.stack([loss_B.double(), margin_B]))

    def sum_over_ranks(self) -> None:
        """Set ``metrics`` to those of all ranks, and gather what intervals take."""
        labels = torch.cat(self.batches, dim=1).cpu().numpy()
        losses = torch.cat(self.losses, dim=1).cpu().numpy()
        kept = labels[0] >= 0  # not in `add`, where a GPU would have to wait
        self.answers = np.concatenate(gather(labels[:, kept]), axis=1)
        self.measured = np.concatenate(gather(losses[:, kept]), axis=1)
        scaled = torch.cat(self.scaled, dim=2).cpu().numpy()
        # Ranks have consecutive images: the order is that of one process.
        self.scaled_2TN = np.concatenate(gather(scaled[:, :, kept]), axis=2)
        self.metrics = self.counts.sum_over_ranks(ParallelMode.GLOBAL)


def match_labels(run: SavedRun, data: DataSummary, order: str | None) -> tuple[list[int], str]:
    """Return the model's class for each label of the data set, and a warning if no names say so.

    The classes of a model that names none are then those of the data set, in ``order``. Raises
    `UserError` for classes that the model does not know.
    """
    root = run.config["DATA"]["root"]
    run_data = run.metadata["data"]
    names = data.class_names
    count = run.config["MODEL"]["num_classes"]
    run_data["class_names"], warning = order_classes(run_data["class_names"], names, order, count)
    known = [run_data["class_names"], run.class_names]
    has_words = not any(map(str.isdecimal, known[0]))
    if has_words:
        # the folders of ImageNetV2 are named by the label
        known.append([*map(str, range(len(known[1])))])
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
    """Print the results and write them to ``output``; ``how``: by what labels were matched."""
    metrics = tally.metrics
    intervals = measure_intervals(metrics, tally.answers, tally.measured)
    rows = describe_classes(run.class_names, tally.answers, tally.scaled_2TN[1, AS_IT_IS])
    calibration = calibrate(tally.answers, tally.scaled_2TN)
    # Printed first: the disk may be full.
    print_lowest(rows, run.class_names)
    print(f"\n{format_table(describe_metrics(metrics, intervals))}")
    line = "top1={top1:.4f} top5={top5:.4f} loss={loss:.4f} samples={samples}"
    if tally.two_views:
        print("two views  " + line.format(**tally.two_views))
    print_wrapped(f"confidence {calibration}", 11)
    learned = run.class_names[: len(run.metadata["data"]["class_names"])]
    print_wrapped(note_missing(f"labels     {how}", learned, tally.answers[0]), 11)
    evaluated = {
        "calibration": asdict(calibration),
        "checkpoint": str(run.checkpoint),
        "weights": run.weights,
        "data": run.config["DATA"]["root"],
        "two_views": finite(tally.two_views),
    }
    # JSON has no NaN, which AUROC's limits may be.
    limits = {name: finite(interval._asdict()) for name, interval in intervals.items()}
    record = finite(metrics) | {"intervals_95": limits} | evaluated | describe_run(argv)
    file = output / "evaluation.json"
    earlier = " (earlier ones are replaced)" if file.exists() else ""
    with replacing(file) as partial:
        partial.write_text(json.dumps(record, indent=2) + "\n")
    write_csv(rows, output / "classes.csv")
    files = "evaluation.json, classes.csv"
    if len(run.class_names) <= DRAWN:
        draw_confusion(run.class_names, tally.answers, output / "confusion.png")
        files += ", confusion.png"
    else:
        files += f", no confusion.png (only up to {DRAWN:,} classes)"
    picture = output / "reliability.png"
    draw_reliability(tally.answers, tally.scaled_2TN, calibration, picture)
    files += ", reliability.png"
    print_wrapped(f"results    {short_path(output)}: {files}{earlier}", 11)
    print(line.format(**metrics), flush=True)
    missing = np.count_nonzero(tally.answers[1] < 0)
    if missing:
        raise UserError(
            f"{missing:,} of {metrics['samples']:,} images have no answer, which counts as wrong: "
            "the model's outputs are not finite (NaN); --set fp16=None computes in float32, or "
            "name an earlier checkpoint"
        )


def describe_metrics(
    metrics: Mapping[str, float], intervals: Mapping[str, Interval]
) -> list[dict[str, str]]:
    """Return a row for each metric, with its interval."""
    return [
        {
            "metric": name,
            "value": f"{metrics[name]:.4f}",
            "95 % interval": f"{low:.4f} to {high:.4f}",
            "by": METHODS[name],
        }
        for name, (low, high) in intervals.items()
    ]
