"""Properties that hold for every input, hostile ones too: a call keeps its contract, or refuses.

A refusal is an error that a `raise` of `pipeline` makes: one of the usual types, with a sentence.
`HOSTILE=100 pytest --hypothesis-seed=7 tests/properties/test_hostile.py` draws a hundred times as
many inputs, other ones for each seed.
"""

import contextlib
import contextvars
import copy
import functools
import io
import json
import os
import pickle
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from etils import epath
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import pipeline
from pipeline import Plan, sources, templates, tokenizers
from pipeline.corpus.corpus import Corpus
from pipeline.corpus.in_place import InPlace
from pipeline.corpus.stored.directory import MANIFEST
from pipeline.errors import UserError
from pipeline.history import RunLog, audit, read_history, write_history
from pipeline.loading.state import StateKey
from pipeline.text.source import sharded
from tests.properties import hostile
from tests.properties.accounts import assert_batch_fits, assert_each_position_once
from trainer.schedule import Schedule


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A folder of its own, in memory where that can be; it is the current directory meanwhile."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    before = os.getcwd()
    with tempfile.TemporaryDirectory(dir=memory) as place:
        os.chdir(place)
        try:
            yield Path(place)
        finally:
            os.chdir(before)


TIMES = int(os.environ.get("HOSTILE", "1"))


class Whole(NamedTuple):
    """Input that nobody has altered, which must be accepted; `make()` makes it."""

    make: Callable[[], Any]


def holds(strategy: st.SearchStrategy, whole: Callable[[], Any], quick: int = 12) -> Callable:
    """Makes a function of a folder and of what the strategy gives a test of so many examples.

    It is also called with the result of `whole`, of which nothing may be refused: so a test fails
    if everything is refused.
    """

    def add(check: Callable[[Path, Any], None]) -> Callable:
        @settings(
            max_examples=quick * TIMES,
            database=None,
            derandomize=TIMES == 1,
            suppress_health_check=list(HealthCheck),
        )
        @example(Whole(whole))
        @given(strategy)
        def test(given):
            is_whole = isinstance(given, Whole)
            with folder() as place, accepting() if is_whole else contextlib.nullcontext():
                check(place, copy.deepcopy(given.make()) if is_whole else given)

        return test

    return add


accepts = contextvars.ContextVar("accepts", default=False)


@contextlib.contextmanager
def accepting() -> Iterator[None]:
    """Makes refusals inside the block errors."""
    token = accepts.set(True)
    try:
        yield
    finally:
        accepts.reset(token)


class Silent(AssertionError):
    """Something wrong was accepted, or something right was changed."""


@contextlib.contextmanager
def refusing(*named: Any) -> Iterator[None]:
    """Lets refusals pass; every other error is one of the property.

    Args:
        named: the message has each of these, such as the name of a file.
    """
    try:
        yield
    except Silent:
        raise
    except Exception as error:
        if accepts.get():
            raise Silent(f"refused: {error!r}") from error
        if isinstance(error, OSError) and error.filename:  # of the operating system
            return
        said = str(error)
        if not isinstance(error, UserError) or len(said.split()) < 4:
            raise
        for name in named:
            if str(name) not in said:
                raise Silent(f"the message does not name {name}: {said}") from error


def expect(right: Any, *said: Any) -> None:
    """Raises `Silent` if something is not right."""
    if not right:
        raise Silent(" ".join(str(each)[:1500] for each in said))


def write(path: Path, content: bytes) -> Path:
    """Writes a file."""
    path.write_bytes(content)
    return path


# ---- sources

QUIETLY = {"tokenizer": tokenizers.Bytes(), "progress": False, "num_workers": 0}
prepare = functools.partial(pipeline.prepare, **QUIETLY)
prepare_pairs = functools.partial(pipeline.prepare_pairs, **QUIETLY)


