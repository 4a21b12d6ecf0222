"""README and docs are kept true: snippets run, commands have the flags they name, links lead on."""

import codecs
import contextlib
import importlib
import inspect
import logging
import pathlib
import re
import shlex
import shutil
import sys
import tomllib
import types

import numpy as np
import pytest

import pipeline
from pipeline.cli.commands import main
from pipeline.steps import CompileLog
from tests.fs import object_servers
from tests.pages import BLOCK, BLOCKS, PAGES, README, SNIPPETS
from tests.processes import ROOT
from tests.runs.program_flags import parse
from trainer.config import MAY_CHANGE

COMMANDS = [
    pytest.param(shlex.split(command, comments=True), id=f"{block}-{number}")
    for block in BLOCKS
    if block.kind == "sh"
    for number, line in enumerate(block.content.replace("\\\n", "").splitlines())
    for command in line.split(" && ")
]
# The other commands of the pages, which this machine may not run.
OTHERS = r"python3 -c import this > zen\.txt|(python3 -m venv|python -m pytest|pip install -q).*"
OTHERS += r"|mkdir data|python3 -m pydoc (\w+) > data/\2\.txt"
OTHERS += r"|pip install lockstep(-pipeline(\[[\w,]+\])?)?( flax optax orbax-checkpoint)?"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """What readers have: text in data/ and zen.txt, and corpora of both, made by their commands."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "data").mkdir()
    words = ["pack", "rows", "of", "every", "length", "into", "a", "few", "buckets"]
    random = np.random.default_rng(0)
    for name in ("a.txt", "b.txt"):
        lines = [" ".join(random.choice(words, size)) for size in random.integers(1, 40, 150)]
        (folder / "data" / name).write_text("\n".join(lines))
    zen = codecs.decode(importlib.import_module("this").s, "rot13")
    (folder / "zen.txt").write_text(f"{zen}\n")  # `python3 -c "import this"` prints it
    with contextlib.chdir(folder):
        for command in (param.values[0] for param in COMMANDS):
            if command[:2] == ["lockstep", "prepare"] and command[2] in ("zen.txt", "data/*.txt"):
                assert main(command[1:]) == 0
    return folder


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    """What readers have in the cloud: a bucket, to which these environment variables lead."""
    with object_servers.s3(tmp_path_factory.mktemp("cloud")) as port:
        yield object_servers.s3_environment(port)


@pytest.fixture(autouse=True)
def _wandb(monkeypatch):
    """A stand-in for Weights & Biases, which is not installed."""
    run = types.SimpleNamespace(log=lambda values, step: None)
    wandb = types.SimpleNamespace(init=lambda **options: run)
    monkeypatch.setitem(sys.modules, "wandb", wandb)


@pytest.fixture(autouse=True)
def _log():
    """One snippet has the log of the library shown; later tests have it as it was."""
    root, own = logging.getLogger(), logging.getLogger("pipeline")
    handlers, level = [*root.handlers], own.level
    yield
    root.handlers[:] = handlers
    own.setLevel(level)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=str)
def test_a_snippet_runs(snippet, files, tmp_path, monkeypatch, capsys, request):
    # Each has a fresh namespace and folder. A failure shows the line of its page.
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    if "s3://" in snippet.content:
        for name, value in request.getfixturevalue("bucket").items():
            monkeypatch.setenv(name, value)
    code = "\n" * (snippet.line - 1) + snippet.content
    namespace = {"__name__": "__main__"}
    with CompileLog() as log:
        exec(compile(code, str(snippet.page), "exec"), namespace)
    if snippet.page == README and "train_step" in snippet.content:
        assert log.names.count("jit(train_step)") == 1  # one shape
    if "get_config" in namespace:
        namespace["get_config"]()
    if snippet.output is not None:
        assert capsys.readouterr().out == snippet.output


def test_audit_and_show_accept_the_work_directory_of_an_own_loop(
    files, tmp_path, monkeypatch, capsys
):
    (snippet,) = (each for each in SNIPPETS if "RunLog(workdir" in each.content)
    assert "ml_collections" not in snippet.content
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet.content, str(snippet.page), "exec"), {"__name__": "__main__"})
    capsys.readouterr()
    assert main(["audit", "runs/own"]) == 0
    assert "all 6 batches are those that were planned" in capsys.readouterr().out
    assert main(["show", "runs/own", "--step", "4", "--row", "0"]) == 0
    assert "step 4 (epoch 0" in capsys.readouterr().out
    # From anywhere, since the corpus is not in the work directory.
    monkeypatch.chdir("/")
    assert main(["audit", str(tmp_path / "runs/own")]) == 0
    (tmp_path / "runs/own/metrics.jsonl").unlink()
    assert main(["audit", str(tmp_path / "runs/own")]) == 2
    assert "RunLog writes it" in capsys.readouterr().err


def test_the_picture_in_the_readme_is_a_real_batch(files, monkeypatch):
    commands = [param.values[0] for param in COMMANDS]
    (command,) = (each for each in commands if each[:3] == ["lockstep", "show", "zen"])
    monkeypatch.chdir(files)
    assert main(command[1:]) == 0
    assert (files / "batch.svg").read_text() == (ROOT / "docs/batch.svg").read_text()


def test_the_batch_in_the_guide_is_a_real_one(tmp_path):
    drawing = next(b for b in BLOCKS if b.kind == "text" and b.page.name == "guide.md")
    corpus = pipeline.Corpus.from_arrays([[1, 14, 8, 21, 2], [1, 9, 30, 2]], tmp_path)
    plan = pipeline.Plan(corpus, [pipeline.Bucket(rows=1, length=8)], shuffle=False)
    batch = pipeline.Batches(corpus, plan)[0]
    for line in drawing.content.splitlines():
        name, *values = line.replace("|", "").replace("·", "0").split()
        assert batch.pop(name).tolist() == [[int(value) for value in values]]
    assert not batch


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_has_the_flags_that_it_names(words, monkeypatch, capsys):
    program = [pathlib.Path(word).name for word in words[:3]]
    if program[:2] == ["python", "train.py"]:
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "argv", words[1:])
        config, _ = parse(*words[2:])
        options = {"buckets", "exclude", "add", "schedule"}
        for function in (pipeline.fit_buckets, pipeline.Plan):
            options |= {*inspect.signature(function).parameters}
        assert {name for _, changes in config.schedule for name in changes} <= options
        held_out = config.get("hold_out")  # else a part has records of its own
        for part in (config.get("train"), None if held_out else config.eval):
            places = [part.get(name) for name in ("files", "source")] if part else [True]
            assert sum(map(bool, places)) == 1  # where the text is from
    elif program[0] == "lockstep":  # not `python -m pipeline`, which takes a user's own folder
        command, *given = words[1:]
        with pytest.raises(SystemExit):
            main([command, "--help"])
        text = capsys.readouterr().out
        for word in given:
            flag = word.partition("=")[0]
            assert not flag.startswith("--") or re.search(rf"{flag}\b", text), word
    else:
        assert re.fullmatch(OTHERS, " ".join([*program, *words[3:]]))


def test_the_page_on_changes_names_every_field_that_may_change():
    page = (ROOT / "docs/changing_a_run.md").read_text()
    assert {field for field in MAY_CHANGE if f"`{field}`" not in page} == {
        "batches",
        "seed",
        "schedule",
    }


def test_the_readme_is_short():
    assert len(README.read_bytes()) <= 7_200
    loops = [block for block in SNIPPETS if block.page == README]
    assert len(loops) == 2  # of a prepared corpus, and of a stream
    for loop in loops:
        assert len([line for line in loop.content.splitlines() if line.strip()]) <= 15


def test_the_two_commands_of_the_readme_set_up_all_that_they_need():
    lines = [line for line in README.read_text().splitlines() if line.startswith("python3 -m venv")]
    assert [line.split()[-1] for line in lines if "train.py" in line] == ["train.py"]
    assert len([line for line in lines if "-m pytest" in line]) == 1


def test_the_layout_names_every_package_once_and_in_the_order_of_imports():
    page = (ROOT / "docs/layout.md").read_text()
    tree = re.search(r"```text\npipeline/(.*?)^\w", page, re.S | re.M).group(1)
    named = re.findall(r"^  (\w+)/", tree, re.M)
    packages = [path.parent.name for path in (ROOT / "pipeline").glob("*/__init__.py")]
    assert sorted(named) == sorted(packages)
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = contracts["contracts"][0]["layers"]  # from the top floor
    level = {name: at for at, layer in enumerate(layers) for name in layer.split(" | ")}
    assert named == sorted(named, key=level.__getitem__)


def headings(page):
    """The anchors of a page, as GitHub makes them."""
    names = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", name.lower()).replace(" ", "-") for name in names}


FOLDERS = ["docs", "benchmarks", "tests"]
LINKING = sorted(
    [*ROOT.glob("*.md"), *(page for each in FOLDERS for page in (ROOT / each).rglob("*.md"))]
)


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\((?!http)([^)]+)\)", BLOCK.sub("", page.read_text())):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in headings(target), link


def test_every_page_is_linked_from_the_readme():
    for page in PAGES[1:]:
        assert f"](docs/{page.name})" in README.read_text()
