"""Pictures: cut into patches, as many as their size and a limit allow, with their aspect ratio."""

import bisect
import contextlib
import io
import math
from typing import Any

import numpy as np

from pipeline.errors import InvalidValue, require, require_whole

# The tag that says how a camera was held; from 5 on, width and height are exchanged.
ORIENTATION, SIDEWAYS = 0x0112, 5
# What a PNG has that may say so, before its pixels or after them.
MARKS = b"eXIf", b"XML:com.adobe.xmp", b"Raw profile type exif"
WHOLE = 1 << 16  # the scale at which a picture keeps its size
BILINEAR = 2  # as Pillow numbers its filters
EXTRA = {"extra": "images", "purpose": "decoding pictures"}


def patch_grid(image: Any, patch: int, max_patches: int) -> tuple[int, int]:
    """The rows and columns of patches that `patchify` makes; of a file, only the header is read.

    >>> patch_grid(np.zeros((40, 100, 3), np.uint8), 16, 256)
    (3, 7)
    >>> patch_grid(np.zeros((400, 1000, 3), np.uint8), 16, 256)
    (10, 25)

    Arguments and errors are those of `patchify`.
    """
    picture, orientation = _open(image)
    return _fit(*_upright(picture.size, orientation), patch, max_patches)


def patchify(image: Any, patch: int, max_patches: int) -> tuple[np.ndarray, np.ndarray]:
    """The patches of a picture, row by row, and the row and column of each.

    The picture keeps its aspect ratio (NaFlex; Tschannen et al., 2025). It is enlarged until its
    last patches are full; if these are more than `max_patches`, it is shrunk.

    >>> patches, yx = patchify(np.zeros((20, 30, 3), np.uint8), 16, 256)
    >>> patches.shape, yx.tolist()
    ((4, 768), [[0, 0], [0, 1], [1, 0], [1, 1]])

    Args:
        image: the bytes of a file (JPEG, PNG, …), a picture of Pillow, or an array of uint8
            `[height, width, 3]`. It is turned as its EXIF says, or its XMP
            if EXIF does not. Transparency is ignored, and of an
            animation only the first picture is read.
        patch: the height and width of a patch, in pixels.
        max_patches: the most patches of a picture.

    Returns:
        uint8 `[patches, patch · patch · 3]`, pixels row by row; and int32 `[patches, 2]`.

    Errors are those of Pillow, which refuses files that are cut or have too many pixels; or a
    `ValueError` for what is no picture, or has more than 8 bits for each colour.
    """
    picture, orientation = _open(image)
    rows, columns = _fit(*_upright(picture.size, orientation), patch, max_patches)
    size = columns * patch, rows * patch
    width, height = _upright(size, orientation)[::-1]  # as it is stored
    picture.draft("RGB", (2 * width, 2 * height))  # a JPEG is shrunk while it is decoded
    if picture.mode != "RGB":
        picture = picture.convert("RGB")
    if orientation > 1:
        picture = require("PIL.ImageOps", **EXTRA).exif_transpose(picture)
    pixels = np.asarray(picture.resize(size, BILINEAR))
    cut = pixels.reshape(rows, patch, columns, patch, 3).swapaxes(1, 2)
    yx = np.stack(np.divmod(np.arange(rows * columns, dtype=np.int32), columns), axis=1)
    return cut.reshape(rows * columns, -1), yx


def _open(image: Any) -> tuple[Any, int]:
    """A picture of Pillow, whose pixels are not decoded yet, and its orientation, from 1 to 8."""
    pillow = require("PIL.Image", **EXTRA)
    picture: Any = image
    if isinstance(image, bytes):
        try:
            picture = pillow.open(io.BytesIO(image))
        except pillow.UnidentifiedImageError as error:
            raise InvalidValue(
                f"Pillow cannot identify the image; its {len(image):,} bytes begin with "
                f"{image[:16]!r}; give the bytes of a JPEG, PNG or the like"
                if image
                else "the image has 0 bytes; give the bytes of a JPEG, PNG or the like"
            ) from error
    elif isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.shape[2:] == (3,):
        picture = pillow.fromarray(image)
    if not isinstance(picture, pillow.Image) or 0 in picture.size:
        seen = f"of {image.dtype} {image.shape}" if isinstance(image, np.ndarray) else repr(image)
        raise InvalidValue(
            f"the image is {seen:.80}; give the bytes of a file, a picture of Pillow, or an array "
            "of uint8 [height, width, 3]"
        )
    orientation = _find_orientation(picture, image)
    if picture.mode[0] in "IF":
        raise InvalidValue(f"the image has the mode {picture.mode!r}; give 8 bits for each colour")
    return picture, orientation


def _find_orientation(picture: Any, image: Any) -> int:
    """The orientation from 1 to 8 by EXIF, or else by XMP, that Pillow has not applied.

    If marks may come after the pixels, these are decoded now.
    """
    if hasattr(picture, "tag_v2"):  # a TIFF, which Pillow turns; its size knows the tag alone
        if ORIENTATION not in picture.tag_v2 and "xmp" in picture.info:
            picture.load()
        return 1
    late = not isinstance(image, bytes) or any(mark in image for mark in MARKS)
    if picture.format == "PNG" and late:
        picture.load()
    pillow = require("PIL.Image", **EXTRA)
    with contextlib.suppress(SyntaxError):  # such as that of Pillow, if it is damaged
        # Not that of its class: for a PNG without EXIF, it decodes all pixels.
        orientation = pillow.Image.getexif(picture).get(ORIENTATION, 1)
        return orientation if orientation in range(1, 9) else 1
    return 1


def _upright(size: tuple[int, int], orientation: int) -> tuple[int, int]:
    """Height and width of a picture, upright, from the width and height that are stored."""
    width, height = size
    return (width, height) if orientation >= SIDEWAYS else (height, width)


def _fit(height: int, width: int, patch: int, max_patches: int) -> tuple[int, int]:
    """The rows and columns of patches at the largest scale up to 1 that has at most `max_patches`.

    In whole numbers, so that a header and its picture agree on any machine.
    """
    patch, most = require_whole("patch", patch, 1), require_whole("max_patches", max_patches, 1)

    def grid(scale: int) -> tuple[int, int]:
        rows, columns = (-(-size * scale // (patch * WHOLE)) for size in (height, width))
        return max(rows, 1), max(columns, 1)

    scales = range(WHOLE + 1)
    return grid(bisect.bisect(scales, most, key=lambda scale: math.prod(grid(scale))) - 1)
