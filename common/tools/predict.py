"""Classify images with a saved model: the five most probable classes of each.

python scripts/predict.py outputs/quickstart digit.png folder_of_images
python scripts/predict.py hf-hub:timm/vit_small_patch16_224.augreg_in21k_ft_in1k cat.jpg
curl -s https://example.org/cat.jpg | python scripts/predict.py outputs/vit-b16 - --json
python scripts/predict.py outputs/vit-b16 photographs --features photographs.npy
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from PIL import UnidentifiedImageError
from torch import Tensor

from common.checkpoint.saved_run import SavedRun
from common.checkpoint.weights import open_model
from common.data.crops import CenterCrop, Normalizer, crop_image
from common.data.decoding import MAX_BYTES, UNREADABLE, decode_image
from common.data.image_folder import list_files
from common.engine.predictor import Predictor
from common.errors import PartialError, UserError
from common.files import own_file, read_bytes, replacing, short_path
from common.process import ends_cleanly
from common.task import find_task
from common.text import printable
from common.tools.arguments import build_parser, name_classes, warn_of_training_images

STDIN = "-"
BATCH = 64
BEST = 5
PARQUET = ".parquet"

Answer = dict[str, Any]


@ends_cleanly
def main(argv: list[str]) -> None:
    parser = build_parser(__doc__, takes_others=True, takes_temperature=True)
    parser.add_argument(
        "images", nargs="+", metavar="IMAGE", help="a file, a folder with images, or - for stdin"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object a line, for each image"
    )
    parser.add_argument(
        "--features",
        type=Path,
        metavar="FILE",
        help="also write what the head gets of each image, to FILE.npy or FILE.parquet",
    )
    args = parser.parse_args(argv)
    if args.features:
        _check_features(args.features)
    images = list_images(args.images)
    run = open_model(args.run, args.set, raw=args.raw)
    name_classes(run, args.classes)
    warn_of_training_images(run, *args.images)
    carried = {}
    if args.temperature:
        if run.divided != 1:
            raise UserError(
                f"--temperature {args.temperature:g}: export.py has divided the logits of "
                f"{args.run} by {run.divided:g} already: leave it out"
            )
        carried["temperature"] = args.temperature
        chosen = f"{run.chosen}; temperature {args.temperature:g}"
        run = replace(run, temperature=args.temperature, chosen=chosen)
    if not args.json:
        print(f"checkpoint {short_path(run.checkpoint)} ({run.chosen})", flush=True)
    status = 0
    features = []
    for answer in predict(run, images):
        # an image that cannot be read has a row too: rows are in the order of the images
        row = answer.pop("features", np.full(1, np.nan, np.float32))
        if args.features:  # else the rows of a million images would stay in memory
            features.append(row)
        if "error" in answer:
            # 1 for an image that cannot be read, 2 for a model whose outputs are not finite.
            status = max(status, 2 if "classes" in answer else 1)
            print(printable(f"error: {answer['image']}: {answer['error']}"), file=sys.stderr)
        if args.json:
            print(json.dumps(answer | carried), flush=True)  # a program may read along
        elif "error" not in answer:
            classes = "; ".join(
                f"{best['class']} {100 * best['probability']:.1f} %" for best in answer["classes"]
            )
            print(printable(f"{answer['image']}: {classes}"), flush=True)
    if args.features:
        shape = write_features(args.features, images, features)
        # JSON stays alone on stdout
        said = f"features   {short_path(args.features)}: float32 {shape}"
        print(said, file=sys.stderr if args.json else sys.stdout)
    if status:
        raise PartialError("not all images have an answer: see the lines above", status)


def _check_features(path: Path) -> None:
    """Raise `UserError` unless features can be written to ``path``, before hours of work."""
    if path.suffix not in (".npy", PARQUET):
        raise UserError(f"--features {path}: name a file that ends in .npy or {PARQUET}")
    if path.suffix == PARQUET and not find_spec("pyarrow"):
        raise UserError(f"--features {path} needs pyarrow: pip install pyarrow, or write a .npy")
    own_file(path, "--features")


def write_features(path: Path, images: list[str], features: Sequence[np.ndarray]) -> list[int]:
    """Write the features of each image as .npy, float32 [images, width], or as .parquet.

    Rows of one value, NaN, are repeated to the width of the others. In a name, bytes that are not
    UTF-8 become ``\\xe9`` in .parquet. Returns the shape.
    """
    # The row of an image that could not be read has one value, as the width was not known.
    features_ND = np.stack(np.broadcast_arrays(*features))
    with replacing(path) as partial:
        if path.suffix == PARQUET:
            import pyarrow.parquet

            names = [os.fsencode(image).decode(errors="backslashreplace") for image in images]
            table = pyarrow.table({"image": names, "features": list(features_ND)})
            pyarrow.parquet.write_table(table, partial)
        else:
            np.save(partial, features_ND)
    return [*features_ND.shape]


def list_images(names: Sequence[str]) -> list[str]:
    """Return the images that the command line names, with those in its folders."""
    images: list[str] = []
    for name in names:
        if not Path(name).is_dir():
            images.append(name)
            continue
        inside = [str(path) for path in list_files(Path(name))]
        if not inside:
            raise UserError(f"{name}: no images in this folder: name one with images")
        images += inside
    return images


class Classifier:
    """The model of a run, whose weights are read once. Threads may share it."""

    def __init__(self, run: SavedRun):
        data = run.config["DATA"]
        self.size = run.config["MODEL"]["image_size"]
        self.crop = find_task(run.metadata["task"]).build_eval_crop(data, self.size)
        model: Any = run.load_model()
        # Works for a ViT and for every model of timm's, whatever it does before its head.
        model.get_submodule(model.head_names[0]).register_forward_pre_hook(self._keep)
        self._predictor = Predictor(model, run.config)
        self._normalize = Normalizer(data["mean"], data["std"], self._predictor.device)
        self._lock = Lock()
        self._temperature = run.temperature

    def _keep(self, _: object, inputs: tuple[Tensor, ...]) -> None:
        self._head_input = inputs[0]

    def __call__(self, views: Sequence[np.ndarray]) -> tuple[Tensor, np.ndarray]:
        """Return the probabilities of the classes, and what the head gets, of each image."""
        pixels_BHWC = torch.from_numpy(np.stack(views)).to(self._predictor.device)
        pixels_BCHW = pixels_BHWC.permute(0, 3, 1, 2).contiguous()
        with self._lock:  # else the input of the head could be another thread's
            logits_BC = self._predictor(self._normalize(pixels_BCHW))
            probabilities_BC = (logits_BC / self._temperature).softmax(1).cpu()
            # A copy: a view would keep the tokens of all images in memory. Some heads are
            # convolutions of one pixel, [B, D, 1, 1].
            features_BD = self._head_input.flatten(1).float().cpu().numpy().copy()
            del self._head_input
        return probabilities_BC, features_BD


# By run, each as long as its run is kept.
_classifiers: WeakKeyDictionary[SavedRun, Classifier] = WeakKeyDictionary()
_opening = Lock()


def predict(run: SavedRun, images: Sequence[str]) -> Iterator[Answer]:
    """Yield an answer for each image, in order: ``image``, and ``classes`` or ``error``.

    ``classes`` are the `BEST` most probable, each with ``class`` (its name), ``label`` and
    ``probability``. ``features`` are what the head, or the first of several, gets: float32 [width].
    Where the model's outputs are not finite (NaN), there is an ``error`` and ``classes`` is None.
    Images are prepared as for the run's evaluation. The first call reads the run's weights. Raises
    OSError where storage fails.
    """
    if isinstance(images, str) or not all(isinstance(image, (str, Path)) for image in images):
        raise TypeError(f"predict takes a list of paths, not {images!r:.80}")
    with _opening:
        classifier = _classifiers.get(run) or Classifier(run)
        _classifiers[run] = classifier
    # Threads suffice: Pillow decodes in C, without Python's lock.
    with ThreadPoolExecutor() as pool:
        for start in range(0, len(images), BATCH):
            batch = images[start : start + BATCH]
            read = partial(_read, crop=classifier.crop, size=classifier.size)
            views = list(pool.map(read, batch))
            decoded = [view for view in views if isinstance(view, np.ndarray)]
            answers = iter(())
            # A batch may have no image that can be read.
            if decoded:
                answers = map(partial(_best, run.class_names), *classifier(decoded))
            for image, view in zip(batch, views, strict=True):
                answer = {"error": view} if isinstance(view, str) else next(answers)
                yield {"image": image} | answer


def _read(image: str, crop: CenterCrop, size: int) -> np.ndarray | str:
    """Return an image as the network sees it, uint8 [size, size, 3], or an error message."""
    if image == STDIN:
        data = sys.stdin.buffer.read(MAX_BYTES + 1)  # one byte more tells that it is too long
        if len(data) > MAX_BYTES:
            return f"more than {MAX_BYTES:,} bytes"
    else:
        try:
            data = read_bytes(Path(image), MAX_BYTES)
        except UserError as error:
            return str(error).removeprefix(f"{Path(image)}: ")
    try:
        return crop_image(decode_image(data), crop, size)
    except UnidentifiedImageError:
        return f"{UNREADABLE}not of a kind that is read"
    # Pillow's decoders raise a dozen unrelated types for damaged files.
    except Exception as error:
        return UNREADABLE + (" ".join(str(error).split()) or type(error).__name__)


def _best(names: Sequence[str], probabilities_C: Tensor, features_D: np.ndarray) -> Answer:
    """Return the most probable classes of an image, and its features."""
    answer: Answer = {"features": features_D}
    if probabilities_C.isnan().any():
        return answer | {"classes": None, "error": "the model's outputs are not finite (NaN)"}
    values, labels = probabilities_C.topk(min(BEST, len(names)))
    classes = [
        {"class": names[label], "label": label, "probability": round(value, 6)}
        for value, label in zip(values.tolist(), labels.tolist(), strict=True)
    ]
    return answer | {"classes": classes}
