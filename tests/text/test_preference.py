"""The template of preferences: the prefix that both sides share, and two continuations."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import prepare, templates
from pipeline.text.sources import Records
from pipeline.text.templates import Chat, Preference
from pipeline.text.tokenizers import Bytes

CHATS = Preference(chosen=Chat(messages="chosen"), rejected=Chat(messages="rejected"))
PROMPTED = dataclasses.replace(CHATS, prompt=Chat(messages="prompt"))
NAN = float("nan")
PAIR = Preference(prompt="{q} ", chosen="{good}", rejected="{bad}")

TURNS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant"]), "content": st.text("ab", max_size=2)}
    ),
    max_size=4,
)


def turn(role, content):
    return {"role": role, "content": content}


def encode(template, records, tokenizer):
    """The tokens and weights of each node of each record."""
    filled = [templates.fill(template, record)["inputs"] for record in records]
    chunk = templates.encode(filled, tokenizer)
    ends = chunk.counts.cumsum()
    return [
        (chunk.flat[end - count : end].tolist(), chunk.weights[end - count : end].tolist())
        for end, count in zip(ends, chunk.counts, strict=True)
    ]


@given(TURNS, TURNS, TURNS, st.sampled_from([Bytes(), Bytes(end=False)]))
def test_prefix_and_side_are_the_tokens_of_the_whole_chat(shared, one, other, tokenizer):
    record = {"chosen": [*shared, *one], "rejected": [*shared, *other]}
    common = 0
    while record["chosen"][common : common + 1] == record["rejected"][common : common + 1] != []:
        common += 1
    rests = [record[name][common:] for name in ("chosen", "rejected")]
    learnt = [[turn for turn in rest if turn["role"] == "assistant"] for rest in rests]
    silent = not all(learnt) or not all(any(turn["content"] for turn in rest) for rest in rests)
    if silent or not (record["chosen"] and record["rejected"]):
        with pytest.raises(ValueError, match=r"are equal|are empty|is empty|without loss"):
            encode(CHATS, [record], tokenizer)
        return
    prefix, *sides = encode(CHATS, [record], tokenizer)
    assert not any(prefix[1])
    for name, side in zip(("chosen", "rejected"), sides, strict=True):
        alone = templates.encode([templates.fill(Chat(messages=name), record)["inputs"]], tokenizer)
        assert prefix[0] + side[0] == alone.flat.tolist()
        assert side[1] == alone.weights.tolist()[len(prefix[0]) :]
    # All turns in common are in it.
    turns = {"turns": record["chosen"][:common]}
    if common:
        spans = templates.fill(Chat(messages="turns"), turns)["inputs"]
        start = templates.encode([spans], Bytes(end=False)).flat.tolist()
        assert prefix[0][: len(start)] == start


QUESTION, YES, NO = turn("user", "?"), turn("assistant", "yes"), turn("assistant", "no")
ASKED = [QUESTION, YES]
ENDS = [[("yes<|end|>\n", 1.0)], [("no<|end|>\n", 1.0)]]
TEXTS = Preference(chosen="{a}", rejected="{b}")


@pytest.mark.parametrize(
    ("template", "record", "nodes"),
    [
        # A prompt and continuations, as lists of turns, or as JSON of them.
        (
            PROMPTED,
            {"prompt": [QUESTION], "chosen": [YES], "rejected": json.dumps([NO])},
            [[("<|user|>\n", 0), ("?<|end|>\n", 0), ("<|assistant|>\n", 0)], *ENDS],
        ),
        # One turn alone, after a prompt that is a text, whose words are no part of the sides.
        (
            dataclasses.replace(CHATS, prompt="{q}\n"),
            {"q": "?", "chosen": YES, "rejected": NO},
            [[("?\n", 0), ("<|assistant|>\n", 0)], *ENDS],
        ),
        (PAIR, {"q": "?", "good": "a b", "bad": "a c"}, [[("? ", 0)], [("a b", 1)], [("a c", 1)]]),
        # Two transcripts: the common words, up to white space.
        (
            TEXTS,
            {"a": "\n\nHuman: hi\n\nAssistant: Sure.", "b": "\n\nHuman: hi\n\nAssistant: Sorry."},
            [[("\n\nHuman: hi\n\nAssistant:", 0)], [(" Sure.", 1)], [(" Sorry.", 1)]],
        ),
        (Preference(chosen="{a}", rejected="no"), {"a": "b"}, [[("", 0)], [("b", 1)], [("no", 1)]]),
        (TEXTS, {"a": "ab", "b": "ac"}, [[("", 0)], [("ab", 1)], [("ac", 1)]]),
        (TEXTS, {"a": "a  b", "b": "a  c"}, [[("a", 0)], [("  b", 1)], [("  c", 1)]]),
        (TEXTS, {"a": "ab", "b": "a"}, [[("", 0)], [("ab", 1)], [("a", 1)]]),
        (TEXTS, {"a": " a", "b": " b"}, [[("", 0)], [(" a", 1)], [(" b", 1)]]),
    ],
)
def test_preferences_are_read_as_they_are_stored(template, record, nodes):
    assert template(record) == nodes


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 2], np.array([1, 2])),
        (1, np.int64(1)),
        (1.0, 1),
        (NAN, np.float32(NAN)),
        (np.zeros((2, 3)), np.zeros((3, 2)).T),
        ((1, 2), [1, 2]),
    ],
)
def test_sides_of_equal_values_are_equal_whatever_holds_these(one, other):
    sides = (lambda _, value=value: [("a", 1.0, {"n": value})] for value in (one, other))
    chosen, rejected = sides
    with pytest.raises(templates.LeftOut, match="a chosen and a rejected side that are equal"):
        Preference(chosen=chosen, rejected=rejected)({})


def test_equal_words_of_a_template_and_of_a_field_are_not_shared():
    template = Preference(chosen="<|a|> {a}", rejected="{b} {a}")
    assert template({"a": "x", "b": "<|a|>"})[0] == [("", 0.0)]


def test_marks_of_a_template_and_equal_text_of_a_user_are_no_common_prefix():
    def plain(record):
        return [("<|user|>\n", 0.0), ("Hi<|end|>\n", 1.0)]

    template = Preference(chosen=Chat(weights={"user": 1.0}), rejected=plain)
    prefix, *_ = template({"messages": [turn("user", "Hi")]})
    assert prefix == [("", 0.0)]
    one, other = (lambda _, n=n: [("a", 1.0, {"n": 5}), ("b", 1.0, {"n": n})] for n in (5, 6))
    prefix, *sides = Preference(chosen=one, rejected=other)({})
    assert prefix == [("a", 0.0, {"n": 5})]
    assert sides == [[("b", 1.0, {"n": 5})], [("b", 1.0, {"n": 6})]]


def two(record):
    return [[("a", 0.0)], [("b", 1.0)]]


@pytest.mark.parametrize(
    ("template", "record", "sentence"),
    [
        (PAIR, {"q": "?", "good": "a", "bad": "a"}, "rejected side that are equal"),
        (PAIR, {"q": "?", "good": "a", "bad": ""}, "have a side that is empty"),
        (Preference(chosen="{q}", rejected="{q} b"), {"q": "a"}, "or that ends where another"),
        (
            CHATS,
            {"chosen": [*ASKED, QUESTION], "rejected": ASKED},
            "ends where another one goes on",
        ),
        (CHATS, {"chosen": [*ASKED, QUESTION], "rejected": [*ASKED, NO]}, "a side without loss"),
    ],
)
def test_records_that_are_no_preference_are_refused(template, record, sentence):
    with pytest.raises(ValueError, match=sentence):
        templates.fill(template, record)


def test_a_template_of_groups_gives_as_many_nodes_as_it_says():
    two.nodes = 3
    with pytest.raises(ValueError, match="its attribute `nodes` is 3; return that many"):
        templates.fill(two, {})
    two.nodes = 2
    assert templates.fill(two, {})["inputs"] == [[("a", 0.0, {})], [("b", 1.0, {})]]


def test_a_prompt_that_the_sides_have_too_is_counted(tmp_path, caplog):
    chats = {"chosen": [QUESTION, YES], "rejected": [QUESTION, NO]}
    for number, (template, record, twice) in enumerate(
        [
            (PAIR, {"q": "Q", "good": "Q yes", "bad": "Q no"}, True),
            (PAIR, {"q": "Q", "good": "Q yes", "bad": "no"}, False),
            (PROMPTED, {"prompt": [QUESTION], **chats}, True),
            (PROMPTED, {"prompt": [turn("user", "r")], **chats}, False),
        ]
    ):
        caplog.clear()
        prepare(Records([record]), Bytes(), tmp_path / f"{number}", template=template)
        assert ("1 of 1 record have sides that begin with the prompt" in caplog.text) == twice
