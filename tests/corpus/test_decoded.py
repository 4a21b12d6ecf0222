"""Files that are decoded when batches are built, as if their arrays were stored; and pictures."""

import io
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps, PngImagePlugin

from pipeline import (
    Batches,
    Bucket,
    Corpora,
    Corpus,
    Decoded,
    Examples,
    Feature,
    Plan,
    patch_grid,
    patchify,
)
from pipeline.corpus.description import describe, make_corpus
from pipeline.history import read_history, write_history
from tests.loading.definition import require_defined

STORED = {
    "patch": Feature("inputs", to="patches"),
    "patch_image": Feature("patches", to="images"),
    "file_bytes": Feature("images", dtype="int32"),
    "files": Feature("files", dtype="uint8"),
}
MADE = {
    "values": Feature("patches", dtype="float32", shape=3),
    "place": Feature("patches", dtype="int32"),
}


def decode(content):
    """Three of each byte, and how far it is from the beginning."""
    values = np.frombuffer(content, np.uint8)
    return np.stack([values] * 3, axis=1), np.arange(len(values))


def draw(seed, examples=12, images=4, most=6):
    """Columns with files, and the same with the arrays that `decode` makes of them."""
    rng = np.random.default_rng(seed)
    columns = {name: [] for name in ("tokens", "weights", *STORED, *MADE)}
    for count in rng.integers(0, images, examples):
        sizes = rng.integers(1, most, count)
        files = rng.integers(0, 256, sizes.sum(), np.uint8)
        columns["tokens"].append(rng.integers(1, 99, rng.integers(2, 9)))
        columns["weights"].append(rng.integers(0, 3, len(columns["tokens"][-1])) == 0)
        places = rng.integers(-1, max(sizes.sum(), 0), len(columns["tokens"][-1]))
        columns["patch"].append(places)
        columns["patch_image"].append(np.arange(count).repeat(sizes))
        columns["file_bytes"].append(sizes)
        columns["files"].append(files)
        columns["values"].append(np.stack([files] * 3, axis=1))
        columns["place"].append(np.concatenate([[], *map(np.arange, sizes)]).astype(int))
    return columns


def examples_of(columns, features):
    names = ("tokens", "weights", *features)
    chosen = {name: columns[name] for name in names if name in columns}
    return Examples(chosen, features=features)


def stored(columns):
    """The same examples with decoded arrays."""
    return examples_of(columns, {k: v for k, v in (STORED | MADE).items() if k != "files"})


def plan_of(corpus):
    return Plan(corpus, [Bucket(2, {"inputs": 24, "patches": 48, "images": 9})], overflow="drop")


@settings(max_examples=25)
@given(seed=st.integers(0, 1 << 32))
def test_batches_are_those_of_stored_arrays(seed):
    columns = draw(seed)
    view = Decoded(examples_of(columns, STORED), decode, features=MADE)
    arrays = stored(columns)
    assert view.side_names == arrays.side_names == ("inputs", "patches", "images")
    np.testing.assert_array_equal(view.lengths, arrays.lengths)
    assert (view.silent.tolist(), view.num_learnt) == (arrays.silent.tolist(), arrays.num_learnt)
    plan = plan_of(arrays)
    assert plan_of(view).fingerprint == plan.fingerprint
    for made, expected in zip(Batches(view, plan), Batches(arrays, plan), strict=True):
        require_defined(made, expected)
    for number in range(len(view)):
        require_defined(view[number], arrays[number])


def test_splits_mixtures_and_pickled_copies_decode_alike():
    columns, others = draw(0, 40), draw(1, 20)
    of = {name: examples_of(each, STORED) for name, each in (("a", columns), ("b", others))}
    views = {name: Decoded(corpus, decode, features=MADE) for name, corpus in of.items()}
    arrays = {"a": stored(columns), "b": stored(others)}
    text = {"c": Examples([[5, 6, 7]] * 4)}
    for made, expected in (
        (views["a"].split(0.3)[0], arrays["a"].split(0.3)[0]),
        (Decoded(of["a"].split(0.3)[1], decode, features=MADE), arrays["a"].split(0.3)[1]),
        (Corpora(views | text), Corpora(arrays | text)),
        (pickle.loads(pickle.dumps(views["a"])), arrays["a"]),
    ):
        plan = plan_of(expected)
        for one, other in zip(Batches(made, plan), Batches(expected, plan), strict=True):
            require_defined(one, other)