def read_all(source: Any) -> list[Any]:
    """All records in order; by a copy, and from the end of any block on, they are the same."""
    source = sharded(source)
    clone, records = pickle.loads(pickle.dumps(source)), list(source)
    expect(repr(list(clone)) == repr(records), records, "and by a copy", list(clone))
    for shard in source.shards():
        blocks = list(source.read(shard))
        for number, block in enumerate(blocks):
            expect(all(block.where(at) for at in range(len(block.records))), "no place")
            if block.next is not None:
                rest = list(clone.read(shard, json.loads(json.dumps(block.next))))
                expect(repr(rest) == repr(blocks[number + 1 :]), "read otherwise from", block.next)
    return records


def decoded(content: bytes) -> str | None:
    """A file or its first line as text, without marks of the byte order; None if it is no text."""
    try:
        return content.decode().lstrip("\ufeff")
    except UnicodeDecodeError:
        return None


PLAIN = b"plain text\nand \xc3\xa9\n"


@holds(
    st.tuples(hostile.stored(hostile.text_files), st.sampled_from(["line", "file"])),
    lambda: ((PLAIN, "", PLAIN), "line"),
    20,
)
def test_text_files_are_read_as_they_are(place, given):
    (stored, end, plain), sample_by = given
    path = write(place / f"a.txt{end}", stored)
    with refusing(path):
        read = [record["text"] for record in read_all(sources.TextFiles(path, sample_by=sample_by))]
        if plain is None:
            return
        texts = [decoded(plain)]
        if sample_by == "line":
            lines = plain.split(b"\n")
            found = [re.sub(rb"\A(\xef\xbb\xbf)+", b"", line.rstrip(b"\r")) for line in lines]
            texts = [
                text.decode(errors="replace") if at else decoded(text)
                for at, (line, text) in enumerate(zip(lines, found, strict=True))
                if line.strip() not in (b"", b"\xef\xbb\xbf")
            ]
        expect(read == texts, read, "and not", texts)


JSON = b'{"text": "one"}\n{"text": "two \xc3\xa9"}\n'


@holds(
    st.tuples(hostile.stored(hostile.json_files), hostile.texts),
    lambda: ((JSON, "", JSON), "text"),
    12,
)
def test_json_lines_become_their_texts(place, given):
    (stored, end, plain), field = given
    field = field if field in ("a;b=c", "é") else "text"
    path = write(place / f"a.jsonl{end}", stored)
    with refusing(path):
        corpus = prepare(sources.JsonLines(path), directory=place / "corpus", field=field)
        if plain is not None:
            lines = [decoded(line) for line in plain.split(b"\n") if line.strip()]
            expect(None not in lines, "bytes that are no text were read")
            check_texts(corpus, [json.loads(line)[field] for line in lines])


def check_texts(corpus: Corpus, texts: list[str]) -> None:
    """The tokens of a corpus are those texts, whole."""
    corpus.verify()
    read = [corpus.tokenizer.decode(example["targets"]) for example in corpus]
    expect(read == texts, read, "and not", texts)


def table(rows: list[dict]) -> tuple[str, bytes, list[dict]]:
    """A whole file of rows, as `hostile.table_files` draws them."""
    sink, content = io.BytesIO(), pa.Table.from_pylist(rows)
    with pa.ipc.new_file(sink, content.schema) as file:
        file.write_table(content)
    return ".arrow", sink.getvalue(), rows


@holds(hostile.table_files(), lambda: table([{"text": "one", "number": 1}]), 15)
def test_tables_give_their_rows(place, given):
    end, content, rows = given
    path = write(place / f"a{end}", content)
    with refusing(path):
        read = read_all(sources.open_files([str(path)]))
        expect(rows is None or read == rows, read, "and not", rows)


@holds(st.lists(hostile.objects, max_size=4), lambda: [{"text": "a"}, {"text": "é"}], 10)
def test_records_become_their_texts(place, given):
    with refusing():
        corpus = prepare(sources.Records(given), directory=place)
        texts = [each["text"] if isinstance(each, dict) else each for each in given]
        check_texts(corpus, [each.decode() if isinstance(each, bytes) else each for each in texts])


