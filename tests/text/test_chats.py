"""Chats as they are stored: forms of turns, roles, weights of turns, and what is not rendered."""

import json
import re

import numpy as np
import pytest

from pipeline.corpus.preparing.preparation import prepare
from pipeline.text import source, templates
from pipeline.text.sources import JsonLines, Records
from pipeline.text.templates import Chat, Preference
from pipeline.text.tokenizers import Bytes
from pipeline.text.turns import WEIGHTS_OF_TURNS, read_turns

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
PLAIN = Chat(before="{role}:", after="|")
PARTS = [{"type": "text", "text": "H"}, {"type": "text", "text": b"i"}]


def pairs(turn):
    return [*turn.items()]


@pytest.mark.parametrize(
    "messages",
    [
        TURNS,
        np.array(TURNS),
        json.dumps(TURNS),
        json.dumps(TURNS).encode(),
        json.dumps(json.dumps(TURNS)),
        (TURNS[0], json.dumps(TURNS[1]).encode()),
        {"role": ["user", "assistant"], "content": ["Hi", "Yo"]},
        {"role": np.array(["user", "assistant"]), "content": ("Hi", "Yo")},
        json.dumps({"role": ["user", "assistant"], "content": ["Hi", "Yo"]}),
        [*map(pairs, TURNS)],
        json.dumps([*map(pairs, TURNS)]),
        [{key: value.encode() for key, value in turn.items()} for turn in TURNS],
        [{**TURNS[0], "content": PARTS}, TURNS[1]],
        [*read_turns({**TURNS[0], "content": PARTS}, "one"), TURNS[1]],
        [{**turn, "name": None, "tool_calls": [], "id": 5} for turn in TURNS],
    ],
)
def test_turns_are_read_in_every_form_in_which_they_are_stored(messages):
    spans = [("user:", 0), ("Hi|", 0), ("assistant:", 0), ("Yo|", 1)]
    assert PLAIN({"messages": messages}) == spans


def of(**fields):
    return [{**TURNS[0], **fields}]


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        (None, "its messages is null"),
        ("Hi", "its messages is the text 'Hi': it is not valid JSON"),
        ('[{"role": "user", "role": "user"}]', "its messages .*: it has the key 'role' twice"),
        ([], "its messages are empty"),
        (
            [[("role", "user"), ("role", "tool")]],
            "turn 0 of its messages: it has the key 'role' tw",
        ),
        ({"role": ["user"], "content": ["Hi", "Yo"]}, "dict of lists that are not equally long"),
        ([{"from": "human", "value": "Hi"}], r"has no 'role' \(its keys: from, value\); .* role="),
        (of(role=""), "the role of turn 0 of its messages is ''"),
        (of(role="User"), "has the role 'User', and a known role is 'user'; spell both alike"),
        (of(content=None), "the content of turn 0 of its messages is None; .* or give null=''"),
        (of(content=[{"type": "image", "url": "x"}]), "the content of turn 0 .* holds list"),
        (of(weight="0"), "the weight of turn 0 of its messages is '0'; it must be true, false"),
        (of(weight=-1), "the weight of turn 0 of its messages is -1"),
        (of(train=True, loss=0), "the weights of turn 0 of its messages differ"),
    ],
)
def test_other_forms_are_errors_that_name_the_turn(messages, sentence):
    with pytest.raises(ValueError, match=sentence):
        templates.fill(Chat(), {"messages": messages})


def learnt(chat, turns):
    return "".join(text for text, weight in chat({"messages": turns}) if weight)


@pytest.mark.parametrize("name", WEIGHTS_OF_TURNS)
def test_a_turn_may_say_whether_it_is_trained(name):
    def turns(*values):
        return [
            {**turn, name: value}
            for turn, value in zip([TURNS[0], TURNS[1]] * 2, values, strict=True)
        ]

    assert learnt(PLAIN, turns(None, False, None, True)) == "Yo|"
    assert learnt(PLAIN, turns(None, 0, float("nan"), 1)) == "Yo|"
    assert learnt(PLAIN, turns(None, np.bool_(False), None, np.float32(1))) == "Yo|"
    assert learnt(PLAIN, turns(True, None, 0, 0.0)) == "Hi|Yo|"  # the first role has no weight
    half = Chat(before="", after="", weights={"assistant": 0.5})
    weights = [weight for _, weight in half({"messages": turns(0.5, 2, None, True)})]
    assert weights == [0, 0.5, 0, 1.0, 0, 0, 0, 0.5]
    keys = Chat(before="", after="", content=name)
    assert learnt(keys, [{"role": "assistant", name: "x"}]) == "x"  # it is the content itself


