"""Kinds by name: those of this package, and those of another one, which is installed."""

import os
import shutil
import subprocess
import sys

import pytest

from pipeline import registry
from pipeline.errors import UserError
from pipeline.text.config import open_template
from pipeline.text.sources import open_files
from tests.processes import ROOT


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Runs a Python program where examples/shouting is installed; returns what it prints."""
    folder = tmp_path_factory.mktemp("shouting")
    source = shutil.copytree(ROOT / "examples/shouting", folder / "source")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target"]
    pip = [sys.executable, "-m", "pip", "install", *options, folder / "packages", source]
    subprocess.run(pip, check=True, timeout=300)
    paths = os.pathsep.join([str(folder / "packages"), str(ROOT)])

    def run(*arguments, cwd):
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_kinds_of_an_installed_package_work_from_a_shell_and_from_python(installed, tmp_path):
    (tmp_path / "asked.jsonl").write_text('{"question": "who?"}\n')
    (tmp_path / "ids.txt").write_text("ff 10\n1 2 3\n")
    command = "-m", "pipeline"
    shout = "--template", "shout", "field=question"
    installed(*command, "prepare", "asked.jsonl", *shout, "--into", "corpus", cwd=tmp_path)
    words = "--tokens", "words", "base=16"
    installed(*command, "prepare", "ids.txt", *words, "--into", "linked", cwd=tmp_path)
    printed = installed(*command, "kinds", "templates", cwd=tmp_path)
    assert (
        "shout: A field of a record in capital letters.\n    field=  the field to shout." in printed
    )
    program = """if True:
        from pipeline import Corpus
        from pipeline.corpus.opening import open_corpus
        from pipeline.text.config import open_template
        corpus = Corpus.open("corpus")
        print(corpus.tokenizer.decode(corpus[0]["inputs"]))
        print(open_corpus("linked")[0]["inputs"])
        print(open_template({"kind": "shout", "field": "question", "prompt": None}))
    """
    decoded, ids, template = installed("-c", program, cwd=tmp_path).splitlines()
    assert (decoded.strip(), ids) == ("WHO?", "[255]")
    assert "Shout(field='question')" in template


def test_a_kind_that_two_packages_have_is_refused_and_names_them(monkeypatch):
    others = {"chat": [("chatting:Chat", "chatting")], "two": [("a:A", "a"), ("b:B", "b")]}
    monkeypatch.setattr(registry, "_registered", lambda group: others)
    assert registry.names("templates") == ["answer", "chat", "preference", "two"]
    with pytest.raises(ValueError, match="this package and chatting each have a kind 'chat'"):
        registry.find("templates", "chat")
    with pytest.raises(ValueError, match="a and b each have a kind 'two'"):
        registry.find("templates", "two")


def test_every_kind_says_what_its_options_are():
    for group in registry.KINDS:
        for kind in registry.kinds(group):
            assert kind.about.endswith("."), (group, kind.name)
            silent = [name for name, option in kind.options.items() if not option.help]
            assert not silent or group == "tokens", (group, kind.name, silent)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: open_template({"kind": "chats"}), "template.kind is 'chats'; it must be one of"),
        (
            lambda: open_template({"kind": "answer", "promt": "x", "answer": "y"}),
            "template.kind 'answer' has no option 'promt'; did you mean 'prompt'",
        ),
        (
            lambda: open_template({"kind": "answer", "prompt": "x"}),
            "template.kind 'answer' needs 'answer', the text to learn.; give it as well",
        ),
        (lambda: open_files("x", "yaml"), "kind is 'yaml'; it must be one of text, jsonl"),
        (lambda: open_files("x", "text", columns=["a"]), "'text' has no option 'columns'"),
    ],
)
def test_a_wrong_kind_or_option_is_refused_by_name(call, message):
    with pytest.raises(UserError) as caught:
        call()
    assert message in f"{caught.value}"


@pytest.mark.parametrize(
    ("group", "kind", "text", "value"),
    [
        ("templates", "answer", "prompt=0", {"prompt": "0"}),
        ("templates", "answer", 'null={"a": ""}', {"null": {"a": ""}}),
        ("templates", "answer", "null=0", {"null": "0"}),
        ("templates", "chat", "last_only=true", {"last_only": True}),
        ("templates", "chat", 'weights={"user": 1}', {"weights": {"user": 1}}),
        ("templates", "preference", "chosen={right}", {"chosen": "{right}"}),
        ("tokens", "flat", "end=()", {"end": ()}),
        ("tokens", "flat", "dtype=uint16", {"dtype": "uint16"}),
        ("records", "text", "sample_by=file", {"sample_by": "file"}),
    ],
)
def test_options_of_a_shell_are_values_of_their_types(group, kind, text, value):
    assert registry.find(group, kind).read([text], "--kind") == value


def test_options_of_all_kinds_have_their_types():
    found = registry.list_options("templates")
    assert (found["prompt"], found["last_only"], found["null"]) == (str, bool, None)
    assert {"dtype", "columns", "sample_by"} <= {*registry.list_options("records", "tokens")}
