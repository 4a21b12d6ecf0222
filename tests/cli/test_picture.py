import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from pipeline import Bucket, Corpus, Examples, Pairs, Plan, prepare
from pipeline.cli.picture import GAP, MARGIN, WIDTH, draw
from pipeline.cli.show import Shown
from pipeline.text.sources import Records
from pipeline.text.tokenizers import Bytes

NAMES = {"svg": "http://www.w3.org/2000/svg"}


def texts(tmp_path, *records):
    return prepare(Records(records), Bytes(begin=False), tmp_path / "corpus", progress=False)


def rectangles(picture, kind):
    """Left edge, top, width of each rectangle whose class begins so, in pixels."""
    found = ElementTree.fromstring(picture).findall("svg:rect", NAMES)
    return [
        tuple(float(each.get(name)) for name in ("x", "y", "width"))
        for each in found
        if each.get("class").startswith(kind) and each.get("class") != "page"
    ]


def test_one_row_alone_can_be_drawn(corpus, buckets):
    shown = Shown(corpus, Plan(corpus, buckets), 0)
    last = shown.bucket.rows - 1
    assert len(rectangles(draw(shown, row=last), "row")) == 1
    assert len(rectangles(draw(shown, row=last), "c")) == len(shown.segments(last))
    with pytest.raises(ValueError, match="has the rows 0 to"):
        draw(shown, row=last + 1)


def test_positions_without_loss_are_pale(tmp_path):
    arrays = {"tokens": [[1, 2, 3, 4, 5]], "weights": [[0.0, 0.0, 1.0, 0.0, 1.0]]}
    corpus = Corpus.from_arrays(arrays, tmp_path / "corpus")
    shown = Shown(corpus, Plan(corpus, [Bucket(1, 8)], shuffle=False), 0)
    unit = (WIDTH - 2 * MARGIN) / 8
    weights = shown.sides[0][2]["loss_weights"][0]
    pale = [(left, width) for left, _, width in rectangles(draw(shown), "pale")]
    assert weights[:4].tolist() == [0, 1, 0, 1]
    assert pale == [
        (pytest.approx(MARGIN + column * unit, abs=0.1), pytest.approx(unit - 1, abs=0.1))
        for column in (0, 2)
    ]


def test_both_sides_of_pairs_are_drawn_in_one_line(tmp_path):
    pairs = Pairs.from_arrays([[5, 6, 7]], [[1, 4]], tmp_path, vocab_size=10)
    shown = Shown(pairs, Plan(pairs, [Bucket(1, (8, 4))], shuffle=False), 0)
    (first, top, width), (second, other_top, _) = rectangles(draw(shown), "row")
    assert top == other_top
    assert second == pytest.approx(first + width + 1 + GAP, abs=0.1)


def test_text_that_is_markup_or_controls_a_terminal_is_harmless(tmp_path):
    corpus = texts(tmp_path, "<script>&\x1b[31m\x00")
    shown = Shown(corpus, Plan(corpus, [Bucket(1, 32)], shuffle=False), 0)
    _, inside = ElementTree.fromstring(draw(shown)).findall("svg:text", NAMES)
    assert inside.text.startswith("<script>&")
    assert "\x1b" not in draw(shown)


def test_text_is_cut_to_the_width_of_its_segment(tmp_path):
    corpus = texts(tmp_path, "word " * 200, "a")
    shown = Shown(corpus, Plan(corpus, [Bucket(1, 1024)], shuffle=False), 0)
    _, *drawn = ElementTree.fromstring(draw(shown)).findall("svg:text", NAMES)
    assert [each.text[-1] for each in drawn] == ["…"]  # a letter has no room
    assert len(drawn[0].text) * 0.6 * float(drawn[0].get("font-size")) <= WIDTH


def test_rows_become_thin_when_there_are_many():
    corpus = Examples([np.ones(9, int)] * 1000)
    shown = Shown(corpus, Plan(corpus, [Bucket(1000, 8)], shuffle=False), 0)
    picture = ElementTree.fromstring(draw(shown))
    assert float(picture.get("height")) < 4200
    assert len(picture.findall("svg:text", NAMES)) == 1  # the caption