TEMPLATES = [templates.Chat(), templates.Answer(prompt="Q {question}\n", answer="{answer}")]


CHAT = {
    "messages": [{"role": "user", "content": "é"}, {"role": "assistant", "content": "<|user|>"}]
}
CHAT |= {"question": "one {two}", "answer": b"three"}


@holds(
    st.tuples(hostile.altered([CHAT, CHAT], hostile.objects), st.sampled_from(TEMPLATES)),
    lambda: ([CHAT, CHAT], TEMPLATES[0]),
    12,
)
def test_templates_are_filled_as_they_are_called(place, given):
    chats, template = given
    with refusing():
        corpus = prepare(sources.Records(chats), directory=place, template=template)
        # Text that is given as bytes is text to a template, too.
        read = [{k: v.decode() if isinstance(v, bytes) else v for k, v in c.items()} for c in chats]
        check_texts(corpus, ["".join(text for text, _ in template(chat)) for chat in read])


# ---- corpora


EXAMPLES = [[1, 2, 3], [300], [], (5, 6), np.array([7, 8], np.uint16), [True, False]]


@holds(
    hostile.calls(columns=EXAMPLES, vocab_size=400),
    lambda: {"columns": EXAMPLES[:5], "vocab_size": 400},
    40,
)
def test_arrays_become_examples(place, given):
    with refusing():
        corpus = Corpus.from_arrays(directory=place, **given)
        corpus.verify()
        for example, read in zip(given["columns"], corpus, strict=True):
            ids = np.asarray(example).tolist()
            expect(read["inputs"].tolist() == ids[:-1], read, "and not", ids)
            expect(read["targets"].tolist() == ids[1:], read, "and not", ids)


@holds(
    hostile.table_files(of_tokens=True),
    lambda: table([{"input_ids": [1, 2, 3]}, {"input_ids": [5]}]),
    30,
)
def test_tokens_in_place_are_those_of_the_file(place, given):
    end, content, rows = given
    path = write(place / f"a{end}", content)
    with refusing():
        opened = InPlace.arrow(path)
        with refusing(path):
            opened.verify()
        read = [example["inputs"].tolist() for example in opened]
        if rows is not None:
            expect(read == [row["input_ids"][:-1] for row in rows], read, "and not", rows)


TEXTS = [f"text {number} " * (number % 4) for number in range(12)]


def files_in(place: Path) -> dict[str, bytes]:
    """The content of all files in a folder, by their names."""
    paths = [path for path in place.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(place)): path.read_bytes() for path in paths}


@functools.cache
def made(kind: str) -> dict[str, bytes]:
    """The files of a small corpus or run, by name."""
    with folder() as place:
        if kind == "corpus":
            columns = {"tokens": [np.arange(5) + at for at in range(9)]}
            columns["weights"] = [np.linspace(0, 1, 5)] * 9
            Corpus.from_arrays(columns, place)
        elif kind == "prepared":
            prepare(sources.Records(TEXTS), directory=place)
        else:
            corpus = Corpus.from_arrays([np.arange(at % 7) for at in range(30)], place / "corpus")
            plan = Plan(corpus, [pipeline.Bucket(2, 4), pipeline.Bucket(1, 8)], seed=3)
            plan = plan.after(5, seed=4, exclude=[2]).after(12, overflow="truncate")
            write_history(epath.Path(place), corpus, plan)
            lines = [
                {"step": step, "batch": plan.batch(step).digest, "loss": 1.5, "seconds": 0.1}
                for step in range(20)
            ]
            lines.insert(10, {"step": 10, "eval_loss": 2.0})
            (place / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
        return files_in(place)


def put(place: Path, files: dict[str, bytes]) -> None:
    """Writes files by name."""
    for name, content in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)


