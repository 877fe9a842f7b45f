"""All kinds of good, unusual and bad image files, compared with Pillow's pixels."""

import io
import struct
import zlib

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from imagenet_dali.images import BadImageError, convert_image
from imagenet_dali.testing import encode, gradient, jpeg, with_dimensions, with_flipped_bit

EXIF_ROTATED = 6  # the camera was turned: the picture must be rotated by 90 degrees clockwise


def mean_difference(data: bytes, expected: Image.Image) -> float:
    found = np.asarray(Image.open(io.BytesIO(data)), dtype=float)
    return float(np.abs(found - np.asarray(expected.convert("RGB"), dtype=float)).mean())


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


BROKEN_EXIF = b"Exif\0\0II*\0\xff\xff\xff\xff"  # says nothing against the pixels


@pytest.mark.parametrize(
    "options",
    [{}, {"progressive": True}, {"subsampling": 0}, {"exif": exif(1)}, {"exif": BROKEN_EXIF}, {"quality": 30}],
)
def test_rgb_jpeg_passes_byte_for_byte(options):
    data = jpeg(**options)
    image = convert_image(data)
    assert (image.data, image.height, image.width, image.converted) == (data, 24, 40, False)


WORDS = np.linspace(0, 65535, 40).astype(np.uint16)[None].repeat(24, 0)
RAMP = Image.fromarray((WORDS / 257).astype(np.uint8))  # 16 bits are scaled, not clipped
ROTATED = gradient().transpose(Image.Transpose.ROTATE_270)
PALETTE = gradient().quantize(64)
FRAMES = dict(save_all=True, append_images=[gradient(seed=1)])
ODD = {
    "gray JPEG": (encode(gradient().convert("L")), gradient().convert("L")),
    "CMYK JPEG": (encode(gradient().convert("CMYK")), gradient()),
    "rotated by EXIF": (jpeg(exif=exif(EXIF_ROTATED)), ROTATED),
    "PNG": (encode(gradient(), "PNG"), gradient()),
    "PNG with alpha": (encode(gradient().convert("RGBA"), "PNG"), gradient()),
    "PNG with transparent palette": (encode(PALETTE, "PNG", transparency=bytes(range(64))), PALETTE),
    "one-bit PNG": (encode(gradient().convert("1"), "PNG"), gradient().convert("1")),
    "WebP": (encode(gradient(), "WEBP", lossless=True), gradient()),
    "PPM": (encode(gradient(), "PPM"), gradient()),
    "TIFF": (encode(gradient(), "TIFF"), gradient()),
    "PNG of several frames": (encode(gradient(), "PNG", **FRAMES), gradient()),
    "PNG of gray and alpha": (encode(gradient().convert("LA"), "PNG"), gradient().convert("L")),
    "16-bit PNG": (encode(Image.fromarray(WORDS), "PNG"), RAMP),
    "16-bit TIFF, big-endian": (encode(Image.fromarray(WORDS.astype(">u2")), "TIFF"), RAMP),
    "16-bit PPM": (b"P6 40 24 65535\n" + WORDS.astype(">u2")[..., None].repeat(3, -1).tobytes(), RAMP),
    "1x1 PNG": (encode(gradient(1, 1), "PNG"), gradient(1, 1)),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_image_becomes_an_upright_rgb_jpeg(name):
    data, expected = ODD[name]
    image = convert_image(data)
    assert image.converted
    assert simplejpeg.decode_jpeg_header(image.data) == (image.height, image.width, "YCbCr", "444")
    assert (image.width, image.height) == expected.size
    assert not Image.open(io.BytesIO(image.data)).getexif()
    limit = 12 if name == "one-bit PNG" else 3  # dithering is hard for JPEG
    assert mean_difference(image.data, expected) < limit


def test_short_side_shrinks_only_larger_images():
    assert convert_image(jpeg(24, 40), short_side=24).data == jpeg(24, 40)
    image = convert_image(jpeg(60, 101), short_side=30)
    assert (image.height, image.width, image.converted) == (30, 50, True)
    assert mean_difference(image.data, gradient(60, 101).resize((50, 30), Image.Resampling.BOX)) < 3


def png_of_bits(side: int, bytes_that_are_there: int) -> bytes:
    """Return a black and white PNG of ``side`` x ``side`` pixels, whose data may be incomplete."""
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    chunks = (b"IHDR" + header, b"IDAT" + zlib.compress(bytes(bytes_that_are_there)), b"IEND")
    framed = (struct.pack(">I", len(data) - 4) + data + struct.pack(">I", zlib.crc32(data)) for data in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


LARGE = jpeg(200, 200)
BAD = {
    "empty": (b"", "empty file"),
    "zeros": (bytes(1000), "not one of JPEG"),
    "an error page": (b"<html>404</html>", "not one of JPEG"),
    "GIF": (encode(gradient(), "GIF"), "not one of JPEG"),
    "a PostScript program": (encode(gradient(), "EPS"), "not one of JPEG"),
    "a magic number alone": (b"\xff\xd8\xff", "JPEG"),
    "JPEG cut in its data": (LARGE[:-200], "Premature end of JPEG file"),
    "JPEG without its last byte": (LARGE[:-1], "Premature end of JPEG file"),
    "JPEG that lost bytes": (LARGE[:-600] + LARGE[-575:], "Corrupt JPEG data"),
    "JPEG that says it is larger": (with_dimensions(jpeg(), 240, 400), "premature end of data"),
    "JPEG that says it is smaller": (with_dimensions(jpeg(), 8, 8), "extraneous bytes"),
    "JPEG that says it has 400 million pixels": (with_dimensions(jpeg(), 20_000, 20_000), "more than 100 million"),
    "PNG cut": (encode(gradient(), "PNG")[:-40], "Truncated"),
    "PNG with a flipped bit": (with_flipped_bit(encode(gradient(), "PNG"), 80), "checksum"),
    "PNG that decodes to 144 million pixels": (png_of_bits(12_000, 18_012_000), "100 million pixels"),
    "TIFF cut": (encode(gradient(), "TIFF")[:-400], "truncated"),
    "WebP cut": (encode(gradient(), "WEBP")[:-40], "decoder"),
    "TIFF of floats": (encode(Image.new("F", (4, 4)), "TIFF"), "32-bit pixels"),
    "too wide for JPEG": (encode(Image.new("RGB", (70_000, 1)), "PNG"), "65500"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_image_is_refused_with_a_reason(kind):
    data, reason = BAD[kind]
    with pytest.raises(BadImageError, match=reason) as caught:
        convert_image(data)
    assert "\n" not in str(caught.value)
