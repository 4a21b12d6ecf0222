"""Shapes of published chat templates: each text is Jinja's own, and each answer is learnt."""

import json
import shutil

import pytest

jinja2 = pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")

from pipeline.corpus.preparing.preparation import prepare  # noqa: E402
from pipeline.errors import InvalidValue  # noqa: E402
from pipeline.text import sandbox  # noqa: E402
from pipeline.text.notes import collect_notes  # noqa: E402
from pipeline.text.omissions import NONE  # noqa: E402
from pipeline.text.regions import PROMPTED, REWRITTEN  # noqa: E402
from pipeline.text.sources import Records  # noqa: E402
from pipeline.text.templates import Chat, Jinja  # noqa: E402
from pipeline.text.tokenizers import HuggingFace  # noqa: E402
from tests.text.trained import train_bytes_pairs  # noqa: E402

MARKS = ["<|user|>", "<|bot|>", "<|end|>", "<|stop|>", "<|call|>", "<think>", "</think>"]


def user(content):
    return {"role": "user", "content": content}


def bot(content, **more):
    return {"role": "assistant", "content": content, **more}


def call(arguments, id="abcdef123"):
    function = {"name": "add", "arguments": arguments}
    return [{"id": id, "type": "function", "function": function}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    bare = train_bytes_pairs(["some text to train a tokenizer on"] * 9, MARKS)
    bare.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|stop|>"}')
    return HuggingFace(folder / "tokenizer.json", begin=False, end=False)


TURNS = "{% for m in messages %}<|{{ 'bot' if m.role == 'assistant' else m.role }}|>"
PROMPT = "{% if add_generation_prompt %}<|bot|>{% endif %}"
PLAIN = TURNS + "{{ m.content }}<|end|>{% endfor %}" + PROMPT
TALK = [user("a"), bot("b"), user("c"), bot("d")]
TOLD = [user("a"), bot("<think>x</think>b"), user("c"), bot("<think>y</think>d")]
# One end mark for a whole chat.
STOPPED = TURNS + "{{ m.content }}<|end|>\n{% endfor %}"
STOPPED += "{% if add_generation_prompt %}<|bot|>{% else %}{{ eos_token }}{% endif %}"
# The prompt opens the reasoning, which no answer keeps.
OPENED = TURNS + "{{ m.content.split('</think>')[-1] }}<|end|>{% endfor %}"
OPENED += "{% if add_generation_prompt %}<|bot|><think>\n{% endif %}"
# The last answer alone keeps its reasoning, or has an empty one.
LAST = TURNS + "{% set parts = m.content.split('</think>') %}{% if loop.last %}<think>"
LAST += "{{ parts[0].split('<think>')[-1] if parts | length > 1 else '' }}</think>{% endif %}"
LAST += "{{ parts[-1] }}<|end|>{% endfor %}" + PROMPT
# A chat must have a turn; the first may be a default one.
FIRST = "{% if messages[0].role != 'system' %}<|system|>Be good.<|end|>{% endif %}" + PLAIN
# No prompt at all: a space begins each answer.
BARE = "{% for m in messages %}{% if m.role == 'user' %}[U] {{ m.content }} [/U]{% else %}"
BARE += " {{ m.content }}<|end|>{% endif %}{% endfor %}"
# Calls with null contents, and arguments that are added to text.
ADDED = "{% for m in messages %}<|{{ 'bot' if m.role == 'assistant' else m.role }}|>"
ADDED += (
    "{% if 'tool_calls' in m %}{% if m.content is none %}{{ '<|call|>' }}{% else %}{{ m.content"
)
ADDED += " + '<|call|>' }}{% endif %}{% for c in m.tool_calls %}{{ c.function.name + "
ADDED += (
    "c.function.arguments }}{% endfor %}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
)
ADDED += PROMPT
# Arguments that must be objects.
ITEMS = ADDED.replace(
    "c.function.name + c.function.arguments", "c.function.arguments | items | list"
)
DUMPED = ADDED.replace(
    "c.function.name + c.function.arguments", "c.function | tojson(ensure_ascii=False)"
)
# A call needs the id of nine signs, and is refused without it.
NINE = ADDED.replace(
    "{{ c.function.name",
    "{% if c.id | length != 9 %}{{ raise_exception('nine signs') }}{% endif %}"
    "{{ c.id + c.function.name",
)
# What is generated: twice in a turn, and the end of the chat.
TWICE = (
    TURNS + "{% if m.role == 'assistant' %}{% generation %}({{ m.thought }}){% endgeneration %}: "
)
TWICE += "{% generation %}{{ m.content }}<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>"
TWICE += "{% endif %}{% endfor %}{% if not add_generation_prompt %}{% generation %}{{ eos_token }}"
TWICE += "{% endgeneration %}{% endif %}"
THOUGHT = [user("a"), bot("b", thought="x"), user("c"), bot("d", thought="y")]
ASKED = [user("a"), bot(None, tool_calls=call('{"n": 1}')), user("c"), bot("d")]

SHAPES = {
    "turns alike": (PLAIN, TALK, ["b<|end|>", "d<|end|>"], []),
    "the assistant speaks first": (PLAIN, TALK[1:], ["b<|end|>", "d<|end|>"], []),
    "a chat that must have a turn": (FIRST, TALK[1:], ["b<|end|>", "d<|end|>"], []),
    "two answers in a row": (PLAIN, [*TALK[:2], bot("e")], ["b<|end|>", "e<|end|>"], []),
    "one end for a chat": (STOPPED, TALK, ["b<|end|>\n", "d<|end|>\n<|stop|>"], []),
    "an empty answer": (STOPPED, [user("a"), bot(""), *TALK], ["<|end|>\n"], []),
    "a prompt that opens the reasoning": (OPENED, TOLD, ["b<|end|>", "d<|end|>"], [PROMPTED]),
    "earlier reasoning is left out": (
        LAST,
        TOLD,
        ["b<|end|>", "<think>y</think>d<|end|>"],
        [REWRITTEN],
    ),
    "no prompt": (BARE, TALK, [" b<|end|>", " d<|end|>"], []),
    "null content": (ADDED, ASKED, ['<|call|>add{"n": 1}<|end|>', "d<|end|>"], []),
    "arguments as objects": (ITEMS, ASKED, ["<|call|>[('n', 1)]<|end|>", "d<|end|>"], []),
    "arguments as JSON": (
        DUMPED,
        ASKED,
        ['<|call|>{"name": "add", "arguments": {"n": 1}}<|end|>', "d<|end|>"],
        [],
    ),
    "ids of nine signs": (NINE, ASKED, ['<|call|>abcdef123add{"n": 1}<|end|>', "d<|end|>"], []),
    "several texts are generated": (
        TWICE,
        THOUGHT,
        ["(x)", "b<|end|>", "(y)", "d<|end|>", "<|stop|>"],
        [],
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_each_shape_is_spelt_as_it_is_served_and_each_answer_is_learnt(shape, tokenizer, tmp_path):
    template, messages, answers, notes = SHAPES[shape]
    with collect_notes() as noted:
        spans = Jinja(tokenizer, template=template)({"messages": messages})
    learnt = [str(text) for text, weight in spans if weight]
    assert learnt[: len(answers)] == answers
    assert ({PROMPTED, REWRITTEN} & {*noted}) == {*notes}
    objects = json.loads(json.dumps(messages))
    for call in (call for turn in objects for call in turn.get("tool_calls", [])):
        if template in (ITEMS, DUMPED):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    plain = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, **options)
    text = environment.from_string(plain).render(messages=objects, eos_token="<|stop|>")
    assert "".join(text for text, _ in spans) == text
    # `prepare` looks for fields that are not rendered, for which some of these templates fail.
    chats, jinja = Records([{"messages": messages}]), Jinja(tokenizer, template=template)
    corpus = prepare(chats, tokenizer, tmp_path / "corpus", template=jinja, progress=False)
    assert corpus.decode(0) == text
    last = Jinja(tokenizer, template=template, last_only=True)({"messages": messages})
    told = [str(text) for text, weight in last if weight]
    assert "".join(told) == "".join(learnt)[-len("".join(told)) :]


@pytest.mark.parametrize("template", [PLAIN, STOPPED, OPENED, FIRST, BARE])
def test_the_work_for_a_turn_does_not_grow_with_their_number(template, tokenizer, monkeypatch):
    spelt, original = [], sandbox.render
    jinja = Jinja(tokenizer, template=template)
    monkeypatch.setattr(
        "pipeline.text.templates.jinja.render",
        lambda *given: spelt.append(len(given[1]["messages"])) or original(*given),
    )
    counts = []
    for turns in (20, 40, 400):
        spelt.clear()
        answers = [text for text, weight in jinja({"messages": TALK * (turns // 4)}) if weight]
        assert len(answers) == turns // 2
        counts.append(len(spelt))
    assert counts == [counts[0]] * 3


def test_the_day_is_fixed_by_the_caller_and_is_part_of_the_identity(tokenizer):
    template = "{{ strftime_now('%d %b %Y') }}" + PLAIN
    with pytest.raises(InvalidValue, match=r'it spells the day: give .* date="2024-07-26"'):
        Jinja(tokenizer, template=template)({"messages": TALK})
    with pytest.raises(InvalidValue, match="date is 'today'; give the day"):
        Jinja(tokenizer, template=template, date="today")
    one, other = (Jinja(tokenizer, template=template, date=f"2024-07-2{n}") for n in (6, 7))
    assert one({"messages": TALK})[0][0].startswith("26 Jul 2024<|user|>")
    assert one.fingerprint != other.fingerprint
    fallback = "{{ strftime_now('%Y') if strftime_now is defined else 'no day' }}" + PLAIN
    assert Jinja(tokenizer, template=fallback)({"messages": TALK})[0][0].startswith("no day")


def test_the_template_for_tools_is_chosen_if_a_record_has_some(tokenizer, tmp_path):
    shutil.copy(tokenizer.path, tmp_path)
    named = [{"name": "default", "template": "no tools"}, {"name": "tool_use", "template": "tools"}]
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": named}))
    beside = HuggingFace(tmp_path, begin=False, end=False)

    def spell(record):
        return "".join(text for text, _ in Jinja(beside)(record))

    assert spell({"messages": TALK[:1]}) == "no tools"
    assert spell({"messages": TALK[:1], "tools": [{"name": "f"}]}) == "tools"
    config.write_text("{}")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("others")
    assert spell({"messages": TALK[:1], "tools": [{"name": "f"}]}) == "others"
    with pytest.raises(InvalidValue, match="are tool_use, and none is 'default'; give the text"):
        spell({"messages": TALK[:1]})


PICTURES = TURNS + "{% for p in m.content %}{{ '<image>' if 'image' in p else p.text }}{% endfor %}"
PICTURES += "<|end|>{% endfor %}" + PROMPT


def test_parts_with_null_pictures_are_text_and_pictures_are_refused(tokenizer):
    jinja = Jinja(tokenizer, template=PICTURES)
    part = {"type": "text", "text": "hi", "image": None}
    spans = jinja({"messages": [user([part]), bot([part])]})
    assert "".join(text for text, _ in spans) == "<|user|>hi<|end|><|bot|>hi<|end|>"
    for other in ({"type": "image"}, {"type": "text", "text": "a", "image": "a.png"}):
        with pytest.raises(InvalidValue, match=r"turn 0 .* part of the type 'image', and a chat"):
            jinja({"messages": [user([part, other]), bot([part])]})


@pytest.mark.parametrize("kind", ["chat", "jinja"])
def test_columns_of_pictures_are_said(kind, tokenizer):
    template = Chat() if kind == "chat" else Jinja(tokenizer, template=PLAIN)
    with collect_notes() as notes:
        template({"messages": TALK, "images": [], "audio": None})
        assert not notes
        template({"messages": TALK, "images": [b"a"]})
        assert [*notes] == ["have a field 'images', which the template does not render"]


def test_a_null_that_a_template_spells_is_said(tokenizer):
    with collect_notes() as notes:
        Jinja(tokenizer, template=PLAIN)({"messages": ASKED})
        assert NONE in notes
        notes.clear()
        Jinja(tokenizer, template=ADDED)({"messages": ASKED})
        assert NONE not in notes


def test_reasoning_has_the_names_that_templates_read(tokenizer):
    template = TURNS + "{{ m.reasoning_content or '' }}:{{ m.content }}<|end|>{% endfor %}" + PROMPT
    jinja = Jinja(tokenizer, template=template)
    for name in ("reasoning_content", "thinking", "reasoning"):
        spans = jinja({"messages": [user("a"), bot("b", **{name: "why"})]})
        assert [str(text) for text, weight in spans if weight] == ["why:b<|end|>"]
