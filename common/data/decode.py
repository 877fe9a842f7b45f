"""Decode an image of any supported format."""

import io
from contextlib import suppress

import numpy as np
import simplejpeg
from PIL import ExifTags, Image, ImageOps

# Pillow's other formats run programs, or are not for photographs
FORMATS = ("JPEG", "PNG", "BMP", "PPM", "TIFF", "WEBP")
MAX_PIXELS = 100_000_000  # 300 MB when decoded; beyond it, a header that lies is likelier than a photograph
Image.MAX_IMAGE_PIXELS = None  # `check_pixels` refuses what Pillow would only warn of


def check_pixels(height: int, width: int) -> None:
    """Raise `ValueError` for an image that is too large to be decoded."""
    if height * width > MAX_PIXELS:
        raise ValueError(f"{width}x{height} is more than {MAX_PIXELS // 1_000_000} million pixels")


def decode_image(data: bytes | memoryview) -> np.ndarray:
    """Decode an image to RGB, uint8 [Y, X, 3], turned as its EXIF block says.

    Raises `ValueError` beyond `MAX_PIXELS`, what `to_rgb` raises, and what Pillow does.
    """
    image = Image.open(io.BytesIO(data), formats=FORMATS)
    check_pixels(image.height, image.width)
    if is_turned(image):
        return np.array(to_rgb(ImageOps.exif_transpose(image)))
    if image.format == "JPEG" and image.mode == "RGB":
        with suppress(ValueError):  # Pillow repairs more
            return simplejpeg.decode_jpeg(data)  # the same pixels in less than half the time
    return np.array(to_rgb(image))


def to_rgb(image: Image.Image) -> Image.Image:
    """Return an image in RGB: alpha is dropped, 16 bits become 8; raise ValueError where the range is not known."""
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
