import re

import numpy as np
import pytest

from pipeline import (
    Batches,
    Examples,
    Feature,
    Masked,
    Pairs,
    Plan,
    prepare,
    prepare_pairs,
    templates,
)
from pipeline.cli.show import COLOURS, Shown, printable
from pipeline.corpus import tasks
from pipeline.planning.bucket import Bucket
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


def test_each_segment_has_its_colour(shown):
    text = "\n".join(shown.lines(colour=True))
    assert f"\033[{COLOURS[0]}mAAAA\033[0m\033[{COLOURS[1]}mBBB\033[0m·" in text
    assert f"\033[{COLOURS[1]}mfig\033[0m" in text
    plain = re.sub(r"\033\[\d+m", "", text)
    assert plain == "\n".join(shown.lines())


def test_long_rows_are_drawn_in_as_many_letters_as_there_is_room_for():
    corpus = Examples([np.ones(length + 1, int) for length in (300, 100, 56)])
    plan = Plan(corpus, [Bucket(1, 512)], shuffle=False)
    lines = list(Shown(corpus, plan, 0).lines(width=88))
    strip = re.search("▕(.*)▏", lines[3]).group(1)
    assert len(lines[3]) == 88
    for letter, size in (("A", 300), ("B", 100), ("C", 56), ("·", 56)):
        assert abs(strip.count(letter) - size * len(strip) / 512) <= 1
    assert all(len(line) == 88 and line[-1] == "…" for line in lines[4:])  # of its text


@pytest.mark.parametrize("name", ["corpus", "pairs"])
def test_segments_are_read_back_from_the_arrays(name, buckets, request):
    data = request.getfixturevalue(name)
    shapes, overflow = (buckets, "split") if name == "corpus" else ([Bucket(8, (64, 48))], "drop")
    plan = Plan(data, shapes, overflow=overflow)
    for step in range(plan.num_batches()):
        shown, arrays = Shown(data, plan, step), Batches(data, plan)[step]
        for number, planned in enumerate(plan.batch(step).sides):
            tokens = arrays["decoder_inputs" if number else "inputs"]
            _, bucket, fields = shown.sides[number]
            assert bucket.shape == tokens.shape
            assert name == "pairs" or all((fields[each] == arrays[each]).all() for each in arrays)
            seen = []
            for row in range(bucket.rows):
                for each in shown.segments(row, number):
                    length = each.columns[1] - each.columns[0]
                    seen.append([row, each.example, each.positions[0], length])
                    assert each.positions[1] - each.positions[0] + 1 == length
                    np.testing.assert_array_equal(each.tokens, tokens[row, slice(*each.columns)])
            np.testing.assert_array_equal(seen, planned.segments)


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


def test_of_pairs_without_inputs_the_targets_alone_are_shown(tmp_path):
    targets = [[1, 2, 3, 4, 5, 6, 7], [1, 4]]
    pairs = Pairs.from_arrays([[], [5, 6]], targets, tmp_path, vocab_size=10)
    shown = Shown(pairs, Plan(pairs, [Bucket(1, (8, 8))], shuffle=False), 0)
    seen = [
        [(each.name, each.example, each.tokens.tolist()) for each in shown.segments(0, side)]
        for side in (0, 1)
    ]
    assert seen == [[("B", 1, [5, 6])], [("A", 0, [1, 2, 3, 4, 5, 6]), ("B", 1, [1])]]


def test_of_sides_of_arrays_a_line_is_shown():
    features = {"patches": Feature("patches", dtype="uint8")}
    columns = {"tokens": [[5, 6, 7], [8, 9, 5, 6]], "patches": [[1, 2], [3, 4, 5]]}
    examples = Examples(columns, features=features)
    plan = Plan(examples, [Bucket(1, {"inputs": 8, "patches": 8})], shuffle=False)
    assert list(Shown(examples, plan, 0).lines(width=60))[3:] == [
        "row 0   inputs ▕AAABB···▏ 5 of 8",
        "  A example 1, positions 0 to 2, weights 3: 8 9 5 6",
        "  B example 0, positions 0 to 1, weights 2: 5 6 7",
        "row 0   patches ▕AAABB···▏ 5 of 8",
    ]


def test_without_a_tokenizer_ids_are_shown():
    corpus = Examples([[5, 6, 7]])
    shown = Shown(corpus, Plan(corpus, [Bucket(1, 4)]), 0)
    assert list(shown.lines())[-1].endswith(": 5 6 7")


def test_letters_begin_again_after_z_and_rows_are_full_or_empty():
    corpus = Examples([[1, 2]] * 28)
    shown = Shown(corpus, Plan(corpus, [Bucket(2, 28)], shuffle=False), 0)
    full, empty = list(shown.lines(row=0)), list(shown.lines(row=1))
    assert full[3] == "row 0   ▕ABCDEFGHIJKLMNOPQRSTUVWXYZAB▏ 28 of 28"
    assert full[-1] == "1 2"
    assert empty[3:] == [f"row 1   ▕{28 * '·'}▏ 0 of 28", "  · padding, columns 0 on"]


def test_text_cannot_command_the_terminal():
    assert printable("a\033[2Jb\r\nc\td") == "a\ufffd[2Jb\nc\td"


def test_a_wrong_row_or_step_is_refused(shown, texts):
    with pytest.raises(ValueError, match="row is 2; bucket 2x8 has the rows 0 to 1"):
        list(shown.lines(row=2))
    with pytest.raises(ValueError, match="step is -1; steps count from 0"):
        Shown(texts, Plan(texts, [Bucket(2, 8)]), -1)


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


def test_what_is_masked_is_marked_in_place(tmp_path):
    records = Records(["the quick brown fox jumps"])
    options = {"task": tasks.INPUTS, "progress": False}
    corpus = prepare(records, Bytes(begin=False, end=False), tmp_path / "masked", **options)
    view = Masked(corpus, rate=0.3, mask_id=ids_of("_")[0], seed=1)
    shown = Shown(view, Plan(view, [Bucket(1, 32)], shuffle=False), 0)
    (segment,) = shown.segments(0)
    arrays = shown.sides[0][2]
    text = shown.text(segment)
    assert text.replace("⟦", "").replace("⟧", "") == corpus.tokenizer.decode(segment.tokens)
    marked = re.findall("⟦(.*?)⟧", text)
    assert sum(map(len, marked)) == np.count_nonzero(arrays["loss_weights"]) > 0
    assert "_" in "".join(marked)
