"""The contract of errors: a mistake is a sentence that says what was seen, and what to do.

An option that cannot be is named. Wordings are pinned elsewhere only where a page promises them;
`properties/` says that hostile input of any kind is refused so.
"""

import ast
import inspect
import re

import numpy as np
import pytest

import pipeline
from pipeline import Bucket, Examples, Feature, Plan, errors
from pipeline.corpus import INPUTS
from pipeline.loading.from_options import LoadOptions
from pipeline.planning.options import PlanOptions
from pipeline.text import sources, templates, tokenizers
from pipeline.text.config import open_source, open_template, open_tokenizer
from tests.processes import ROOT
from trainer.corpora import open_view

KINDS = {
    name
    for name, each in vars(errors).items()
    if isinstance(each, type) and issubclass(each, errors.UserError)
} | {"Damaged", "NotAsPlanned"}


def said(node):
    """The text of a message in the code, with {} for what is put in."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(map(said, values))
        case ast.BinOp(left=left, right=right):
            return said(left) + said(right)
    return "{}"


@pytest.fixture(scope="module")
def messages():
    """The messages of errors for users, by their places; but for reasons, which others tell."""
    found = {}
    places = [path for place in ("pipeline", "trainer") for path in (ROOT / place).rglob("*.py")]
    for path in sorted(places):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in KINDS and node.args:
                text = said(node.args[-1])
                if text.strip("{}; :.") and not re.match(r"(its?|have|a) ", text):
                    found[f"{path.relative_to(ROOT)}:{node.lineno}"] = text
    return found


def test_a_message_is_a_sentence(messages):
    assert len(messages) > 450
    for place, text in messages.items():
        assert len(text.split()) > 2 or "{}" in text, place
        assert not text.endswith("."), place


def test_a_message_says_what_to_do(messages):
    bare = [place for place, text in messages.items() if not re.search(r"; |\. [A-Z]", text)]
    assert len(bare) < len(messages) / 8, bare


def keywords(function):
    """The names of keyword arguments; those of others are in their annotations."""
    return {*(function.__kwdefaults__ or {})} - {"transform"}


def unshifted(folder):
    return pipeline.Corpus.from_arrays([[1, 2, 3]], folder, vocab_size=9, task=INPUTS)


EXAMPLES = Examples([[1, 2, 3, 4], [5, 6, 7]], vocab_size=9)
BUCKETS = [Bucket(2, 8)]
BUDGET = {"tokens_per_batch": 64, "max_buckets": 1}
SOURCE = {"files": "a.jsonl", "split": "train"}
ANSWER = {"kind": "answer", "prompt": "{q}", "answer": "{a}"}
MODEL = {"kind": "huggingface", "model": "a.json", "begin": True, "end": True}
IMAGE = {"image": np.zeros((8, 8, 3), "u1"), "patch": 4, "max_patches": 9}

# Calls that are right but for one of their options; each may write to a folder.
CALLS = {
    "plan": lambda _, **given: Plan([3, 5], **{"buckets": BUCKETS} | given),
    "fit": lambda _, **given: pipeline.fit_buckets([3, 5], **BUDGET | given),
    "load": lambda _, **given: pipeline.load(EXAMPLES, **BUDGET | given),
    "score": lambda folder, **given: pipeline.score(
        EXAMPLES,
        lambda batch: {"token": batch["inputs"]},
        **{"per": "position", "directory": folder, "buckets": BUCKETS} | given,
    ),
    "pack": lambda _, **given: pipeline.pack(EXAMPLES, BUCKETS, **given),
    "batches": lambda _, **given: pipeline.Batches(
        **{"corpus": EXAMPLES, "plan": Plan(EXAMPLES, BUCKETS)} | given
    ),
    "examples": lambda _, **given: Examples(**{"columns": [[1, 2, 3]]} | given),
    "store": lambda folder, **given: pipeline.Corpus.from_arrays([[1, 2, 3]], folder, **given),
    "prepare": lambda folder, **given: pipeline.prepare(
        sources.Records(["a rose"]), tokenizers.Bytes(), folder, progress=False, **given
    ),
    "cut": lambda _, **given: pipeline.patchify(**IMAGE | given),
    "write": lambda folder, **given: pipeline.Writer(folder, **given),
    "mask": lambda folder, **given: pipeline.Masked(unshifted(folder), **given),
    "chat": lambda _, **given: templates.Chat(**given),
    "open_source": lambda _, **given: open_source(SOURCE | given, "config.train"),
    "open_template": lambda _, **given: open_template(ANSWER | given),
    "open_view": lambda folder, **given: open_view({"kind": "masked"} | given, 1)[0](
        unshifted(folder)
    ),
    "open_tokenizer": lambda folder, **given: open_tokenizer(MODEL | given, [], folder),
}

# The options of each, but for functions, names and objects of other classes, which may be anything.
OPTIONS = {
    "plan": {"buckets", *PlanOptions.__annotations__},
    "fit": {*inspect.get_annotations(pipeline.fit_buckets)} - {"lengths", "return", "by"},
    "load": {*LoadOptions.__annotations__, *keywords(pipeline.load)} - {"timeout_seconds"},
    "score": keywords(pipeline.score) - {"state"},
    "pack": keywords(pipeline.pack),
    "batches": {*inspect.signature(pipeline.Batches).parameters} - {"transform"},
    "examples": {"columns", *keywords(Examples.__init__)},
    "store": keywords(pipeline.Corpus.from_arrays.__func__),
    "prepare": keywords(pipeline.prepare) - {"progress", "strict", "template"},
    "cut": {*IMAGE},
    "write": keywords(pipeline.Writer.__init__),
    "mask": keywords(pipeline.Masked.__init__) - {"keep_ids"},
    "chat": {"weights", "before", "last_only", "null", "unknown"},
    "open_source": {"source", "files", "split", "kind"},
    "open_template": {"prompt", "answer"},
    "open_view": {"kind", "rate"},
    "open_tokenizer": {"kind"},
}


@pytest.mark.parametrize(
    ("name", "option"),
    [(name, option) for name, options in OPTIONS.items() for option in sorted(options)],
)
def test_an_option_that_cannot_be_is_named(name, option, tmp_path):
    with pytest.raises(errors.UserError, match=option):
        CALLS[name](tmp_path, **{option: object()})


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: templates.Chat(weights={"assistant": "1"}), "it must map roles to numbers"),
        (lambda: templates.Chat()({"messages": [["user", "a"]]}), "turn 0"),
        (lambda: templates.Pair.of("ab"), "fields is 'ab'; it must be two"),
        (lambda: sources.TextFiles([]), "no files were given"),
        (lambda: sources.TextFiles([5]), "5 is no name of a file"),
        (lambda: tokenizers.HuggingFace("nowhere.json"), "there is no .* tokenizer nowhere.json"),
        (lambda: Examples([[1]], features={"a": "example"}), r"features\['a'\] is 'example'"),
        (lambda: Examples([{"input_ids": [1]}]), "a record with the fields input_ids"),
        (lambda: Examples([[-1, 2]]), "holds the token id -1; ids are 0 to 2"),
        (
            lambda: Examples({"tokens": [[1]], "a": ["x"]}, features={"a": Feature("example")}),
            "give booleans or numbers",
        ),
    ],
)
def test_what_is_no_text_file_or_number_is_refused_by_name(call, said):
    with pytest.raises(errors.UserError, match=said):
        call()