@st.composite
def damaged_files(draw, *kinds: str) -> tuple[str, str, bytes]:
    """A file of a small corpus or run, damaged or altered: of which, its name, its bytes."""
    kind = draw(st.sampled_from(kinds))
    files = dict(made(kind))
    # What becomes of a run's corpus is told by `damaged_corpora`.
    name = draw(st.sampled_from(sorted(name for name in files if "/" not in name)))
    if name.endswith(".json") and draw(st.booleans()):
        files[name] = json.dumps(draw(hostile.altered(json.loads(files[name])))).encode()
    elif name.endswith(".jsonl") and draw(st.booleans()):
        lines = files[name].splitlines()
        at = draw(st.integers(0, len(lines) - 1))
        lines[at] = json.dumps(draw(hostile.altered(json.loads(lines[at])))).encode()
        files[name] = b"".join(line + b"\n" for line in lines)
    else:
        files[name] = draw(hostile.damaged(files[name]))
    return kind, name, files[name]


def contents(corpus: Any) -> list[dict[str, list]]:
    """All examples."""
    return [{name: ids.tolist() for name, ids in example.items()} for example in corpus]


@functools.cache
def content_of(kind: str) -> tuple[list, str]:
    with folder() as place:
        put(place, made(kind))
        corpus = Corpus.open(place)
        return contents(corpus), corpus.fingerprint


def undamaged(kind: str, name: str) -> tuple[str, str, bytes]:
    """A file as it was made, as `damaged_files` draws them."""
    return kind, name, made(kind)[name]


@holds(damaged_files("corpus", "prepared"), lambda: undamaged("prepared", MANIFEST), 12)
def test_damaged_corpora_are_read_as_before_the_damage(place, given):
    kind, name, content = given
    put(place, {**made(kind), name: content})
    with refusing(place):
        corpus = Corpus.open(place)
        read = contents(corpus)
        corpus.verify()
        repr(corpus), str(corpus)
        expect((read, corpus.fingerprint) == content_of(kind), "read otherwise after", name)
        if kind == "prepared":
            expect(corpus.tokenizer == tokenizers.Bytes(), "another tokenizer")


# ---- plans


BUCKETS = [pipeline.Bucket(2, 8), pipeline.Bucket(1, 24)]
LENGTHS = [5, 3, 0, 24, 7, 1, 16, 3, 9, 2]
PLAN = {"lengths": LENGTHS, "buckets": BUCKETS, "seed": 1, "shuffle": True, "packing": "fill"}
PLAN |= {"overflow": "split", "window": 5, "max_segments": 2, "exclude": [1, 4]}


@holds(hostile.calls(**PLAN), lambda: PLAN, 100)
def test_plans_have_each_position_once(place, given):
    with refusing():
        plan = Plan(**given)
        lengths = np.asarray(given["lengths"]).tolist()
        assert_each_position_once(plan, lengths, 3, exclude=given["exclude"])
        repr(plan), str(plan), plan.fingerprint, plan.padding, plan.max_position
        again = Plan(**given | {"lengths": lengths})
        expect(again.fingerprint == plan.fingerprint, "another fingerprint")
        for step in (0, plan.num_batches(), 10**6):
            same = np.array_equal(plan.batch(step).segments, again.batch(step).segments)
            expect(same, "another batch")


FIT = {"tokens_per_batch": 50, "max_buckets": 2, "max_length": 40, "length_multiple": 4}
FIT |= {"row_multiple": 2, "attention": "segment", "width": 16, "packing": "best_fit"}


@holds(hostile.calls(lengths=LENGTHS, **FIT), lambda: {"lengths": LENGTHS, **FIT}, 90)
def test_fitted_buckets_keep_their_limits(place, given):
    budget = given["tokens_per_batch"]
    with refusing():
        buckets = pipeline.fit_buckets(**given)
        sizes = [bucket.length for bucket in buckets]
        expect(sizes == sorted(set(sizes)), "buckets do not ascend", buckets)
        expect(len(buckets) <= given["max_buckets"], "too many buckets", buckets)
        expect(all(bucket.positions <= budget for bucket in buckets), "over the budget", buckets)


