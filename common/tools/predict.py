"""Classify images with a saved model: the five most probable classes of each.

python scripts/predict.py outputs/quickstart digit.png folder_of_images
python scripts/predict.py hf-hub:timm/vit_small_patch16_224.augreg_in21k_ft_in1k cat.jpg
curl -s https://example.org/cat.jpg | python scripts/predict.py outputs/vit-b16 - --json
"""

import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import UnidentifiedImageError

from common.checkpoint.saved_run import SavedRun
from common.checkpoint.weights import open_model
from common.data.crops import CenterCrop, Normalizer, crop_image
from common.data.decoding import MAX_BYTES, UNREADABLE, decode_image
from common.data.image_folder import list_files
from common.engine.predictor import Predictor
from common.errors import UserError
from common.files import read_bytes, short_path
from common.task import find_task
from common.text import printable
from common.tools.arguments import build_parser, name_classes

STDIN = "-"
BATCH = 64
BEST = 5

Answer = dict[str, Any]


def main(argv: list[str]) -> None:
    parser = build_parser(__doc__, takes_others=True)
    parser.add_argument(
        "images", nargs="+", metavar="IMAGE", help="a file, a folder with images, or - for stdin"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object a line, for each image"
    )
    args = parser.parse_args(argv)
    images = list_images(args.images)
    run = open_model(args.run, args.set, raw=args.raw)
    name_classes(run, args.classes)
    if not args.json:
        print(f"checkpoint {short_path(run.checkpoint)} ({run.chosen})", flush=True)
    status = 0
    for answer in predict(run, images):
        if "error" in answer:
            # 1 for an image that cannot be read, 2 for a model whose outputs are not finite.
            status = max(status, 2 if "classes" in answer else 1)
            print(printable(f"error: {answer['image']}: {answer['error']}"), file=sys.stderr)
        if args.json:
            print(json.dumps(answer), flush=True)  # a program may read along
        elif "error" not in answer:
            classes = "; ".join(
                f"{best['class']} {100 * best['probability']:.1f} %" for best in answer["classes"]
            )
            print(printable(f"{answer['image']}: {classes}"), flush=True)
    if status:
        sys.exit(status)


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


def predict(run: SavedRun, images: Sequence[str]) -> Iterator[Answer]:
    """Yield an answer for each image, in order: ``image``, and ``classes`` or ``error``.

    ``classes`` are the `BEST` most probable, each with ``class`` (its name), ``label`` and
    ``probability``. Where the model's outputs are not finite (NaN), there is an ``error`` and
    ``classes`` is None. Images are prepared as for the run's evaluation.
    """
    size = run.config["MODEL"]["image_size"]
    data = run.config["DATA"]
    crop = find_task(run.about["task"]).build_eval_crop(data, size)
    predictor = Predictor(run.load_model(), run.config)
    normalize = Normalizer(data["mean"], data["std"], predictor.device)
    # Threads suffice: Pillow decodes in C, without Python's lock.
    with ThreadPoolExecutor() as pool:
        for start in range(0, len(images), BATCH):
            batch = images[start : start + BATCH]
            views = list(pool.map(partial(_read, crop=crop, size=size), batch))
            decoded = [view for view in views if isinstance(view, np.ndarray)]
            answers = iter(())
            # A batch may have no image that can be read.
            if decoded:
                pixels_BHWC = torch.from_numpy(np.stack(decoded)).to(predictor.device)
                pixels_BCHW = pixels_BHWC.permute(0, 3, 1, 2).contiguous()
                probabilities_BC = predictor(normalize(pixels_BCHW)).softmax(1).cpu()
                answers = map(partial(_best, run.class_names), probabilities_BC)
            for image, view in zip(batch, views, strict=True):
                answer = {"error": view} if isinstance(view, str) else next(answers)
                yield {"image": image} | answer


def _read(image: str, crop: CenterCrop, size: int) -> np.ndarray | str:
    """Return an image as the network sees it, uint8 [size, size, 3], or an error message."""
    try:
        if image == STDIN:
            data = sys.stdin.buffer.read(MAX_BYTES + 1)  # one byte more tells that it is too long
        else:
            data = read_bytes(Path(image), MAX_BYTES)
        if len(data) > MAX_BYTES:
            return f"more than {MAX_BYTES:,} bytes"
        return crop_image(decode_image(data), crop, size)
    except UserError as error:
        return str(error).removeprefix(f"{Path(image)}: ")
    except UnidentifiedImageError:
        return f"{UNREADABLE}not of a kind that is read"
    # Pillow's decoders raise a dozen unrelated types for damaged files.
    except Exception as error:
        return UNREADABLE + (" ".join(str(error).split()) or type(error).__name__)


def _best(names: Sequence[str], probabilities_C: torch.Tensor) -> Answer:
    """Return the most probable classes of an image."""
    if probabilities_C.isnan().any():
        return {"classes": None, "error": "the model's outputs are not finite (NaN)"}
    values, labels = probabilities_C.topk(min(BEST, len(names)))
    classes = [
        {"class": names[label], "label": label, "probability": round(value, 6)}
        for value, label in zip(values.tolist(), labels.tolist(), strict=True)
    ]
    return {"classes": classes}
