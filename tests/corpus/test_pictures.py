"""Patches of pictures: as many as fit, with the aspect ratio, each pixel at its place."""

import io
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from pipeline import patch_grid, patchify

RNG = np.random.default_rng(0)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 16), st.integers(1, 50))
def test_the_grid_is_the_largest_that_keeps_the_aspect_ratio(height, width, patch, most):
    found = patch_grid(np.zeros((height, width, 3), np.uint8), patch, most)
    assert math.prod(found) <= most
    scales = {Fraction(1)}  # at which a row or a column is full
    for size in (height, width):
        scales |= {Fraction(count * patch, size) for count in range(1, size // patch + 1)}
    grids = [[math.ceil(scale * size / patch) for size in (height, width)] for scale in scales]
    if fitting := [grid for grid in grids if math.prod(grid) <= most]:
        assert [*found] == max(fitting, key=math.prod)
    else:
        assert 1 in found  # a strip


def test_whole_patches_are_the_pixels_themselves():
    pixels = RNG.integers(0, 256, (32, 48, 3), np.uint8)
    patches, yx = patchify(pixels, 16, 6)
    assert (patches.shape, patches.dtype, yx.dtype) == ((6, 768), np.uint8, np.int32)
    for patch, (y, x) in zip(patches, yx.tolist(), strict=True):
        expected = pixels[16 * y : 16 * y + 16, 16 * x : 16 * x + 16]
        np.testing.assert_array_equal(patch.reshape(16, 16, 3), expected)


def test_a_shrunk_picture_looks_like_itself():
    y, x = np.mgrid[:600, :900]
    pixels = np.stack([y / 600, x / 900, 0 * x], axis=2) * 255
    content = encode(Image.fromarray(pixels.astype(np.uint8)), "JPEG", quality=95)
    rows, columns = patch_grid(content, 16, 100)
    patches, yx = patchify(content, 16, 100)
    assert (rows, columns) == (8, 12)
    means = patches.reshape(-1, 256, 3).mean(axis=1)
    expected = (yx + 0.5) / (rows, columns) * 255
    np.testing.assert_allclose(means[:, :2], expected, atol=3)


def encode(picture, kind, **options):
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_picture_is_turned_as_its_exif_says(orientation, kind):
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture = Image.fromarray(RNG.integers(0, 256, (16, 48, 3), np.uint8))
    content = encode(picture, kind, exif=exif)
    patches, yx = patchify(content, 16, 9)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(content)).convert("RGB"))
    expected, other = patchify(np.asarray(upright), 16, 9)
    np.testing.assert_array_equal(patches, expected)
    np.testing.assert_array_equal(yx, other)
    assert patch_grid(content, 16, 9) == ((3, 1) if orientation >= 5 else (1, 3))


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1", "YCbCr"])
def test_pictures_of_other_colours_are_converted(mode):
    patches, _ = patchify(Image.new("RGB", (20, 20), "white").convert(mode), 10, 4)
    assert patches.shape == (4, 300)
    assert (patches == 255).all()


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((4, 4), np.float32), "mode 'F'"),
        (Image.new("I;16", (4, 4)), "mode 'I;16'"),
        (b"\x89PNG\r\n", "cannot identify"),
    ],
)
def test_what_is_no_picture_of_8_bits_is_refused(image, message):
    with pytest.raises((ValueError, OSError), match=message):
        patchify(image, 2, 4)


@pytest.mark.parametrize("options", [{"patch": 0}, {"max_patches": 0}, {"patch": 1.5}])
def test_sizes_that_are_no_whole_numbers_are_refused(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} is"):
        patch_grid(np.zeros((4, 4, 3), np.uint8), **{"patch": 2, "max_patches": 4, **options})