PHASES = [[0, {"a": 1, "b": 0.5}], [7, {"a": "1/3", "b": 2}]]
MIXTURE = {"a": [5, 3, 0, 9], "b": [1, 8, 2], "weights": PHASES, "by": "tokens"}


@holds(hostile.calls(**MIXTURE), lambda: MIXTURE, 100)
def test_rows_of_mixtures_fit_their_buckets(place, given):
    lengths = {name: given.pop(name) for name in "ab"}
    with refusing():
        plan = Plan(lengths, BUCKETS, **given)
        for step in range(40):
            assert_batch_fits(plan.batch(step), {"buckets": BUCKETS}, plan)


# ---- states, histories, schedules


@functools.cache
def changed_plan() -> Plan:
    """A plan that changes twice."""
    plan = Plan([5, 3, 4, 2, 1, 7, 3], [pipeline.Bucket(1, 8)], seed=1)
    return plan.after(4, seed=2).after(9, buckets=[pipeline.Bucket(2, 8)])


@holds(
    st.integers(0, 14).flatmap(
        lambda step: hostile.altered(StateKey(changed_plan()).state(step)) | hostile.values
    ),
    lambda: StateKey(changed_plan()).state(10),
    20,
)
def test_altered_states_resume_the_same_past(place, state):
    plan = changed_plan()
    with refusing():
        at = StateKey(plan).resume(state)
        expect(type(at) is int and at == state["step"], "the step is", at)
        due = StateKey(plan).state(at)["plans"]
        expect(past(state["plans"], at) == past(due, at), "accepted", state, "for", due)


def past(entries: list[dict], step: int) -> list[tuple]:
    """The entries of a state before a step: where each begins, and its fingerprint."""
    some = [(entry["from"], entry["fingerprint"]) for entry in entries]
    return [entry for entry in some if entry[0] < max(step, 1)]


@holds(damaged_files("run"), lambda: undamaged("run", "plans.json"), 20)
def test_damaged_runs_are_audited_and_go_on(place, given):
    kind, name, content = given
    put(place, {**made(kind), name: content})
    work = epath.Path(place)
    intact = content == made(kind)[name]
    with refusing():
        said: list[str] = []
        audit(work, said.append)
        _, plan = read_history(work)
        expect(said[-1].startswith("all "), said)
        for step in range(19):  # the digests that were logged
            digest = plan.batch(step).digest
            expect(digest in made("run")["metrics.jsonl"].decode(), "another batch", step, name)
    with refusing():
        with RunLog(work, 7) as log:
            log.write({"step": 7, "loss": 1.0})
        steps = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
        steps = [line["step"] for line in steps if "loss" in line]
        expect(max(steps) == 7 or not intact, steps)


SCHEDULE = {"seed": 1, "max_buckets": 2, "max_length": 16}
SCHEDULE |= {"length_multiple": 2, "overflow": "split", "packing": "best_fit", "exclude": [3]}
ENTRIES = [[2, {"seed": 2}], [7, {"exclude": [1, 4]}]]
CHANGES = [{"seed": 3}, {"tokens_per_batch": 16}, {"exclude": [1]}, {}]


@holds(
    st.tuples(
        hostile.altered(SCHEDULE),
        hostile.altered(ENTRIES),
        st.lists(st.tuples(st.integers(5, 9), st.sampled_from(CHANGES)), max_size=2),
    ),
    lambda: (SCHEDULE, ENTRIES, [(6, CHANGES[1])]),
    20,
)
def test_schedules_keep_the_past(place, given):
    options, entries, more = given
    options = options | {"tokens_per_batch": 32}
    lengths = np.array([3, 8, 2, 5, 7, 1, 4, 12, 6, 3])
    with refusing():
        schedule = Schedule.make(options, entries).fit(lengths)
        plan = schedule.plan(lengths)
        plan.batch(10)
        later = Schedule.make(options, [*entries, *more])
        went_on = later.resume(json.loads(json.dumps(schedule.as_json())), 5).plan(lengths)
        for step in range(5):
            expect(went_on.batch(step).digest == plan.batch(step).digest, "another past", step)


