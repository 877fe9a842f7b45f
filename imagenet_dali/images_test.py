"""All kinds of good, unusual and bad image files, compared with Pillow's pixels."""

import io

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from imagenet_dali.images import BadImageError, convert_image
from imagenet_dali.testing import BAD_IMAGES, encode, gradient, jpeg

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
    "RGB colour space JPEG": (jpeg(keep_rgb=True, subsampling=0), gradient()),
    "rotated by EXIF": (jpeg(exif=exif(EXIF_ROTATED)), ROTATED),
    "PNG": (encode(gradient(), "PNG"), gradient()),
    "PNG with alpha": (encode(gradient().convert("RGBA"), "PNG"), gradient()),
    "PNG with palette": (encode(PALETTE, "PNG"), PALETTE),
    "PNG with transparent palette": (encode(PALETTE, "PNG", transparency=bytes(range(64))), PALETTE),
    "PNG rotated by EXIF": (encode(gradient(), "PNG", exif=exif(EXIF_ROTATED)), ROTATED),
    "one-bit PNG": (encode(gradient().convert("1"), "PNG"), gradient().convert("1")),
    "WebP": (encode(gradient(), "WEBP", lossless=True), gradient()),
    "BMP": (encode(gradient(), "BMP"), gradient()),
    "PPM": (encode(gradient(), "PPM"), gradient()),
    "TIFF": (encode(gradient(), "TIFF"), gradient()),
    "TIFF rotated": (encode(gradient(), "TIFF", tiffinfo={274: EXIF_ROTATED}), ROTATED),
    "PNG of several frames": (encode(gradient(), "PNG", **FRAMES), gradient()),
    "WebP of several frames": (encode(gradient(), "WEBP", lossless=True, **FRAMES), gradient()),
    "CMYK TIFF": (encode(gradient().convert("CMYK"), "TIFF"), gradient()),
    "PNG of gray and alpha": (encode(gradient().convert("LA"), "PNG"), gradient().convert("L")),
    "16-bit PNG": (encode(Image.fromarray(WORDS), "PNG"), RAMP),
    "16-bit TIFF": (encode(Image.fromarray(WORDS), "TIFF"), RAMP),
    "16-bit TIFF, big-endian": (encode(Image.fromarray(WORDS.astype(">u2")), "TIFF"), RAMP),
    "16-bit PGM": (b"P5 40 24 65535\n" + WORDS.astype(">u2").tobytes(), RAMP),
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
    limit = 12 if name in ("one-bit PNG", "PNG with palette") else 3  # dithering is hard for JPEG
    assert mean_difference(image.data, expected) < limit


def test_short_side_shrinks_only_larger_images():
    assert convert_image(jpeg(24, 40), short_side=24).data == jpeg(24, 40)
    image = convert_image(jpeg(60, 101), short_side=30)
    assert (image.height, image.width, image.converted) == (30, 50, True)
    assert mean_difference(image.data, gradient(60, 101).resize((50, 30), Image.Resampling.BOX)) < 3


@pytest.mark.parametrize("kind", BAD_IMAGES)
def test_bad_image_is_refused_with_a_reason(kind):
    build, reason = BAD_IMAGES[kind]
    for seed in range(3):
        with pytest.raises(BadImageError, match=reason) as caught:
            convert_image(build(seed))
        assert str(caught.value)
        assert "\n" not in str(caught.value)


def test_every_truncation_of_a_jpeg_is_refused():
    data = jpeg(16, 16)
    for length in range(len(data)):
        with pytest.raises(BadImageError):
            convert_image(data[:length])
