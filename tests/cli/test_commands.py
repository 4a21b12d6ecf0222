import dataclasses
import json
import os
import pathlib
import re
import shutil
import sys

import numpy as np
import pyarrow as pa
import pytest
from etils import epath
from pyarrow import parquet

import pipeline
import pipeline.report
from pipeline import Bucket, Corpora, Corpus, Feature, Plan, errors, fit_buckets, prepare
from pipeline.cli.check import check_corpus, check_plan
from pipeline.cli.commands import DAMAGED, FINE, WRONG
from pipeline.corpus import Masked
from pipeline.corpus.opening import open_corpus
from pipeline.corpus.tasks import INPUTS
from pipeline.history import write_history
from pipeline.text.sources import Records, TextFiles
from pipeline.text.tokenizers import Bytes, train_sentencepiece
from tests.corpus.files import flip
from tests.corpus.manifests import alter
from tests.processes import call
from tests.text.trained import train_bytes_pairs


@pytest.fixture(autouse=True)
def _few_buckets(monkeypatch):
    """Reports fit few numbers of buckets: more take long."""
    monkeypatch.setattr("pipeline.report.strategies.BUCKETS", (1, 2))


# ---- help and errors


def test_the_program_teaches_also_beside_a_folder_that_is_called_like_the_package(tmp_path):
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "__init__.py").touch()
    done = call(pathlib.Path(sys.executable).parent / "lockstep", "--help", cwd=tmp_path)
    for command in ("prepare", "report", "buckets", "show", "check"):
        assert f"\n  lockstep {command} " in done.stdout
    assert "exit status: 0 all is well; 1 check found an error" in done.stdout


# What is in the folder that mistakes are made with.
TEXTS = {
    "words.txt": "words",
    "body.jsonl": '{"body": "some words"}\n',
    "list.json": "[1, 2]",
    "negative.json": '{"5": -3}',
    "twice.json": '{"5": 3, "5": 4}',
    "deep.json": "[" * 100_000,
    "long.json": f'{{"5": {"9" * 5000}}}',
    "large.json": f'{{"5": {"9" * 400}}}',
}
FILES = [*TEXTS, "nowhere.npy", "folder.json"]
PREPARE = "prepare", "FOLDER/words.txt", "--into", "FOLDER/new"
BODY = "prepare", "FOLDER/body.jsonl", "--into", "FOLDER/new"
UNWRITABLE = (
    "^error: could not write .*; check the path, and that you may write there, and run again$"
)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        *((["report", f"FOLDER/{name}"], name) for name in FILES),
        *((["report", f"FOLDER/{name}", "--lengths"], name) for name in FILES),
        (["report", "FOLDER/some.npy"], "is a file; .* --lengths if .* --tokens if it has tok"),
        (
            ["report", "FOLDER/some.json"],
            "is a file; .* --lengths if .* --tokens if it has tok",
        ),
        (["report", "FOLDER"], "no corpus in .* itself, but in .*sub; give one"),
        (["show", "FOLDER/some.npy"], r"some\.npy is a file; give the directory of a corpus"),
        (["report", "hdfs://a/b"], "hdfs://a/b is on no storage that Lockstep knows; give a local"),
        (["check", "FOLDER/a/sub", "--max-length", "-1"], "--max-length is -1"),
        (["prepare", "a.txt"], "--into is missing; give the directory of the corpus"),
        (["prepare", "FOLDER/words.txt", "--into", "FOLDER/words.txt/x"], UNWRITABLE),
        (["show", "a.bin", "--tokens", "flat", "end=1", "end=2"], "end= is given twice to --tok"),
        ([*PREPARE, "--template", "answer", "answer=a", "answer=b"], "answer= is given twice to"),
        ([*PREPARE, "--key", ""], "a feature is named ''"),
        ([*PREPARE, "--task", "3", "--of", "3"], r"share is \(3, 3\); .* the numbers are 0"),
        ([*PREPARE, "--engine", "ray", "--workers", "3"], "--workers, .* need --engine proc"),
        (BODY, "name the field that holds the text with --field\n"),
        ([*BODY, "--field", "body", "--tokenizer", "sentencepiece"], "choose another --vocab-size"),
    ],
)
def test_a_mistake_is_answered_with_a_sentence(run, tmp_path, arguments, sentence):
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "folder.json").mkdir()
    np.save(tmp_path / "some.npy", np.array([3, 200_000]))
    (tmp_path / "some.json").write_text('{"3": 7}')
    Corpus.from_arrays([np.arange(4)], tmp_path / "a" / "sub")
    err = run.refused(*(each.replace("FOLDER", str(tmp_path)) for each in arguments))
    assert re.search(sentence, err), err
    assert err.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in err
    assert not [*tmp_path.glob("new/*.arrow")]