# ---- command lines

LINES = """
report corpus --tokens-per-batch 128 --max-buckets 2 --packing fill --overflow drop --seed 3
report lengths.json --lengths --tokens-per-batch 16 --max-length 16 --json
report odd.json --lengths --tokens-per-batch 128
buckets lengths.npy --lengths --tokens-per-batch 128 --length-multiple 2 --attention segment
show corpus --tokens-per-batch 64 --step 2 --row 1 --epoch 1 --color always
show run --step 7 --row 0 --begin 1 --end 2
check corpus
audit run --strict
prepare a.jsonl --tokenizer bytes --field text --no-marks --on-error skip
prepare text.txt --kind text --vocab-size 300 --workers=1
prepare odd.json --kind jsonl --ids text --begin-token 1 --end-token 2
"""
lines = st.sampled_from([line.split() for line in LINES.split("\n")[1:-1]])
odd_files = hostile.altered({"lengths": {"3": 40, "17": 8}}).map(lambda each: each.get("lengths"))


@holds(
    st.tuples(lines.flatmap(hostile.altered), odd_files.map(json.dumps), hostile.json_files),
    lambda: (LINES.split("\n")[1].split(), "{}", JSON),
    12,
)
def test_commands_end_with_a_status(place, given):
    from pipeline.cli.arguments import parser
    from pipeline.cli.commands import COMMANDS, Damaged

    line, odd, lines = given
    line = [str(word) for word in line if "\x00" not in str(word)]
    line += ["--into", "new"] * (line[:1] == ["prepare"])
    put(place / "corpus", made("prepared"))
    put(place / "run", made("run"))
    np.save(place / "lengths.npy", np.arange(50))
    write(place / "lengths.json", b'{"3": 40, "17": 8}')
    write(place / "odd.json", odd.encode())
    write(place / "a.jsonl", lines)
    write(place / "text.txt", b"one two\nthree\n")
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), refusing():
        try:
            known = parser().parse_args(line)
        except SystemExit as error:
            expect(error.code in (0, 2) and (out.getvalue() or err.getvalue()), "no usage")
            expect(not accepts.get(), "refused", err.getvalue())
            return
        known.command_line = line
        try:
            COMMANDS[known.command](known)
        except Damaged as error:
            expect(not accepts.get(), "refused", error)


def sentencepiece_model() -> bytes:
    """The model of a tokenizer of some texts."""
    with folder() as place:
        texts = sources.Records([f"text {number} of many words" for number in range(99)])
        tokenizers.train_sentencepiece([(texts, "text")], 290, place / "model")
        return (place / "model").read_bytes()


@holds(
    st.tuples(
        st.sampled_from([tokenizers.SentencePiece, tokenizers.HuggingFace]),
        st.binary(max_size=60) | hostile.values.map(lambda value: json.dumps(value).encode()),
    ),
    lambda: (tokenizers.SentencePiece, sentencepiece_model()),
    6,
)
def test_files_of_other_kinds_are_no_tokenizers(place, given):
    make, content = given
    path = write(place / "model", content)
    with refusing():
        make(path).encode_batch(["a text"])


def test_a_damaged_arrow_file_does_not_crash_the_process(tmp_path):
    schema, batches = pa.schema([("text", pa.string())]), [["one", "two"], ["three"]]
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), schema) as file:
        for texts in batches:
            file.write_batch(pa.record_batch([pa.array(texts)], schema))
    content = (tmp_path / "a.arrow").read_bytes()
    offsets = np.array([0, 3, 6], np.int32).tobytes()
    assert content.count(offsets) == 1
    wrong = np.array([0, 1 << 30, 6], np.int32).tobytes()
    (tmp_path / "a.arrow").write_bytes(content.replace(offsets, wrong))
    with pytest.raises(ValueError, match=r"its column of string cannot be read: .* out of bounds"):
        [dict(record) for record in sources.ArrowFiles(tmp_path / "a.arrow")]