def test_a_run_is_planned_again_without_the_function(tmp_path):
    columns = draw(4)
    chosen = {name: columns[name] for name in ("tokens", *STORED)}
    corpus = Corpus.from_arrays(chosen, tmp_path / "corpus", features=STORED)
    view = Decoded(corpus, decode, features=MADE)
    plan = plan_of(view)
    write_history(tmp_path, view, plan)
    again, planned = read_history(tmp_path)
    assert (again.fingerprint, planned.fingerprint) == (view.fingerprint, plan.fingerprint)
    assert make_corpus(describe(view)).lengths.tolist() == view.lengths.tolist()
    with pytest.raises(ValueError, match="only the fingerprint"):
        Batches(again, planned)[0]
    other = Decoded(corpus, lambda content: decode(content), features=MADE)
    state = iter(Batches(view, plan).to_iter_dataset()).get_state()
    with pytest.raises(ValueError, match="decode of decoded of patches"):
        iter(Batches(other, plan).to_iter_dataset()).set_state(state)


def strict(content):
    if not content:
        raise Image.DecompressionBombError("no bytes")
    return decode(content)


OTHER = "example 0 decodes to 3 values of"


@pytest.mark.parametrize(
    ("change", "function", "message"),
    [
        ({"patch_image": [[0, 0]]}, decode, f"{OTHER} patch_image, which are not the 2"),
        ({"file_bytes": [[1, 2]]}, decode, f"{OTHER} patch_image, which are not the 3"),
        ({"place": [[0, 1, 2]]}, decode, f"{OTHER} place, which are not the 3"),
        ({"file_bytes": [[3, 0]]}, strict, "example 0 .* no bytes; leave it out: exclude=.0.$"),
        ({}, lambda content: decode(content)[0], "decode gave 1 arrays for values, place"),
        ({}, lambda content: (decode(content)[0], [0]), r"place must have shape \(2,\)"),
        ({}, lambda content: (decode(content)[0] > 1, [0.5, 1]), "place cannot be cast"),
    ],
)
def test_a_file_with_other_values_than_its_header_said_names_the_example(change, function, message):
    columns = {"tokens": [[1, 2]], "patch": [[-1, -1]], "patch_image": [[0, 0, 1]]}
    columns |= {"file_bytes": [[2, 1]], "files": [[7, 8, 9]], **change}
    features = {"place": MADE["place"]} if "place" in change else {}
    view = Decoded(examples_of(columns, STORED | features), function, features=MADE)
    with pytest.raises(ValueError, match=message):
        view[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"files": "bytes"}, "no feature 'bytes'"),
        ({"files": "patch_image"}, "'patches'|a side of their own"),
        ({"features": {"values": Feature("images", dtype="uint8")}}, "one side that points to"),
        ({"features": {"values": Feature("patches")}}, "with dtypes"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Decoded(examples_of(draw(0), STORED), decode, **{"features": MADE, **options})


# ---- patches of pictures: as many as fit, with the aspect ratio, each pixel at its place


def encode(picture, kind, **options):
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


RNG = np.random.default_rng(0)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 16), st.integers(1, 50))
def test_the_grid_is_the_largest_that_keeps_the_aspect_ratio(height, width, patch, most):
    grid = patch_grid(np.zeros((height, width, 3), np.uint8), patch, most)
    assert math.prod(grid) <= most
    scales = {Fraction(1)}  # at which a row or a column is full
    for size in (height, width):
        scales |= {Fraction(count * patch, size) for count in range(1, size // patch + 1)}
    grids = [[math.ceil(scale * size / patch) for size in (height, width)] for scale in scales]
    if fitting := [grid for grid in grids if math.prod(grid) <= most]:
        assert [*grid] == max(fitting, key=math.prod)
    else:
        assert 1 in grid  # a strip


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
    assert (rows, columns, len(patches)) == (8, 12, 96)
    means = patches.reshape(-1, 256, 3).mean(axis=1)
    expected = (yx + 0.5) / (rows, columns) * 255
    np.testing.assert_allclose(means[:, :2], expected, atol=3)


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


XMP = """<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF
 xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><rdf:Description
 xmlns:tiff="http://ns.adobe.com/tiff/1.0/" {}</rdf:Description></rdf:RDF></x:xmpmeta>"""
SPELLINGS = 'tiff:Orientation="{}">', "><tiff:Orientation>{}</tiff:Orientation>"


def write_xmp(picture, kind, xmp, after):
    """The file of a picture, with XMP; in a PNG it may come after the pixels."""
    if kind != "PNG":
        return encode(
            picture, kind, xmp=xmp.encode(), **{"lossless": True} if kind == "WEBP" else {}
        )
    info = PngImagePlugin.PngInfo()
    info.add_itxt("XML:com.adobe.xmp", xmp)
    content = encode(picture, kind, pnginfo=info)
    if after:
        begin = content.index(b"iTXt") - 4
        end = begin + 12 + int.from_bytes(content[begin : begin + 4], "big")
        last = content.index(b"IEND") - 4
        content = content[:begin] + content[end:last] + content[begin:end] + content[last:]
    return content


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(
    ("kind", "after"), [("PNG", False), ("PNG", True), ("WEBP", False), ("JPEG", False)]
)
def test_a_picture_is_turned_as_its_xmp_says_if_its_exif_does_not(
    kind, after, orientation, spelling
):
    blocks = np.kron(RNG.integers(0, 256, (2, 6, 3), np.uint8), np.ones((8, 8, 1), np.uint8))
    picture, exif = Image.fromarray(blocks), Image.Exif()
    exif[0x0112] = orientation
    xmp = XMP.format(spelling.format(orientation))
    content = write_xmp(picture, kind, xmp, after)
    more = {"lossless": True} if kind == "WEBP" else {}
    same = encode(picture, kind, exif=exif, **more)
    for image in (content, Image.open(io.BytesIO(content))):
        np.testing.assert_array_equal(patchify(image, 16, 9)[0], patchify(same, 16, 9)[0])
        assert patch_grid(image, 16, 9) == patch_grid(same, 16, 9)
    other = XMP.format(spelling.format(9 - orientation))  # EXIF goes before it
    if kind == "WEBP":
        both = encode(picture, kind, exif=exif, xmp=other.encode(), **more)
        np.testing.assert_array_equal(patchify(both, 16, 9)[0], patchify(same, 16, 9)[0])


@pytest.mark.parametrize("tags", [{274: 6}, {700: XMP.format(SPELLINGS[0].format(6)).encode()}])
def test_a_tiff_is_turned_once_by_its_tag_or_its_xmp(tags):
    picture = Image.fromarray(RNG.integers(0, 256, (16, 48, 3), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    same = encode(picture, "PNG", exif=exif)
    content = encode(picture, "TIFF", tiffinfo={**tags})
    assert patch_grid(content, 16, 9) == patch_grid(same, 16, 9) == (3, 1)
    np.testing.assert_array_equal(patchify(content, 16, 9)[0], patchify(same, 16, 9)[0])


def test_exif_that_is_damaged_turns_no_picture():
    content = encode(Image.new("RGB", (32, 16)), "JPEG", exif=b"Exif\0\0garbage!!")
    assert patch_grid(content, 16, 9) == (1, 2)
    assert len(patchify(content, 16, 9)[0]) == 2


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1", "YCbCr"])
def test_pictures_of_other_colours_are_converted(mode):
    patches, _ = patchify(Image.new("RGB", (20, 20), "white").convert(mode), 10, 4)
    assert patches.shape == (4, 300)
    assert (patches == 255).all()


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((4, 4, 3)), r"the image is of float64 \(4, 4, 3\); give"),
        (np.zeros((3, 4, 4), np.uint8), r"the image is of uint8 \(3, 4, 4\); give"),
        (Image.new("F", (4, 4)), "mode 'F'"),
        (b"", "the image has 0 bytes; give"),
        (
            b"<html>403 forbidden</html>",
            "the image; its 26 bytes begin with b'<html>403 forbid'; g",
        ),
    ],
)
def test_what_is_no_picture_of_8_bits_is_refused(image, message):
    with pytest.raises((ValueError, OSError), match=message):
        patchify(image, 2, 4)