def test_the_last_answer_may_be_the_only_one_with_loss():
    last = Chat(before="", after="", last_only=True)
    assert learnt(last, [*TURNS, TURNS[0], {**TURNS[1], "content": "Bye"}, TURNS[0]]) == "Bye"
    assert learnt(last, [TURNS[1], {**TURNS[1], "content": "Bye", "train": False}]) == "Yo"
    assert learnt(last, TURNS[:1]) == ""


def test_roles_that_have_a_weight_are_known_as_they_are_spelt():
    keys = Chat(before="", after="", role="from", content="value")
    assert learnt(keys, [{"from": "assistant", "value": "x"}]) == "x"
    gpt = Chat(before="{role}:", after="", weights={"Assistant": 1.0, "gpt": 1.0})
    assert learnt(gpt, [{"role": "Assistant", "content": "a"}, {"role": "gpt", "content": "b"}])
    for role, near in (("assistant", "Assistant"), ("GPT", "gpt")):
        with pytest.raises(ValueError, match=f"the role '{role}', and a known role is '{near}'"):
            gpt({"messages": [{"role": role, "content": "a"}]})


def test_what_a_template_does_not_render_is_counted_or_refused(tmp_path, caplog):
    call = [{"function": {"name": "f"}}]
    records = [
        {"messages": TURNS},
        {"messages": [*of(reasoning="hm"), {**TURNS[1], "tool_calls": call}] * 2},
        {"messages": [*TURNS, {**TURNS[1], "tool_calls": call, "refusal": ""}]},
    ]
    for workers in (0, 2):
        caplog.clear()
        place = tmp_path / str(workers)
        prepare(Records(records), Bytes(), place, template=PLAIN, num_workers=workers)
        reasons, calls = (record.message for record in caplog.records)
        said = "in a sample, {} of 3 .*'{}', which the .*; the first: record 1: turn {}"
        assert re.match(said.format(1, "reasoning", 0), reasons)
        assert re.match(said.format(2, "tool_calls", 1), calls)
    both = Preference(chosen=PLAIN, rejected="no")
    prepare(Records(records[1:]), Bytes(), tmp_path / "groups", template=both)
    assert "2 of 2 records have turns with 'tool_calls'" in caplog.text
    strict = Chat(unknown="error")
    assert learnt(strict, TURNS)
    for field in ({"system": "Be brief."}, {"tools": "[{}]"}):
        with pytest.raises(ValueError, match=r"it has '(system|tools)' .* does not render; remove"):
            strict({"messages": TURNS, **field})
        caplog.clear()
        source, place = Records([{"messages": TURNS, **field}]), tmp_path / f"{field}"
        prepare(source, Bytes(), place, template=PLAIN)
        assert "1 of 1 record have a field '" in caplog.text
    assert strict({"messages": TURNS, "system": None, "tools": "", "functions": []})
    with pytest.raises(ValueError, match=r"turn 0 of its messages has 'reasoning' .* remove it"):
        strict(records[1])


VALUES = (0, False, 0.0, True, 0.5, "x", ["x"], {"a": 1}, {"a": [None, 0]})


@pytest.mark.parametrize("value", VALUES)
def test_a_field_that_is_not_rendered_is_counted_whatever_its_value_is(value, tmp_path, caplog):
    for messages, about, place in (
        (of(mask=value), "turns with 'mask'", "turn 0 of its messages has"),
        (
            [{**TURNS[0], "content": [{**PARTS[0], "mask": value}]}],
            "parts with 'mask'",
            "a part of",
        ),
    ):
        caplog.clear()
        records = Records([{"messages": [*messages, TURNS[1]]}])
        prepare(records, Bytes(), tmp_path / f"{value} {about}", template=PLAIN, progress=False)
        (line,) = (record.getMessage() for record in caplog.records)
        assert line.startswith(f"in a sample, 1 of 1 record have {about}, which the template does")
        assert f"{place}" in line
        assert repr(value) in line
        with pytest.raises(ValueError, match=f"has 'mask' .*{re.escape(repr(value))}.* remove it"):
            Chat(unknown="error")({"messages": messages})


