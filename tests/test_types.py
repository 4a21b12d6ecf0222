"""What type checkers tell users: nothing about what is right, and the line of each mistake."""

import json
import pathlib
import re
import subprocess
import sys
import typing

import pytest

import pipeline
from pipeline.loading.loader import LoadOptions
from pipeline.planning.options import Changes
from tests.test_readme import ROOT, SNIPPETS

BIN = pathlib.Path(sys.executable).parent
MISTAKES = ROOT / "tests/mistakes.py"
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


def check(*command):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def pyright(*files, **options):
    """The file and line of each error that Pyright finds, and its messages."""
    done = check(BIN / "basedpyright", "--outputjson", "--pythonpath", sys.executable, *files)
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
    """The file and line of each error that mypy finds, and its messages."""
    done = check(BIN / "mypy", "--no-pretty", *files)
    errors = re.findall(r"^(.+\.py):(\d+): error: (.*)$", done.stdout, re.M)
    assert done.returncode == bool(errors), done.stdout + done.stderr
    return {(pathlib.Path(name).name, int(line)): message for name, line, message in errors}


@pytest.mark.parametrize("checker", [pyright, mypy], ids=["pyright", "mypy"])
def test_a_checker_finds_the_mistakes_and_nothing_else(checker, files):
    found = checker(*files)
    wrong = [f"{name}:{line}: {found[name, line]}" for name, line in sorted(found.keys() - MARKED)]
    assert not wrong, "\n".join(wrong)
    assert MARKED - found.keys() == set()
    assert len(MARKED) >= 10


def test_the_options_of_load_are_those_of_fit_buckets_and_plan():
    known = {}
    for function in (pipeline.fit_buckets, pipeline.Plan.__init__):
        known |= typing.get_type_hints(function)
    for name in ("lengths", "buckets", "return"):
        known.pop(name)
    assert typing.get_type_hints(LoadOptions) == known


def test_a_plan_changes_all_its_options_but_the_ending():
    known = typing.get_type_hints(pipeline.Plan.__init__)
    for name in ("lengths", "weights", "leave_out", "ending", "return"):
        known.pop(name, None)
    assert typing.get_type_hints(Changes) == known
