"""What type checkers tell users: nothing about what is right, and the line of each mistake."""

import dataclasses
import json
import pathlib
import re
import sys
import tomllib
import typing
from collections.abc import Iterable

import pytest

import pipeline
from pipeline.loading.from_options import LoadOptions
from pipeline.planning import Changes
from pipeline.planning.options import Options, PlanOptions
from tests.pages import SNIPPETS
from tests.processes import ROOT, call

BIN = pathlib.Path(sys.executable).parent
MISTAKES = ROOT / "tests/properties/mistakes.py"
MARKED = {
    (MISTAKES.name, number)
    for number, line in enumerate(MISTAKES.read_text().splitlines(), 1)
    if "# mistake" in line
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """What is checked: the mistakes, the examples, and each snippet as a file of its own."""
    folder = tmp_path_factory.mktemp("snippets")
    snippets = [folder / f"{block.page.stem}_{block.line}.py" for block in SNIPPETS]
    for path, block in zip(snippets, SNIPPETS, strict=True):
        path.write_text("\n" * (block.line - 1) + block.content)  # with the lines of its page
    return [MISTAKES, *sorted((ROOT / "examples").glob("*.py")), *snippets]


def pyright(*files):
    """The messages of Pyright about errors, in the package and the files, by file and line."""
    command = [BIN / "basedpyright", "--outputjson", "--pythonpath", sys.executable, "pipeline"]
    done = call(*command, *files)
    try:
        found = json.loads(done.stdout)["generalDiagnostics"]
    except ValueError:
        pytest.fail(done.stdout + done.stderr)
    errors = [each for each in found if each["severity"] == "error"]
    return {
        (pathlib.Path(each["file"]).name, each["range"]["start"]["line"] + 1): each["message"]
        for each in errors
    }


def mypy(*files):
    """The same for mypy, in the files and also in those that its configuration names."""
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["files"]
    more = [path for path in files if path.parent.name not in whole]
    done = call(BIN / "mypy", *whole, *more)
    errors = re.findall(r"^(.+\.py):(\d+): error: (.*)$", done.stdout, re.M)
    assert done.returncode == bool(errors), done.stdout + done.stderr
    return {(pathlib.Path(name).name, int(line)): message for name, line, message in errors}


@pytest.mark.slow
@pytest.mark.parametrize("checker", [pyright, mypy], ids=["pyright", "mypy"])
def test_a_checker_finds_the_mistakes_and_nothing_else(checker, files):
    found = checker(*files)
    wrong = [f"{name}:{line}: {found[name, line]}" for name, line in sorted(found.keys() - MARKED)]
    assert not wrong, "\n".join(wrong)
    assert MARKED - found.keys() == set()
    assert len(MARKED) >= 10


def test_the_options_of_load_are_those_of_fit_buckets_and_plan():
    known = typing.get_type_hints(pipeline.fit_buckets) | typing.get_type_hints(PlanOptions)
    known |= typing.get_type_hints(pipeline.Plan.__init__)
    for name in ("lengths", "buckets", "options", "return"):
        known.pop(name)
    assert typing.get_type_hints(LoadOptions) == known


def test_a_plan_changes_all_its_options():
    known = typing.get_type_hints(PlanOptions) | {"buckets": Iterable[pipeline.Bucket]}
    assert typing.get_type_hints(Changes) == known
    assert {field.name for field in dataclasses.fields(Options)} == {*known}
    plan = pipeline.Plan([5], [pipeline.Bucket(1, 8)])
    with pytest.raises(ValueError, match="can change 'tier'; did you mean 'tiers'"):
        plan.after(0, tier=2)


@pytest.fixture(scope="module")
def things(corpus, pairs, tmp_path_factory):
    """An object of each class whose attributes users read."""
    ids = [[5, 6, 7, 8], [9, 10, 11]]
    folder = tmp_path_factory.mktemp("inputs")
    words = pipeline.Corpus.from_arrays(ids, folder, vocab_size=16, task=pipeline.corpus.INPUTS)
    with pipeline.load(corpus, tokens_per_batch=512, max_length=64) as loader:
        next(loader)
    return {
        type(each).__name__: each
        for each in (
            *(corpus, pairs, pipeline.Corpora({"one": corpus}), pipeline.Masked(words)),
            *(loader, loader.plan, loader.batches, loader.plan.batch(0)),
        )
    }


def test_help_names_all_attributes(things):
    missing = []
    for name, each in things.items():
        text = "\n".join(kind.__doc__ or "" for kind in type(each).__mro__)
        known = {
            word for words in re.findall(r"^ +([\w, ]+):", text, re.M) for word in words.split(", ")
        }
        public = {attribute for attribute in vars(each) if not attribute.startswith("_")}
        missing += [f"{name}.{attribute}" for attribute in sorted(public - known - {"num_tokens"})]
    assert missing == []  # num_tokens is a property, which help shows by itself


def test_help_names_all_options_of_load_and_all_fields_of_a_batch():
    known = {*LoadOptions.__annotations__, *(pipeline.load.__kwdefaults__ or {})}
    for thing, names in (
        (pipeline.load, known),
        (pipeline.Batch, {*pipeline.Batch.__annotations__}),
    ):
        assert names <= {*re.findall(r"\w+", thing.__doc__ or "")}