@pytest.mark.parametrize(
    ("role", "is_said"), [("chatgpt", True), ("human", False), ("tool", False)]
)
def test_a_role_that_is_not_known_is_said(role, is_said, tmp_path, caplog):
    records = Records([{"messages": [{"role": role, "content": "Hi"}, TURNS[1]]}] * 3)
    prepare(records, Bytes(), tmp_path / "c", template=PLAIN, progress=False)
    said = "3 of 3 records have turns of a role that is not known and has no weight; the first: rec"
    assert (said in caplog.text, role in caplog.text) == (is_said, is_said)
    caplog.clear()
    weighed = Chat(before="{role}:", after="|", weights={role: 1.0})
    prepare(records, Bytes(), tmp_path / "d", template=weighed, progress=False)
    assert not caplog.text


def test_an_answer_without_text_that_is_learnt_is_said(tmp_path, caplog):
    said = (
        "have an answer without text, so a model learns to say nothing; the first: record 0: turn 1"
    )
    for number, turn in enumerate(
        ({"content": " \n"}, {"content": None}, {"content": "", "train": False})
    ):
        caplog.clear()
        records = Records([{"messages": [TURNS[0], {"role": "assistant", **turn}, TURNS[1]]}] * 3)
        template = Chat(before="{role}:", after="|", null="")
        prepare(records, Bytes(), tmp_path / f"{number}", template=template, progress=False)
        assert (said in caplog.text) == ("train" not in turn)


def test_a_prompt_without_text_and_a_weight_that_may_be_a_measured_loss_are_said(tmp_path, caplog):
    asked, answered = TURNS[:2]
    for number, (turns, said) in enumerate(
        (
            (
                [{**asked, "content": ""}, answered],
                "a prompt without text, so .*: record 0: turn 0",
            ),
            (
                [asked, {**answered, "loss": 1.87}],
                "turns whose 'loss' is a number .* turn 1 .* 1.87",
            ),
            (
                [asked, {**answered, "train": 0.5}],
                "turns whose 'train' is a number other than 0 and",
            ),
            ([{"role": "system", "content": ""}, *TURNS], None),
            ([asked, {**answered, "weight": 1.87}], None),
            ([{**asked, "loss": False}, {**answered, "loss": 1.0}], None),
        )
    ):
        caplog.clear()
        template = Chat(before="{role}:", after="|")
        records = Records([{"messages": turns}])
        prepare(records, Bytes(), tmp_path / f"{number}", template=template, progress=False)
        assert len(caplog.records) == bool(said), caplog.text
        assert not said or re.search(f"1 of 1 record have {said}", caplog.text)


def test_nulls_and_what_is_empty_say_nothing():
    strict = Chat(unknown="error")
    for value in (
        None,
        "",
        [],
        {},
        float("nan"),
        {"name": None, "arguments": None},
        np.zeros((0, 2)),
    ):
        assert strict({"messages": of(mask=value)})
    with pytest.raises(
        ValueError, match=r"turn 0 of its messages has 'mask' \(array\(0\.\)\), which"
    ):
        strict({"messages": of(mask=np.array(0.0))})


def test_parts_of_a_content_are_texts_and_null_stands_for_those_without():
    none = {"type": "text", "text": None}
    for content in ([], [none]):
        with pytest.raises(
            ValueError, match=r"turn 0 of its messages is (null|\[\]).* give .*null=''"
        ):
            PLAIN({"messages": of(content=content)})
        assert Chat(before="", after="", null="")({"messages": of(content=content)})[1] == ("", 0)
    for part in ({"type": "image", "image": "a.png"}, "Hi", None):
        with pytest.raises(
            ValueError, match=r"content of turn 0 .*and each part must be {'type': '"
        ):
            PLAIN({"messages": of(content=[PARTS[0], part])})


def test_records_with_notes_cost_no_further_reading(tmp_path, monkeypatch, caplog):
    turns = [{"role": "assistant", "content": "Hi", "reasoning": "why"}]
    (tmp_path / "a.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 3)
    monkeypatch.setattr(source, "count_lines", None)  # each call reads up to the record
    chats = JsonLines(tmp_path / "a.jsonl")
    prepare(chats, Bytes(), tmp_path / "c", template=Chat(), progress=False)
    assert "3 of 3 records have turns with 'reasoning'" in caplog.text
    assert f"the first: {tmp_path}/a.jsonl, byte 0: turn 0 of its messages" in caplog.text
