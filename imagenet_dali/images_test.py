"""All kinds of good, unusual and bad image files, compared with Pillow's pixels."""

import io

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from common.data.image_folder import decode_image
from imagenet_dali.dataset import BadSampleError
from imagenet_dali.testing import encode, gradient, jpeg, with_flipped_bit
from imagenet_dali.writer import convert_image


def mean_difference(data: bytes, expected: Image.Image) -> float:
    found = np.asarray(Image.open(io.BytesIO(data)), dtype=float)
    return float(np.abs(found - np.asarray(expected.convert("RGB"), dtype=float)).mean())


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


BROKEN_EXIF = b"Exif\0\0II*\0\xff\xff\xff\xff"  # says nothing against the pixels


@pytest.mark.parametrize(
    "options", [{"progressive": True}, {"subsampling": 0}, {"exif": exif(1)}, {"exif": BROKEN_EXIF}]
)
def test_rgb_jpeg_passes_byte_for_byte(options):
    data = jpeg(**options)
    assert convert_image(data) == (data, 24, 40)


WORDS = np.linspace(0, 65535, 40).astype(np.uint16)[None].repeat(24, 0)
RAMP = Image.fromarray((WORDS / 257).astype(np.uint8))  # 16 bits are scaled, not clipped
ODD = {
    "CMYK JPEG": (encode(gradient().convert("CMYK")), gradient()),
    "rotated by EXIF": (jpeg(exif=exif(6)), gradient().transpose(Image.Transpose.ROTATE_270)),
    "PNG with alpha": (encode(gradient().convert("RGBA"), "PNG"), gradient()),
    "WebP": (encode(gradient(), "WEBP", lossless=True), gradient()),
    "16-bit PNG": (encode(Image.fromarray(WORDS), "PNG"), RAMP),
    "16-bit PPM": (
        b"P6 40 24 65535\n" + WORDS.astype(">u2")[..., None].repeat(3, -1).tobytes(),
        RAMP,
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_image_becomes_an_upright_rgb_jpeg(name):
    data, expected = ODD[name]
    image, height, width = convert_image(data)
    assert simplejpeg.decode_jpeg_header(image) == (height, width, "YCbCr", "444")
    assert (width, height) == expected.size
    assert mean_difference(image, expected) < 3


def test_short_side_shrinks_only_larger_images():
    assert convert_image(jpeg(24, 40), short_side=30)[0] == jpeg(24, 40)
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 103, 3), np.uint8))
    image, *size = convert_image(encode(noise, quality=95, subsampling=0), short_side=30)
    assert size == [30, 52]
    assert mean_difference(image, noise.resize((52, 30), Image.Resampling.LANCZOS)) < 4


BAD = {
    "a PostScript program": (encode(gradient(), "EPS"), "not one of JPEG"),
    "JPEG without its last byte": (jpeg()[:-1], "Premature end of JPEG file"),
    "JPEG that says it has 400 million pixels": (
        jpeg().replace(b"\0\x18\0\x28", b"N N "),
        "more than 100 million",
    ),
    "PNG with a flipped bit": (with_flipped_bit(encode(gradient(), "PNG"), 80), "checksum"),
    "TIFF of floats": (encode(Image.new("F", (4, 4)), "TIFF"), "32-bit pixels"),
    "too wide for JPEG": (encode(Image.new("RGB", (70_000, 1)), "PNG"), "65500"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_image_is_refused_with_a_reason(kind):
    data, reason = BAD[kind]
    with pytest.raises(BadSampleError, match=f"^not a readable image: .*{reason}"):
        convert_image(data)


def test_what_pillow_repairs_is_decoded():
    data = jpeg()
    assert np.array_equal(decode_image(data[:-2] + bytes(9) + data[-2:]), decode_image(data))
