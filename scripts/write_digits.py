"""Write scikit-learn's 1,797 handwritten digits as an image folder.

Each 8 x 8 picture is enlarged to 32 x 32 and saved as a JPEG under ``DEST/<digit>/<number>.jpg``.
"""

import argparse
from pathlib import Path

import common  # noqa: F401  Ctrl-C during the slow imports below then ends quietly

# isort: split
from PIL import Image
from sklearn.datasets import load_digits


def main(destination: str) -> None:
    digits = load_digits()
    pairs = zip(digits.images, digits.target, strict=True)  # pyright: ignore[reportAttributeAccessIssue]
    for number, (pixels, digit) in enumerate(pairs):
        path = Path(destination) / str(digit) / f"{number:04d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        # scikit-learn's values are 0 to 16.
        values = (pixels * 255 / 16).round().astype("uint8")
        image = Image.fromarray(values).convert("RGB")
        image = image.resize((32, 32), Image.Resampling.BICUBIC)
        image.save(path, quality=95, subsampling=0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("destination", metavar="DEST")
    main(parser.parse_args().destination)
