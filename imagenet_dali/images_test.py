"""All kinds of good, unusual and bad image files, compared with Pillow's pixels."""

import io

import numpy as np
import pytest
import simplejpeg
from PIL import Image, ImageOps

from common.data.decoding import decode_image
from common.shards.tfrecord_format import BadSampleError
from common.shards.writer import convert_image
from common.testing.photographs import noise_image
from imagenet_dali.testing import encode, gradient, jpeg, with_flipped_bit


def mean_difference(data: bytes, expected: Image.Image) -> float:
    found = np.asarray(Image.open(io.BytesIO(data)), dtype=float)
    pixels = np.asarray(expected.convert("RGB"), dtype=float)
    return float(np.abs(found - pixels).mean())


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


BROKEN_EXIF = b"Exif\0\0II*\0\xff\xff\xff\xff"  # says nothing against the pixels


@pytest.mark.parametrize(
    "options",
    [
        {"progressive": True},
        {"subsampling": 0},
        {"exif": exif(1)},
        {"exif": BROKEN_EXIF},
    ],
)
def test_rgb_jpeg_passes_byte_for_byte(options):
    data = jpeg(**options)
    assert convert_image(data) == (data, 24, 40)


ROW = np.linspace(0, 65535, 40).astype(np.uint16)
WORDS = ROW[None].repeat(24, 0)
RAMP = Image.fromarray((WORDS / 257).astype(np.uint8))  # 16 bits are scaled, not clipped
GOOD = jpeg(subsampling=0)
START = b"\xff\xda"
END = b"\xff\xd9"
# Of these libjpeg only warns.
EDITS = {
    "bytes before the end marker": (END, bytes(65) + END),
    "JFIF revision 0": (b"JFIF\0\1", b"JFIF\0\0"),
    "bad ICC marker": (START, b"\xff\xe2\0\x10ICC_PROFILE\0\1\2" + START),
    "bytes between segments": (b"\xff\xdb", b"\0\1\xff\0\2\xff\xdb"),
}
WARNED = {name: GOOD.replace(*edit) for name, edit in EDITS.items()}
HEADER = GOOD[: GOOD.index(START) + 14]
FLAT = HEADER + b"\x28\xa0\0" * 9 + END  # 3 bytes for 2, 1 and 2 blocks
WARNED["unusual subsampling"] = FLAT.replace(
    b"\1\x11\0\2\x11\1\3\x11\1",
    b"\1\x21\0\2\x11\1\3\x21\1",
)
WORDS_BE = WORDS.astype(">u2")
PPM = b"P6 40 24 65535\n" + WORDS_BE[..., None].repeat(3, -1).tobytes()
TIFF = encode(Image.fromarray(WORDS), "TIFF")
PHOTOMETRIC = b"\6\1\3\0\1\0\0\0"
# orientation 6, and a resolution unit of another type, which Pillow cannot write
ODD_EXIF = (
    b"Exif\0\0II*\0\x08\0\0\0\2\0"
    b"\x12\1\3\0\1\0\0\0\6\0\0\0\x28\1\x09\0\1\0\0\0\xff\xff\xff\xff\0\0\0\0"
)
TWELVE_BITS = TIFF.replace(
    b"\2\1\3\0\1\0\0\0\x10",
    b"\2\1\3\0\1\0\0\0\x0c",
).replace(WORDS.tobytes(), b"\xab\xca\xbc" * 640)
# The content of a file, and the image that it shows.
ODD = {
    "rotated by EXIF with an odd tag": (
        jpeg(exif=ODD_EXIF),
        gradient().transpose(Image.Transpose.ROTATE_270),
    ),
    "PNG with a long profile": (
        encode(gradient(), "PNG", icc_profile=bytes(2_000_000)),
        gradient(),
    ),
    "TIFF with white as 0": (
        TIFF.replace(PHOTOMETRIC + b"\1", PHOTOMETRIC + b"\0"),
        ImageOps.invert(RAMP),
    ),
    "12-bit TIFF": (
        TWELVE_BITS,
        Image.new("L", (40, 24), 0xAB),
    ),
    "CMYK JPEG": (
        encode(gradient().convert("CMYK")),
        gradient(),
    ),
    "rotated by EXIF": (
        jpeg(exif=exif(6)),
        gradient().transpose(Image.Transpose.ROTATE_270),
    ),
    "mirrored by EXIF": (
        jpeg(exif=exif(2)),
        gradient().transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    ),
    "PNG with alpha": (
        encode(gradient().convert("RGBA"), "PNG"),
        gradient(),
    ),
    "WebP": (
        encode(gradient(), "WEBP", lossless=True),
        gradient(),
    ),
    "16-bit PNG": (encode(Image.fromarray(WORDS), "PNG"), RAMP),
    "16-bit PPM": (PPM, RAMP),
}
for name, content in WARNED.items():
    ODD[name] = content, Image.open(io.BytesIO(content))


@pytest.mark.parametrize("name", ODD)
def test_odd_image_becomes_an_upright_rgb_jpeg(name):
    data, expected = ODD[name]
    image, height, width = convert_image(data)
    assert simplejpeg.decode_jpeg_header(image) == (height, width, "YCbCr", "444")
    assert (width, height) == expected.size
    pixels = Image.fromarray(decode_image(data))
    assert mean_difference(image, pixels) < 1.2
    assert mean_difference(encode(pixels, "PNG"), expected) < 2.5


def test_short_side_shrinks_only_larger_images():
    small = jpeg(24, 40)
    image, _, _ = convert_image(small, short_side=30)
    assert image == small
    noise = noise_image(60, 103)
    large = encode(noise, quality=95, subsampling=0)
    image, height, width = convert_image(large, short_side=30)
    assert (height, width) == (30, 52)
    expected = noise.resize((52, 30), Image.Resampling.LANCZOS)
    assert mean_difference(image, expected) < 4


BAD = {
    "a PostScript program": (encode(gradient(), "EPS"), "not one of JPEG"),
    "JPEG without its last byte": (jpeg()[:-1], "Premature end of JPEG file"),
    "JPEG without its last data, of which libjpeg says something else first": (
        WARNED["JFIF revision 0"][:-40] + END,
        "premature end of data segment",
    ),
    "JPEG without a restart marker": (
        encode(RAMP, restart_marker_blocks=1).replace(b"\xff\xd3", b""),
        "extraneous bytes before marker 0xd4",
    ),
    "12-bit JPEG": (GOOD.replace(b"\xff\xc0\0\x11\x08", b"\xff\xc1\0\x11\x0c"), "12 bits"),
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
    if kind != "too wide for JPEG":
        with pytest.raises((OSError, ValueError, SyntaxError)):
            decode_image(data)
