"""Convert an image file to an RGB JPEG that all decoders read alike, or refuse it with a reason."""

import io
import warnings
from dataclasses import dataclass

import numpy as np
import simplejpeg
from PIL import Image

from common.data.image_folder import FORMATS, UNREADABLE, check_pixels, decode_image, is_turned

RESAMPLING = Image.Resampling.LANCZOS
_JPEG_MAGIC = b"\xff\xd8\xff"


class BadImageError(ValueError):
    """An image that must not reach training; the message is the reason."""


@dataclass(frozen=True)
class Jpeg:
    """An RGB JPEG, upright, and whether it differs from the file it came from."""

    data: bytes
    height: int
    width: int
    converted: bool


def convert_image(data: bytes, quality: int = 95, short_side: int | None = None) -> Jpeg:
    """Decode an image file strictly and return it as an RGB JPEG.

    A YCbCr JPEG that is upright and not too large is returned unchanged. All else is re-encoded at `quality` without
    chroma subsampling: other formats and colour spaces (alpha is dropped, the first frame is taken, 16 bits become 8),
    images with an EXIF rotation, and images whose shorter side is longer than `short_side` (resized by Lanczos). Raises
    `BadImageError`.
    """
    if not data:
        raise BadImageError("empty file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of harmless metadata
            return _convert(data, quality, short_side)
    except (BadImageError, MemoryError):
        raise
    except Image.UnidentifiedImageError as error:
        raise BadImageError(f"{UNREADABLE}not one of {', '.join(FORMATS)}") from error
    except Exception as error:  # Pillow's decoders raise a dozen unrelated types for damaged files
        raise BadImageError(UNREADABLE + f"{error or type(error).__name__}".splitlines()[0]) from error


def check_jpeg(data: bytes | memoryview) -> tuple[int, int, str]:
    """Decode a JPEG strictly and return its height, width and colour space.

    libjpeg repairs truncated and damaged data with a warning; here each warning raises `BadImageError`, as do
    dimensions beyond `MAX_PIXELS`.
    """
    if bytes(data[:3]) != _JPEG_MAGIC:
        raise BadImageError("not a JPEG")
    try:
        height, width, color_space, _ = simplejpeg.decode_jpeg_header(data)
        check_pixels(height, width)  # pyright: ignore[reportArgumentType]
        simplejpeg.decode_jpeg(data, "CMYK" if color_space in ("CMYK", "YCCK") else "RGB")
    except ValueError as error:
        raise BadImageError(f"{UNREADABLE}{error}") from error
    return height, width, color_space  # pyright: ignore[reportReturnType]


def _convert(data: bytes, quality: int, short_side: int | None) -> Jpeg:
    is_jpeg = data.startswith(_JPEG_MAGIC)
    if is_jpeg:
        height, width, color_space = check_jpeg(data)
    else:
        Image.open(io.BytesIO(data), formats=FORMATS).verify()  # checksums that decoding ignores
    image = Image.open(io.BytesIO(data), formats=FORMATS)
    check_pixels(image.height, image.width)
    shorter = min(image.size)
    target = min(short_side or shorter, shorter)
    if is_jpeg and target == shorter and color_space == "YCbCr" and not is_turned(image):
        return Jpeg(data, height, width, converted=False)
    pixels = decode_image(data)
    if target < shorter:
        height, width = (round(side * target / shorter) for side in pixels.shape[:2])
        pixels = np.asarray(Image.fromarray(pixels).resize((width, height), RESAMPLING))
    encoded = simplejpeg.encode_jpeg(pixels, quality, "RGB", "444")
    return Jpeg(encoded, pixels.shape[0], pixels.shape[1], converted=True)
