import json
import random
import shutil
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from pipeline import Corpus, Feature, prepare, prepare_pairs
from pipeline.corpus import INPUTS, Job, prepare_job, prepare_share
from pipeline.corpus.engines import Processes, Ray
from pipeline.text.sources import JsonLines, Records
from pipeline.text.templates import Answer, Function
from pipeline.text.tokenizers import Bytes
from tests.corpus.files import contents
from tests.properties.kills import write_documents

SMALL = {"TOKENS_PER_PART": 600, "LEAST": 2500, "BLOCK": 100}


@pytest.fixture
def source(tmp_path):
    write_documents(tmp_path / "text.jsonl", 150)
    return JsonLines(tmp_path / "text.jsonl")


# An engine that runs each task twice, the last one first.
TWICE = SimpleNamespace(run=lambda do, tasks: (do(task) for task in [*tasks, *tasks][::-1]))


def many_ways(kind, source, directory, engine):
    options = {"engine": engine, "progress": False}
    if kind == "pairs":
        return prepare_pairs(source, Bytes(), directory, fields=("text", "back"), **options)
    template = Answer(prompt="{text}", answer="{back}") if kind == "weights" else None
    return prepare(source, Bytes(), directory, template=template, **options)


@pytest.mark.parametrize("kind", ["weights", "pairs"])
def test_tasks_may_run_in_any_order_more_than_once_under_any_defaults_of_arrow(
    kind, source, tmp_path, monkeypatch
):
    many_ways(kind, source, tmp_path / "one", Processes(0))
    monkeypatch.setenv("ARROW_PRE_1_0_METADATA_VERSION", "1")
    many_ways(kind, source, tmp_path / "other", TWICE)
    assert contents(tmp_path / "one") == contents(tmp_path / "other")
    assert sum("part-" in name for name in contents(tmp_path / "one")) > 3


def test_shares_are_done_in_any_order_and_found_when_the_corpus_is_finished(
    source, tmp_path, monkeypatch
):
    options = {"field": "back", "task": INPUTS, "on_error": "skip"}
    prepare(source, Bytes(), tmp_path / "whole", **options, progress=False)
    shares, job = random.Random(0).sample(range(4), 4), Job(source, Bytes(), **options)
    for number in [*shares, shares[0]]:
        prepare_share(job, tmp_path / "corpus", (number, 4), progress=False)
    with pytest.raises(ValueError, match="is not finished"):
        Corpus.open(tmp_path / "corpus")
    monkeypatch.setattr(Bytes, "encode_batch", None)  # nothing is left to do
    prepare(source, Bytes(), tmp_path / "corpus", **options, progress=False)
    assert contents(tmp_path / "corpus") == contents(tmp_path / "whole")
    prepare_share(job, tmp_path / "corpus", (0, 4), progress=False)


@pytest.mark.parametrize("make", [prepare_share, prepare_job])
def test_work_that_is_late_does_no_harm_to_a_corpus_that_others_have_finished(
    make, source, tmp_path
):
    directory, job = tmp_path / "corpus", Job(source, Bytes())
    prepare_job(job, tmp_path / "whole", progress=False)

    def run(function, tasks):
        *first, last = tasks
        yield from map(function, first)
        # A copy takes the place of the corpus, as another process that had no lock would make it.
        shutil.rmtree(directory)
        shutil.copytree(tmp_path / "whole", directory)
        yield function(last)

    more = ((0, 1),) if make is prepare_share else ()
    make(job, directory, *more, engine=SimpleNamespace(run=run), progress=False)
    assert contents(directory) == contents(tmp_path / "whole")
    assert not (directory / "shards").exists()


class Choosy(Bytes):
    """Fails where a text has an x."""

    def encode_batch(self, texts):
        if any("x" in text for text in texts):
            raise ZeroDivisionError("deep inside")
        return super().encode_batch(texts)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_record_that_fails_is_named_whatever_it_raises(workers, tmp_path):
    source = Records(["x" if number == 57 else "fine" for number in range(100)])
    with pytest.raises(ZeroDivisionError) as error:
        prepare(source, Choosy(), tmp_path / "corpus", num_workers=workers, progress=False)
    assert "This was record 57." in error.value.__notes__


def test_a_template_that_cannot_be_sent_to_workers_is_named(tmp_path):
    lock = threading.Lock()
    template = Function(lambda record: lock and [(record["text"], 1.0)], fingerprint="1")
    with pytest.raises(ValueError, match=r"template cannot be sent to workers: .*lock.* use one"):
        prepare(Records(["a" * 99] * 99), Bytes(), tmp_path, template=template, num_workers=2)


def test_records_that_fail_may_be_left_without_tokens(tmp_path):
    failed = [0, 57, 58, 99]
    texts = ["x" if number in failed else f"record {number}" for number in range(100)]
    source = Records([{"text": text} for text in texts])
    corpus = prepare(source, Choosy(), tmp_path / "one", on_error="skip", progress=False)
    assert np.flatnonzero(corpus.lengths == 0).tolist() == failed
    lines = [json.loads(line) for line in (tmp_path / "one" / "skipped.jsonl").open()]
    assert [line["record"] for line in lines] == failed
    assert (tmp_path / "one" / lines[1]["part"]).exists()
    prepare(source, Choosy(), tmp_path / "two", on_error="skip", engine=TWICE, progress=False)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    with pytest.raises(ValueError, match="made with another on_error: there skip, now None"):
        prepare(source, Choosy(), tmp_path / "one", progress=False)
    options = {"template": Answer(prompt="a", answer="{text}"), "on_error": "skip"}
    options["features"] = {"reward": Feature("example", dtype="int8", fill=1)}
    weighted = prepare(source, Choosy(), tmp_path / "weighted", **options, progress=False)
    assert np.flatnonzero(weighted.lengths == 0).tolist() == failed


def test_the_command_does_one_task_of_several_and_assembles(run, tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("".join(f"{name} {number}\n" for number in range(50)))
    into = "prepare", tmp_path / "a.txt", tmp_path / "b.txt", "--into"
    run.done(*into, tmp_path / "whole")
    for number in (2, 0, 1):
        out = run.done(*into, tmp_path / "shared", "--task", number, "--of", 3)
        assert f"task {number} of 3 is done; when all are, run the same command without" in out
    run.done(*into, tmp_path / "shared")
    assert contents(tmp_path / "shared") == contents(tmp_path / "whole")


@pytest.mark.slow
def test_ray_makes_the_same_corpus_and_names_the_record_that_is_wrong(source, tmp_path):
    pytest.importorskip("ray")
    many_ways("pairs", source, tmp_path / "one", Processes(2))
    many_ways("pairs", source, tmp_path / "other", Ray())
    assert contents(tmp_path / "one") == contents(tmp_path / "other")
    lines = [json.dumps({"text": 1 if number == 41 else "fine"}) for number in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    wrong = JsonLines(tmp_path / "a.jsonl")
    with pytest.raises(Exception, match=r"line 42 .*: its field 'text' holds int, not text"):
        prepare(wrong, Bytes(), tmp_path / "corpus", engine=Ray(), progress=False)
