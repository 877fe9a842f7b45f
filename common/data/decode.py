"""Decode an image of any supported format; count and report those that cannot be decoded."""

import io
import sys
from collections.abc import Iterable
from contextlib import suppress

import numpy as np
import simplejpeg
from PIL import ExifTags, Image, ImageOps

from common.errors import UserError, printable

# Pillow's other formats run programs, or are not for photographs
FORMATS = ("JPEG", "PNG", "BMP", "PPM", "TIFF", "WEBP")
MAX_PIXELS = 100_000_000  # 300 MB when decoded; beyond it, a header that lies is likelier than a photograph
Image.MAX_IMAGE_PIXELS = None  # `check_pixels` refuses what Pillow would only warn of
MAX_BAD_SHARE = 0.01
UNREADABLE = "not a readable image: "  # and then the decoder's message
NAMED = 20  # of a list that may have a million


def check_pixels(height: int, width: int) -> None:
    """Raise `ValueError` for an image that is too large to be decoded."""
    if height * width > MAX_PIXELS:
        raise ValueError(f"{width}x{height} is more than {MAX_PIXELS // 1_000_000} million pixels")


def decode_image(data: bytes | memoryview) -> np.ndarray:
    """Decode an image to RGB, uint8 [Y, X, 3], turned as its EXIF block says.

    Raises `ValueError` beyond `MAX_PIXELS` and for pixels of an unknown range, and what Pillow does.
    """
    image = Image.open(io.BytesIO(data), formats=FORMATS)
    check_pixels(image.height, image.width)
    if is_turned(image):
        return np.array(_to_rgb(ImageOps.exif_transpose(image)))
    if image.format == "JPEG" and image.mode == "RGB":
        with suppress(ValueError):  # Pillow repairs more
            return simplejpeg.decode_jpeg(data)  # the same pixels in less than half the time
    return np.array(_to_rgb(image))


def _to_rgb(image: Image.Image) -> Image.Image:
    """Return an image in RGB: alpha is dropped, 16 bits become 8."""
    # 16 bits, which Pillow would clip at 255; those of a PPM file are in mode "I"
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        image = Image.fromarray((np.asarray(image) / 257).round().astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError("32-bit pixels, whose range is not known")
    return image.convert("RGB")


def is_turned(image: Image.Image) -> bool:
    """Return whether an image's EXIF block says that it is to be turned or mirrored."""
    try:
        return image.getexif().get(ExifTags.Base.Orientation) in range(2, 9)
    except Exception:  # a damaged EXIF block says nothing against the pixels
        return False


def reason_of(error: Exception) -> str:
    """Return a decoder's message as one line, without the buffer's address that some contain."""
    return " ".join(str(error).split()).partition(" <")[0] or type(error).__name__


class BadImages:
    """Count the images that a loader skips, and name each once on stderr.

    More than `MAX_BAD_SHARE` of the ``samples`` that this process reads in a pass raises `UserError`.
    """

    def __init__(self, samples: float) -> None:
        self.samples, self.count = samples, 0
        self._named: set[str] = set()

    def start_pass(self) -> None:
        """Count from 0 again, without naming images twice."""
        self.count = 0

    def add(self, messages: Iterable[str]) -> None:
        """Count the skipped images of a batch, given a message for each."""
        for message in messages:
            self.count += 1
            if self.count > MAX_BAD_SHARE * self.samples:
                raise UserError(
                    f"{message}; with it {self.count:,} of the {self.samples:,.0f} images that this process reads "
                    f"in a pass are bad, more than {MAX_BAD_SHARE:.0%}"
                )
            if message not in self._named and len(self._named) < NAMED:
                self._named.add(message)
                last = "; further images are not named" if len(self._named) == NAMED else ""
                line = f"skipped: {printable(message)}{last}\n"
                sys.stderr.write(line)  # one write, unlike print, since ranks share stderr