def test_names_and_signs_are_printed_in_a_shell_of_ascii(tmp_path):
    (tmp_path / "ü.txt").write_text("one\n" * 9)
    language = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    show = ["show", "ö", "--tokens-per-batch", "64", "--max-length", "16"]
    for command in (["prepare", "ü.txt", "--into", "ö"], show):
        done = call(sys.executable, "-m", "pipeline", *command, cwd=tmp_path, **language)
        assert done.returncode == FINE, done.stderr


def test_a_wrong_flag_is_a_usage_error(run):
    assert run("why", "x", "--worst", "0")[0] == WRONG
    err = run.refused("show", "x", "--step", "9" * 5000)
    assert "argument --step: '99999999999999999999…' is not a whole number below 2**63" in err
    assert len(err) < 2000
    assert run()[0] == WRONG
    assert "unrecognized arguments: --foo" in run.refused("show", "x", "--foo")
    for flag, *command in (["--key", *PREPARE], ["--step", "show", "x"], ["--html", "report", "x"]):
        err = run.refused(*command, flag, "1", f"{flag}=1")
        assert f"argument {flag}: it is given twice; remove one of the two" in err


def test_a_defect_has_a_traceback_and_a_mistake_a_sentence(run, monkeypatch, capsys):
    def fail(*_, **__):
        raise ValueError("nobody thought of this")

    monkeypatch.setattr(pipeline.report, "open_dataset", fail)
    with pytest.raises(ValueError, match="nobody thought of this"):
        run("report", "x")
    assert errors.describe(errors.InvalidValue("it is 3"), command="train.py") == 2
    assert capsys.readouterr().err == "train.py: it is 3\n"
    for defect in (ValueError("it is 3"), KeyError("x"), OSError("it is 3")):
        assert errors.describe(defect, command="train.py") == 1
        assert f"{type(defect).__name__}: " in capsys.readouterr().err


