"""Decode images to RGB strictly: what Pillow or libjpeg would repair in silence is an error."""

import io
import re

import numpy as np
from PIL import ExifTags, Image, ImageOps, PngImagePlugin
from simplejpeg import decode_jpeg

# Pillow's other formats run programs (EPS), or are not for photographs.
FORMATS = ("JPEG", "PNG", "BMP", "PPM", "TIFF", "WEBP")
# 300 MB when decoded. Beyond it, a header that lies is likelier than a photograph.
MAX_PIXELS = 100_000_000
# The greatest size of an encoded image: four channels without compression, and metadata.
MAX_BYTES = 4 * MAX_PIXELS + (1 << 20)
Image.MAX_IMAGE_PIXELS = None  # `check_pixels` refuses what Pillow would only warn of
# Of one text or profile Pillow takes 1 MB; editors write more. The sum of texts stays limited.
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY
UNREADABLE = "not a readable image: "  # the decoder's message follows
# What libjpeg-turbo says of files that lack no pixels. Bytes before a restart marker (d0 to d7) are
# what is left of a block that was cut. Of unusual subsampling only Pillow can decode the pixels.
HARMLESS = re.compile("bytes before marker 0x(?!d[0-7])|subsampling level|Invalid SOS parameters")
SEGMENT = re.compile(rb"\xff+([\xc0-\xcf\xda-\xfe])(..)", re.DOTALL)  # marker and length
ORIENTATION = ExifTags.Base.Orientation


def check_pixels(height: int, width: int) -> None:
    """Raise `ValueError` for an image that is too large to be decoded."""
    if height * width > MAX_PIXELS:
        raise ValueError(f"{width}x{height} is more than {MAX_PIXELS // 1_000_000} million pixels")


def decode_image(data: bytes | memoryview) -> np.ndarray:
    """Decode an image to Pillow's pixels in RGB, uint8 [Y, X, 3], turned as its EXIF block says.

    Raises `ValueError` beyond `MAX_PIXELS`, for pixels of an unknown range and for a JPEG that
    lacks data, which Pillow would fill with grey; and what Pillow does, for a wrong checksum too.
    """
    image = Image.open(io.BytesIO(data), formats=FORMATS)
    check_pixels(image.height, image.width)
    pixels = None
    if image.format in ("JPEG", "MPO"):
        pixels = _decode_jpeg(bytes(data), image.mode)
    else:
        # `verify` checks the checksums, which decoding ignores; the image is of no use afterwards.
        Image.open(io.BytesIO(data), formats=FORMATS).verify()
    if pixels is None:
        pixels = np.array(_to_rgb(image))
    if not is_turned(image):  # asked after the pixels, because Pillow turns a TIFF as it loads it
        return pixels
    upright = Image.fromarray(pixels)  # not `image`, whose other tags Pillow may fail to copy
    upright.getexif()[ORIENTATION] = image.getexif()[ORIENTATION]
    return np.array(ImageOps.exif_transpose(upright))


def _decode_jpeg(data: bytes, mode: str) -> np.ndarray | None:
    """Return the pixels of a JPEG; None where Pillow decodes better: CMYK, or after a warning.

    libjpeg repairs a file that lacks data with a warning; here `ValueError` is raised.
    """
    colors = "CMYK" if mode == "CMYK" else "RGB"
    try:
        pixels = decode_jpeg(data, colors)  # the pixels of Pillow in less than half the time
    except ValueError:
        try:
            decode_jpeg(_without_metadata(data), colors)
        except ValueError as error:
            if not HARMLESS.search(str(error)):
                raise
        return None
    return None if mode == "CMYK" else pixels


def _without_metadata(data: bytes) -> bytes:
    """Return a JPEG without metadata and bytes between the segments before its first scan.

    libjpeg-turbo tells its first warning only. If that is of one of these, there may be more.
    """
    kept = data[:2]
    end = 2
    while True:
        segment = SEGMENT.search(data, end)
        if not segment:
            return data
        marker, length = segment.groups()
        if marker == b"\xda":  # the first scan
            return kept + data[segment.start() :]
        end = segment.end(1) + int.from_bytes(length)
        if marker < b"\xe0":  # no metadata (e0 to ef) or comment (fe)
            kept += data[segment.start() : end]


def _to_rgb(image: Image.Image) -> Image.Image:
    """Return an image in RGB: alpha is dropped, 12 and 16 bits become 8."""
    # Pillow would clip these at 255; those of a PPM file are in mode "I"
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        tags = getattr(image, "tag_v2", {})  # only a TIFF has some
        bits = tags.get(ExifTags.Base.BitsPerSample, [16])[0]
        grey = (np.asarray(image) / ((2**bits - 1) / 255)).round().astype(np.uint8)
        is_white_zero = tags.get(ExifTags.Base.PhotometricInterpretation) == 0
        image = Image.fromarray(255 - grey if is_white_zero else grey)
    if image.mode in ("I", "F"):
        raise ValueError("32-bit pixels, whose range is not known")
    return image.convert("RGB")


def is_turned(image: Image.Image) -> bool:
    """Return whether an image's EXIF block says that it is to be turned or mirrored."""
    try:
        return image.getexif().get(ORIENTATION) in range(2, 9)
    except Exception:  # a damaged EXIF block says nothing against the pixels
        return False
