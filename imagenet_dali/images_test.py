"""Every kind of good, odd and bad image file, against Pillow's view of the pixels."""

import io
import struct

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from imagenet_dali.images import BadImageError, check_jpeg, convert_image

EXIF_ROTATED = 6  # the camera was turned: the picture must be rotated by 90 degrees clockwise


def gradient(height: int = 24, width: int = 40, seed: int = 0) -> Image.Image:
    """A smooth colour picture, so that JPEG hardly changes it and any wrong rotation or channel shows."""
    y, x = np.mgrid[0:height, 0:width]
    pixels = np.stack([x * 255 / width, y * 255 / height, np.full_like(x, (40 + 83 * seed) % 256)], -1)
    return Image.fromarray(pixels.astype(np.uint8))


def encode(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def jpeg(height: int = 24, width: int = 40, seed: int = 0, **options: object) -> bytes:
    return encode(gradient(height, width, seed), **options)


def with_dimensions(data: bytes, height: int, width: int) -> bytes:
    """Overwrite the dimensions in the start-of-frame segment of a baseline JPEG."""
    start = data.index(b"\xff\xc0") + 5
    return data[:start] + struct.pack(">HH", height, width) + data[start + 4 :]


def mean_difference(data: bytes, expected: Image.Image) -> float:
    found = np.asarray(Image.open(io.BytesIO(data)), dtype=float)
    return float(np.abs(found - np.asarray(expected.convert("RGB"), dtype=float)).mean())


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"exif": exif(1)}, {"quality": 30}])
def test_rgb_jpeg_passes_byte_for_byte(options):
    data = jpeg(**options)
    image = convert_image(data)
    assert (image.data, image.height, image.width, image.converted) == (data, 24, 40, False)


def test_damaged_exif_does_not_count_against_the_pixels():
    data = jpeg(exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert convert_image(data).data == data


ODD = {
    "gray JPEG": (encode(gradient().convert("L")), gradient().convert("L")),
    "CMYK JPEG": (encode(gradient().convert("CMYK")), gradient()),
    "RGB colour space JPEG": (jpeg(keep_rgb=True, subsampling=0), gradient()),
    "rotated by EXIF": (jpeg(exif=exif(EXIF_ROTATED)), gradient().transpose(Image.Transpose.ROTATE_270)),
    "PNG": (encode(gradient(), "PNG"), gradient()),
    "PNG with alpha": (encode(gradient().convert("RGBA"), "PNG"), gradient()),
    "PNG with palette": (encode(gradient().quantize(64), "PNG"), gradient().quantize(64)),
    "PNG with transparent palette": (
        encode(gradient().quantize(64), "PNG", transparency=bytes(range(64))),
        gradient().quantize(64),
    ),
    "PNG rotated by EXIF": (
        encode(gradient(), "PNG", exif=exif(EXIF_ROTATED)),
        gradient().transpose(Image.Transpose.ROTATE_270),
    ),
    "one-bit PNG": (encode(gradient().convert("1"), "PNG"), gradient().convert("1")),
    "WebP": (encode(gradient(), "WEBP", lossless=True), gradient()),
    "BMP": (encode(gradient(), "BMP"), gradient()),
    "PPM": (encode(gradient(), "PPM"), gradient()),
    "TIFF": (encode(gradient(), "TIFF"), gradient()),
    "TIFF rotated": (
        encode(gradient(), "TIFF", tiffinfo={274: EXIF_ROTATED}),
        gradient().transpose(Image.Transpose.ROTATE_270),
    ),
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
    limit = 12 if name in ("one-bit PNG", "PNG with palette") else 3  # dithering is hard for JPEG
    assert mean_difference(image.data, expected) < limit


def test_16_bit_gray_is_scaled_and_not_clipped():
    values = np.linspace(0, 65535, 40).astype(np.uint16)[None].repeat(24, 0)
    image = convert_image(encode(Image.fromarray(values), "PNG"))
    expected = Image.fromarray((values / 257).astype(np.uint8))
    assert mean_difference(image.data, expected) < 2


def test_short_side_shrinks_only_larger_images():
    assert convert_image(jpeg(24, 40), short_side=24).data == jpeg(24, 40)
    image = convert_image(jpeg(60, 101), short_side=30)
    assert (image.height, image.width, image.converted) == (30, 50, True)
    assert mean_difference(image.data, gradient(60, 101).resize((50, 30), Image.Resampling.BOX)) < 3


def broken_png() -> bytes:
    data = bytearray(encode(gradient(), "PNG"))
    data[data.index(b"IDAT") + 30] ^= 1
    return bytes(data)


def shifted_scan(data: bytes) -> bytes:
    middle = data.index(b"\xff\xda") + 40
    return data[:middle] + data[middle + 25 :]


BAD = {
    "empty": (b"", "empty file"),
    "zeros": (bytes(1000), "not one of JPEG"),
    "text": (b"<html>not found</html>", "not one of JPEG"),
    "GIF": (encode(gradient(), "GIF"), "not one of JPEG"),
    "only a magic number": (b"\xff\xd8\xff", "JPEG"),
    "cut in the header": (jpeg()[:100], "JPEG"),
    "cut in half": (jpeg(200, 200)[:-200], "Premature end of JPEG file"),
    "without its last byte": (jpeg()[:-1], "Premature end of JPEG file"),
    "bytes lost within": (shifted_scan(jpeg(200, 200)), "Corrupt JPEG data"),
    "header lies: larger": (with_dimensions(jpeg(), 240, 400), "premature end of data"),
    "header lies: smaller": (with_dimensions(jpeg(), 8, 8), "extraneous bytes"),
    "header lies: 20000x20000": (with_dimensions(jpeg(), 20000, 20000), "more than 100 million pixels"),
    "PNG cut": (encode(gradient(), "PNG")[:-40], "Truncated"),
    "PNG with a flipped bit": (broken_png(), "checksum"),
    "PNG decompression bomb": (encode(Image.new("1", (12_000, 12_000)), "PNG"), "more than 100 million pixels"),
    "PNG bomb that Pillow refuses itself": (encode(Image.new("1", (20_000, 20_000)), "PNG"), "bomb"),
    "BMP cut": (encode(gradient(), "BMP")[:-40], "truncated"),
    "TIFF cut": (encode(gradient(), "TIFF")[:-400], "truncated"),
    "WebP cut": (encode(gradient(), "WEBP")[:-40], "decoder"),
    "float TIFF": (encode(Image.new("F", (4, 4)), "TIFF"), "32-bit pixels"),
    "too wide for JPEG": (encode(Image.new("RGB", (70_000, 1)), "PNG"), "65500"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_image_is_refused_with_a_reason(name):
    data, reason = BAD[name]
    with pytest.raises(BadImageError, match=reason) as caught:
        convert_image(data)
    assert str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_truncation_of_a_jpeg_is_refused():
    data = jpeg(16, 16)
    accepted = []
    for length in range(len(data)):
        try:
            convert_image(data[:length])
            accepted.append(length)
        except BadImageError:
            pass
    assert accepted == []


def test_check_jpeg_returns_what_pillow_sees():
    assert check_jpeg(memoryview(jpeg())) == (24, 40, "YCbCr")
    assert check_jpeg(encode(gradient().convert("L"))) == (24, 40, "Gray")
    with pytest.raises(BadImageError, match="not a JPEG"):
        check_jpeg(encode(gradient(), "PNG"))