def test_a_config_elsewhere_imports_others_of_the_clone_and_beside_it(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    clone = os.fspath(pathlib.Path(pipeline.__file__).parents[1])
    outside = [place for place in sys.path if os.path.abspath(place) not in (clone, str(tmp_path))]
    monkeypatch.setattr(sys, "path", outside)
    for name in [name for name in sys.modules if name.split(".")[0] == "configs"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "beside_it.py").write_text("from configs import quickstart\n")
    (tmp_path / "mine.py").write_text("import beside_it\n")
    status, _, err = run("report", str(tmp_path / "mine.py"))
    assert (status, "has no function get_config()" in err) == (WRONG, True), err
    (tmp_path / "mine.py").write_text("import nowhere\n")
    with pytest.raises(ModuleNotFoundError, match="nowhere"):  # a traceback of the config
        run("report", str(tmp_path / "mine.py"))


# ---- report


def test_a_config_gives_its_corpus_and_its_options(run, text, tmp_path, monkeypatch):
    monkeypatch.setenv("TINY_TEXT", str(text))
    (tmp_path / "mine.py").write_text(
        "from tests.runs import tiny_config\n"
        "def get_config(seed):\n"
        "    config = tiny_config.get_config()\n"
        "    config.seed = int(seed)\n"
        "    return config\n"
    )
    arguments = [f"{tmp_path / 'mine.py'}:7", "--workdir", tmp_path / "run"]
    status, out, _ = run("report", *arguments, "--json", "--max-buckets", 2)
    seen = json.loads(out)
    assert status == FINE
    assert seen["options"]["tokens_per_batch"] == 1024
    assert seen["options"]["seed"] == 7
    assert len(seen["plan"]["buckets"]) <= 2
    # The plan is the one that training makes from the same config.
    corpus = Corpus.open(tmp_path / "run" / "corpus" / "train")
    options = {"tokens_per_batch": 1024, "max_length": 128, "length_multiple": 16}
    model = {"width": seen["options"]["width"]}
    plan = Plan(corpus, fit_buckets(corpus, max_buckets=2, **options, **model), seed=7, **model)
    assert seen["plan"]["fingerprint"] == plan.fingerprint
    out = run.done("check", *arguments)
    assert f"plan: epoch 0: {plan.num_tokens:,} positions, each once" in out


def test_rows_are_as_long_as_a_batch_where_nothing_is_said(run, tmp_path):
    np.save(tmp_path / "long.npy", np.array([100, 5000, 200]))
    for more, row in (([], 2048), (["--row-multiple", 3, "--length-multiple", 32], 672)):
        given = "--tokens-per-batch", 2048, *more
        seen = json.loads(run.done("report", tmp_path / "long.npy", "--lengths", "--json", *given))
        assert seen["sides"][0]["row"] == row
        assert seen["plan"]["losses"]["overlong"] == 1


# ---- buckets and show


def test_buckets_are_those_that_are_fitted_to_a_corpus_once_it_is_finished(run, tmp_path):
    lengths = np.clip(np.random.default_rng(0).lognormal(3, 1, 200), 1, 200).astype(int)
    with pipeline.Writer(tmp_path / "corpus") as writer:
        for length in lengths:
            writer.append(np.ones(length + 1, int))
        writer.seal()
        for command in ("report", "buckets", "show"):
            assert "is not finished" in run.refused(command, tmp_path / "corpus")
        status, _, err = run("check", tmp_path / "corpus")
        assert (status, "is not finished" in err) == (DAMAGED, True)
        writer.finish()
    out = run.done("buckets", tmp_path / "corpus", "--tokens-per-batch", 2048, "--max-buckets", 2)
    pasted: dict = {}
    exec(out, pasted)
    fitted = fit_buckets(lengths, tokens_per_batch=2048, max_buckets=2, length_multiple=None)
    assert pasted["buckets"] == fitted
    assert f"# Fitted to {tmp_path / 'corpus'}\n" in out


# ---- pairs, and the work directories of runs

PAIRED = ["--tokens-per-batch", 512, "--length-multiple", 8, "--overflow", "drop"]
PAIRED += ["--row-multiple", 2]


@pytest.fixture
def groups(tmp_path):
    groups = [([1, 2], [[3, 4], [5]]), ([6], [[7, 8]])]
    return Corpus.from_groups(groups, tmp_path / "groups")


@pytest.mark.parametrize("name", ["corpus", "pairs", "groups"])
def test_check_verifies_sides_and_plans_and_names_what_is_damaged(run, name, request, tmp_path):
    given = request.getfixturevalue(name)
    out = run.done("check", given.directory, "--epoch", 1, *PAIRED)
    heads = ["files:", "offsets:", "fingerprint:", "vocabulary"] * len(given.sides)
    heads += ["duplicates:", "plan:", "plan:"]
    assert [line.split()[0] for line in out.splitlines()] == heads
    learnt = given.lengths if name != "pairs" else given.lengths[given.lengths[:, 1] > 0]
    assert f"plan: epoch 1: {learnt.sum():,} positions, each once" in out
    shutil.copytree(given.directory, tmp_path / "copy")
    part = sorted((tmp_path / "copy").rglob("part-*.arrow"))[-1]
    for damage in (flip, lambda path: path.write_bytes(path.read_bytes()[:-8])):
        damage(part)
        status, _, err = run("check", tmp_path / "copy", *PAIRED)
        assert status == DAMAGED
        assert f"wrong: the corpus is damaged at {part.parent}" in err


def test_check_finds_an_id_outside_the_vocabulary(corpus, tmp_path, monkeypatch):
    copy = shutil.copytree(corpus.directory, tmp_path / "copy")
    monkeypatch.setattr("pipeline.corpus.side.POSITIONS", 50)
    alter(Corpus.open(copy), lambda manifest: manifest.update(vocab_size=999))
    with pytest.raises(ValueError, match="holds the id") as error:
        check_corpus(Corpus.open(copy), lambda what: None)
    found = re.search(r"(\w+) of example (\d+) holds the id (\d+).*from 0 to 998", str(error.value))
    name, example, seen = found.groups()
    assert int(seen) in Corpus.open(copy)[int(example)][name]


def test_every_epoch_of_a_plan_whose_change_dropped_what_was_left_is_whole():
    plan = Plan([5, 3, 14], [Bucket(2, 8), Bucket(1, 16)], overflow="truncate")
    plan = plan.after(5, buckets=[Bucket(3, 12)], overflow="drop")
    for epoch in range(6):
        said = []
        check_plan(plan, epoch, said.append)
        assert said[-1].endswith("no row over its length")


def test_check_finds_a_row_that_is_too_long(monkeypatch):
    small, batch = Bucket(2, 8), Plan.batch
    monkeypatch.setattr(
        Plan, "batch", lambda plan, step: dataclasses.replace(batch(plan, step), bucket=small)
    )
    with pytest.raises(ValueError, match="the batch of step 0 does not fit its bucket 2x8"):
        check_plan(Plan([5, 3, 14], [Bucket(2, 16)]), 0, lambda what: None)


def test_commands_tell_of_every_side(run, tmp_path):
    rng = np.random.default_rng(0)
    features = {"patches": Feature("patches", dtype="float32")}
    sizes = rng.integers(2, 30, (200, 2)).tolist()
    columns = {"tokens": [[1] * n for n, _ in sizes], "patches": [[0.5] * n for _, n in sizes]}
    Corpus.from_arrays(columns, tmp_path / "sides", features=features)
    options = ["--tokens-per-batch", "512", "--cost", "inputs=1,patches=0.5"]
    options += ["--length-multiple", "inputs=8,patches=16"]
    status, out, err = run("report", tmp_path / "sides", *options, "--json", tmp_path / "json")
    assert (status, "\npatches\n" in out) == (FINE, True), err
    seen = json.loads((tmp_path / "json").read_text())
    assert [side["name"] for side in seen["sides"]] == ["inputs", "patches"]
    assert [side["tokens"] for side in seen["sides"]] == [
        sum(n - 1 for n, _ in sizes),
        sum(n for _, n in sizes),
    ]
    assert min(seen["plan"]["used"].values()) > 0.8
    space: dict = {}
    exec(run.done("buckets", tmp_path / "sides", *options), space)
    assert space["buckets"][-1].names == ("inputs", "patches")
    assert "patches ▕" in run.done("show", tmp_path / "sides", *options)
    assert "no row over its length" in run.done("check", tmp_path / "sides", *options)


@pytest.fixture(params=["text", "pairs", "several", "masked"])
def ran(request, corpus, pairs, tmp_path):
    """A run whose plan changed: what it reads, its work directory, and the plan."""
    kind, data, bucket, options, change = request.param, corpus, Bucket(4, 64), {}, {"seed": 1}
    if kind == "pairs":
        data, bucket, options = pairs, Bucket(8, (96, 64)), {"overflow": "drop"}
    if kind == "several":
        data = Corpora({"code": corpus, "prose": corpus})
        options = {"weights": {"code": 2, "prose": 1}}
        change = {"weights": {"code": 1, "prose": 1}}
    if kind == "masked":
        records = Records([f"text {number} " * (number % 9) for number in range(60)])
        data = prepare(records, Bytes(), tmp_path / "corpus", task=INPUTS, progress=False)
        data = Masked(data)
    plan = Plan(data, [bucket], seed=2, **options).after(9, **change)
    if kind == "text":
        plan = Plan(data, [Bucket(16, 16), Bucket(8, 32), bucket], seed=2)
        plan = plan.after(5, seed=4, exclude=[3, 5]).after(40, buckets=[Bucket(2, 256)])
    write_history(epath.Path(tmp_path / "run"), data, plan)
    return kind, tmp_path / "run", plan


def test_show_prints_the_batches_of_a_run_before_and_after_it_changed(run, ran):
    kind, workdir, plan = ran
    for step in (3, 12, 41, 200):
        out = run.done("show", workdir, "--step", step)
        planned = plan.batch(step)
        assert out.startswith(f"step {step} (epoch {planned.epoch}, batch ")
        lengths = planned.bucket.lengths
        assert f"{planned.bucket.rows} rows × {' + '.join(map(str, lengths))} positions" in out
        assert f"digest {planned.digest}\n" in out
        sides = ("inputs ", "targets ") if len(lengths) == 2 else ("",)
        for row in range(planned.bucket.rows):
            assert all(f"\nrow {row:<4}{name}▕" in out for name in sides)
        shares = re.search(r"\nof code \d+\.\d%, prose \d+\.\d%\n", out)
        assert bool(shares) == (kind == "several")
    assert planned.bucket == Bucket(2, 256) or kind != "text"


def test_report_buckets_and_check_are_of_the_plan_of_a_run(run, ran, tmp_path):
    kind, workdir, plan = ran
    bucket = plan.stages[-1].options.buckets[-1]
    page, figures = tmp_path / "page.html", tmp_path / "figures.json"
    status, _, err = run("report", workdir, "--html", page, "--json", figures)
    assert (status, err) == (FINE, f"wrote {page}\nwrote {figures}\n")
    assert str(bucket) in page.read_text()
    seen = json.loads(figures.read_text())
    assert seen["plan"]["fingerprint"] == plan.fingerprint
    assert seen["plan"]["padding"] == pytest.approx(plan.padding)
    own = plan.options.as_json(("packing", "overflow", "seed"))
    assert own.items() <= seen["options"].items()
    assert len(seen["sides"]) == len(bucket.lengths)
    if kind == "text":
        assert [each["bucket"] for each in seen["plan"]["buckets"]] == [[2, 256]]
        last = plan.batch(plan.stages[-1].start).epoch + 1  # whole under the last options
        assert seen["plan"]["batches"] == plan.num_batches(last)
        assert seen["plan"]["buckets"][0]["batches"] == plan.num_batches(last)
    if kind == "several":
        assert re.search("^prose +0.5  ", seen["plan"]["printed"], re.M)
    pasted: dict = {}
    exec(run.done("buckets", workdir), pasted)
    assert pasted["buckets"] == (bucket,)
    out = run.done("check", workdir, "--epoch", 1)
    assert out.count("fingerprint: ") == 1 + (kind in ("pairs", "several"))  # each part is read
    if kind != "several":
        batches = [plan.batch(step) for step in range(plan.first_step(1), plan.first_step(2))]
        tokens = sum(batch.num_tokens for batch in batches)
        assert f"plan: epoch 1: {tokens:,} positions, each once" in out
        assert f"plan: {len(batches):,} batches, no row over its length" in out


# ---- prepare and check


def test_a_command_that_is_interrupted_says_so(run, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("pipeline.cli.prepare.prepare_files", interrupted)
    status, _, err = run("prepare", tmp_path / "a.jsonl", "--into", tmp_path / "c")
    assert status == 130
    assert err == "stopped; finished work is kept; run the same command to continue\n"


def test_prepare_makes_the_sides_that_a_function_returns(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sides_of_a_test.py").write_text(
        "from pipeline import Feature\n"
        "def spell(record):\n"
        "    return {'inputs': [(record['text'], 1.0)], 'letters': {'letters': [1] * 3}}\n"
        "spell.features = {'letters': Feature('letters', dtype='int8')}\n"
    )
    (tmp_path / "a.txt").write_text("ab\ncde\n")
    words = "prepare", "a.txt", "--into", "sides", "--template"
    run.done(*words, "sides_of_a_test:spell")
    assert open_corpus("sides").lengths.tolist() == [[3, 3], [4, 3]]
    run.done("check", "sides", "--cost", "inputs=1,letters=0")
    assert "cannot be imported" in run.refused(*words, "sides_of_a_test:other")
    assert "names inputs, but not letters" in run.refused("report", "sides", "--cost", "inputs=1")
    assert "holds a corpus of several sides" in run.refused("prepare", "a.txt", "--into", "sides")


def test_prepare_trains_a_tokenizer_and_leaves_out_marks(run, tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("".join(f"a line of words, number {n}\n" for n in range(300)))
    options = ["--tokenizer", "sentencepiece", "--vocab-size", 300, "--no-marks"]
    into = tmp_path / "corpus"
    run.done("prepare", text, "--into", into, *options)
    corpus = Corpus.open(into)
    assert (len(corpus), corpus.vocab_size) == (300, 300)
    assert (corpus.tokenizer.begin_id, corpus.tokenizer.end_id) == (None, None)
    model = into / "tokenizer.model"
    again = tmp_path / "again"
    run.done("prepare", text, "--into", again, "--tokenizer", model, "--no-marks")
    assert len(Corpus.open(again)) == 300
    assert Corpus.open(again).tokenizer.fingerprint == corpus.tokenizer.fingerprint
    # If it was exchanged, ids are not decoded to nonsense.
    train_sentencepiece(TextFiles(text), 310, tmp_path / "b.model")
    shutil.copy(tmp_path / "b.model", model)
    with pytest.raises(ValueError, match=r"its tokenizer, .*, cannot be loaded: it is sentencep"):
        _ = Corpus.open(into).tokenizer


def test_prepare_takes_a_template_with_its_fields(run, tmp_path):
    lines = [{"q": f"{n} and one?", "a": f"{n + 1}."} for n in range(200)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    template = ["--template", "answer", "prompt=Q: {q}\nA: ", "answer={a}"]
    out = run.done("prepare", path, "--into", tmp_path / "a", *template)
    corpus = Corpus.open(tmp_path / "a")
    assert corpus.decode(7) == "Q: 7 and one?\nA: 8."
    assert corpus[7]["loss_weights"].tolist() == [0.0] * 17 + [1.0] * 3
    learnt = (
        f"{corpus.num_learnt:,} of them with loss, from {sum(len(n['a']) for n in lines)} bytes"
    )
    assert learnt in out
    (tmp_path / "c.jsonl").write_text(
        json.dumps({"messages": [{"role": r, "content": r[0]} for r in ("user", "bot")]}) + "\n"
    )
    chat = ["--no-marks", "--template", "chat", 'weights={"bot": 1}', "before={role} "]
    run.done("prepare", tmp_path / "c.jsonl", "--into", tmp_path / "c", *chat)
    assert Corpus.open(tmp_path / "c").decode(0) == "user u<|end|>\nbot b<|end|>\n"
    assert Corpus.open(tmp_path / "c").tokenizer == Bytes(begin=False, end=False)
    given = "--into", tmp_path / "d", "--template", "answer", "prompt"
    assert "give NAME=VALUE, with the names prompt, answer" in run.refused("prepare", path, *given)
    assert not (tmp_path / "d").exists()


def test_prepare_keeps_a_key_by_which_examples_are_held_out(run, tmp_path):
    lines = [{"q": "?", "a": f"{n}", "talk": f"talk {n // 4}"} for n in range(80)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    words = "--template", "answer", "prompt={q}", "answer={a}", "--key", "talk"
    run.done("prepare", path, "--into", tmp_path / "a", *words)
    train, held_out = Corpus.open(tmp_path / "a").split(0.3, by="talk")
    talks = [{number // 4 for number in view.numbers.tolist()} for view in (train, held_out)]
    assert not talks[0] & talks[1]
    assert len(held_out) == 4 * len(talks[1])
    with pipeline.load(train, tokens_per_batch=64) as loader:
        assert "talk" not in next(loader)  # but on request
    out = run.refused("prepare", path, "--into", tmp_path / "b", *words[:-1], "conversation")
    assert "conversation is no field of it" in out


def test_prepare_takes_columns_and_a_hugging_face_tokenizer(run, tmp_path):
    table = pa.table({"body": ["one two", "two"], "other": [1, 2]})
    parquet.write_table(table, tmp_path / "a.parquet")
    train_bytes_pairs(["one two"], []).save(str(tmp_path / "words.json"))
    options = ["--field", "body", "--tokenizer", tmp_path / "words.json", "--no-marks"]
    into = tmp_path / "corpus"
    out = run.done("prepare", tmp_path / "a.parquet", "--into", into, *options)
    assert "documents    2" in out
    assert f"now look at it: lockstep report {into}" in out
    assert Corpus.open(into).decode(0) == "one two"
    parquet.write_table(pa.table({"input_ids": [[1, 2]]}), tmp_path / "ids.parquet")
    err = run.refused("prepare", tmp_path / "ids.parquet", "--into", tmp_path / "ids")
    assert "holds tokens, and prepare makes them of text; copy these in Python with" in err
