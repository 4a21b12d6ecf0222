import itertools
import re

import pytest

from pipeline import Bucket, Plan, prepare, prepare_pairs, templates
from pipeline.cli.show import COLOURS, Shown, printable
from pipeline.text.sources import Records
from pipeline.text.tokenizers import Bytes


@pytest.fixture
def texts(tmp_path):
    """A corpus of three texts: lengths 6, 4 and 3 with an end mark."""
    source = Records(["banana", "plum", "fig"])
    return prepare(source, Bytes(begin=False), tmp_path / "corpus", progress=False)


@pytest.fixture
def shown(texts):
    """Two rows of 8: banana alone; plum and fig."""
    return Shown(texts, Plan(texts, [Bucket(2, 8)], shuffle=False), 0)


def test_a_small_batch_line_by_line(shown):
    assert list(shown.lines(width=50)) == [
        "step 0 (epoch 0, batch 0 of 1), 2 rows × 8 positions",
        "3 segments, 13 real positions, 18.75% padding, weights 13, digest " + shown.planned.digest,
        "",
        "row 0   ▕AAAAAA··▏ 6 of 8",
        "  A example 0, positions 0 to 5, weights 6: banana",
        "",
        "row 1   ▕AAAABBB·▏ 7 of 8",
        "  A example 1, positions 0 to 3, weights 4: plum",
        "  B example 2, positions 0 to 2, weights 3: fig",
    ]


def test_padding_between_aligned_segments_is_drawn(texts):
    shown = Shown(texts, Plan(texts, [Bucket(1, 12)], shuffle=False, align=4), 0)
    assert list(shown.lines(row=0))[3:] == [
        "row 0   ▕AAAAAA··BBBB▏ 10 of 12",
        "  A example 0, positions 0 to 5, weights 6, columns 0 on:",
        "banana",
        "  B example 1, positions 0 to 3, weights 4, columns 8 on:",
        "plum",
    ]


def test_a_piece_of_an_example_is_shown_with_its_positions(texts):
    plan = Plan(texts, [Bucket(1, 4)], shuffle=False)
    shown = (Shown(texts, plan, step).lines() for step in range(plan.num_batches()))
    assert "  A example 0, positions 4 to 5, weights 2: na" in [*itertools.chain(*shown)]


def test_each_segment_has_its_colour(shown):
    text = "\n".join(shown.lines(colour=True))
    assert f"\033[{COLOURS[0]}mAAAA\033[0m\033[{COLOURS[1]}mBBB\033[0m·" in text
    assert f"\033[{COLOURS[1]}mfig\033[0m" in text
    plain = re.sub(r"\033\[\d+m", "", text)
    assert plain == "\n".join(shown.lines())


def test_of_pairs_both_sides_of_a_row_are_shown(tmp_path):
    texts = (("ab", "xy"), ("defgh", "uvw"), ("c", "z"))
    source = Records([{"from": inputs, "to": targets} for inputs, targets in texts])
    options = {"fields": ("from", "to"), "progress": False}
    pairs = prepare_pairs(source, Bytes(), tmp_path / "pairs", **options)
    shown = Shown(pairs, Plan(pairs, [Bucket(2, (8, 8))], shuffle=False), 0)
    assert list(shown.lines(width=60)) == [
        "step 0 (epoch 0, batch 0 of 1), 2 rows × 8 + 8 positions",
        "3 segments, 23 real positions, 28.12% padding, weights 9, digest " + shown.planned.digest,
        "",
        "row 0   inputs ▕AAAAAAA·▏ 7 of 8",
        "  A example 1, positions 0 to 6: defgh",
        "row 0   targets ▕AAAA····▏ 4 of 8",
        "  A example 1, positions 0 to 3, weights 4: uvw",
        "",
        "row 1   inputs ▕AAAABBB·▏ 7 of 8",
        "  A example 0, positions 0 to 3: ab",
        "  B example 2, positions 0 to 2: c",
        "row 1   targets ▕AAABB···▏ 5 of 8",
        "  A example 0, positions 0 to 2, weights 3: xy",
        "  B example 2, positions 0 to 1, weights 2: z",
    ]


def test_text_cannot_command_the_terminal():
    assert printable("a\033[2Jb\r\nc\td") == "a\ufffd[2Jb\nc\td"


def test_text_with_loss_is_marked_and_ids_and_targets_are_printed_on_request(tmp_path):
    records = Records([{"q": "ab", "a": "xyz"}, {"q": "c", "a": "no"}])
    answer = templates.Answer(prompt="{q}?", answer="{a}")
    options = {"template": answer, "progress": False}
    corpus = prepare(records, Bytes(begin=False), tmp_path / "answers", **options)
    shown = Shown(corpus, Plan(corpus, [Bucket(1, 12)], shuffle=False), 0)
    end, (a, b, c, x, y, z, n, o, q) = corpus.tokenizer.end_id, ids_of("abcxyzno?")
    assert list(shown.lines(width=80, ids=True))[3:] == [
        "row 0   ▕aaAAAAbBBB··▏ 10 of 12",
        "  A example 0, positions 0 to 5, weights 4: ab?⟦xyz⟧",
        f"    inputs         {a} {b} {q} {x} {y} {z}",
        f"    targets        {b} {q} {x} {y} {z} {end}",
        "    loss_weights   0.0 0.0 1.0 1.0 1.0 1.0",
        "  B example 1, positions 0 to 3, weights 3: c?⟦no⟧",
        f"    inputs         {c} {q} {n} {o}",
        f"    targets        {q} {n} {o} {end}",
        "    loss_weights   0.0 1.0 1.0 1.0",
    ]


def ids_of(text):
    return [byte + 3 for byte in text.encode()]
