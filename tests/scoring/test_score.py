"""Scores: each example once and in order, as if it were alone, whatever interrupts the run."""

import contextlib
import json
import random
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pipeline
from pipeline.scoring import scores as scoring
from pipeline.scoring import table
from pipeline.scoring.table import Parts
from tests.corpus.files import flip
from tests.history.documents import write_documents
from tests.meshes import mesh_of
from tests.processes import COMPILE_QUICKLY, Group, environment, free_port
from tests.runs.runs import messages

SHORT = pipeline.Bucket(8, 32), pipeline.Bucket(4, 64)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Parts of three steps, and record batches of 70 rows."""
    monkeypatch.setattr(scoring, "STEPS", 3)
    monkeypatch.setattr(table, "ROWS", 70)


def test_scores_of_pairs_do_not_depend_on_where_segments_begin(pairs, tmp_path):
    def step(batch):
        of_segment = jax.nn.one_hot(batch["targets_segment_ids"] - 1, 16)
        sums = jnp.einsum("rls,rl->rs", of_segment, batch["targets"].astype(jnp.float32))
        return {"inputs": batch["inputs"], "targets": batch["targets"], "sum": sums}

    per = {"inputs": "inputs", "targets": "targets", "sum": "segment"}
    options = {"per": per, "overflow": "truncate", "max_segments": 16}
    options |= {"buckets": [pipeline.Bucket(4, (96, 64))]}
    one, other, means = (
        pipeline.score(pairs, step, directory=tmp_path / str(more), **options, **more).to_pylist()
        for more in ({"align": 1}, {"align": 8}, {"reduce": "mean"})
    )
    assert one == other
    for example, row, mean in zip(pairs, one, means, strict=True):
        inputs, targets = example["inputs"].tolist(), example["targets"].tolist()
        due = {"inputs": inputs, "targets": targets, "sum": sum(targets)}
        assert row == (due if targets else dict.fromkeys(per))  # else it is in no batch
        if targets:
            assert mean["inputs"] == pytest.approx(sum(inputs) / max(len(inputs), 1))


def positions_and_segments(batch):
    """What says where each value came from."""
    ids, inputs = batch["inputs_segment_ids"], batch["inputs"]
    of_segment = jax.nn.one_hot(ids - 1, 16)
    sums = jnp.einsum("rls,rl->rs", of_segment, inputs.astype(jnp.float32))
    means = sums / jnp.maximum(of_segment.sum(1), 1)
    return {
        "token": inputs,
        "wide": jnp.stack([inputs, batch["inputs_positions"]], axis=-1).astype(jnp.bfloat16),
        "segment": jnp.stack([means, 2 * means], axis=-1),
        "even": inputs % 2 == 0,
    }


PER = {"token": "position", "wide": "position", "segment": "segment", "even": "position"}
OPTIONS = {"tokens_per_batch": 1024, "length_multiple": 16, "max_segments": 16, "max_buckets": 2}


def test_values_of_positions_and_segments_keep_their_shapes(corpus, tmp_path):
    scores = pipeline.score(corpus, positions_and_segments, directory=tmp_path, per=PER, **OPTIONS)
    assert [str(each.type) for each in scores.schema] == [
        "large_list<item: bool>",
        "fixed_size_list<item: float>[2]",
        "large_list<item: int32>",
        "large_list<item: fixed_size_list<item: float>[2]>",
    ]
    for example, row in zip(corpus, scores.to_pylist(), strict=True):
        tokens = example["inputs"]
        if not len(tokens):
            assert row == dict.fromkeys(PER)
            continue
        assert row["token"] == tokens.tolist()
        assert row["even"] == [token % 2 == 0 for token in tokens]
        assert [each[1] for each in row["wide"]] == list(range(len(tokens)))
        np.testing.assert_allclose(row["segment"], [tokens.mean(), 2 * tokens.mean()], rtol=1e-6)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_records_of_split_examples_are_reduced_to_one(corpus, reduce, tmp_path):
    options = OPTIONS | {"max_length": 48}
    scores = pipeline.score(
        corpus, positions_and_segments, directory=tmp_path, per=PER, reduce=reduce, **options
    )
    assert corpus.lengths.max() > 3 * 48
    for example, row in zip(corpus, scores.to_pylist(), strict=True):
        tokens = example["inputs"]
        if len(tokens):
            assert row["token"] == getattr(tokens, reduce)()
            assert row["even"] == getattr(tokens % 2 == 0, reduce)()
            if reduce == "mean":  # of a segment's mean: weighted by positions
                np.testing.assert_allclose(row["segment"][0], tokens.mean(), rtol=1e-6)


def ready(batch):
    """A step for tests of files."""
    return {"token": batch["inputs"], "half": batch["inputs"] / 2}


READY = {"buckets": SHORT, "per": "position"}


def files(directory):
    # A kill may leave the file by which hosts see that they share a directory.
    paths = [path for path in directory.iterdir() if not path.name.startswith(".shared.")]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


class Killed(BaseException):
    """In place of SIGKILL."""


@pytest.fixture
def interrupted(monkeypatch):
    """`interrupted(count, …)`: `score` is killed after so many parts.

    It returns the numbers of the parts that were written, and the scores, or None.
    """
    write = Parts.write

    def score(count, *arguments, directory, **options):
        def write_some(self, number, arrays):
            if len(written) == count:
                name = f".000000000-000000002-{0:016x}.{0:012x}.npz.{0:032x}.tmp"
                (directory / "scores.parts" / name).touch()
                raise Killed
            write(self, number, arrays)
            written.append(number)

        written, scores = [], None
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            patch.setattr(Parts, "write", write_some)
            scores = pipeline.score(*arguments, directory=directory, **options)
        return written, scores

    return score


def test_an_interrupted_call_goes_on_where_it_was(corpus, tmp_path, interrupted, monkeypatch):
    once, again = tmp_path / "once", tmp_path / "again"
    pipeline.score(corpus, ready, directory=once, **READY)
    interrupted(4, corpus, ready, directory=again, **READY)
    flip(sorted((again / "scores.parts").glob("*.npz"))[2])  # a damaged part is made again
    numbers, scores = [], None
    while scores is None:
        written, scores = interrupted(2, corpus, ready, directory=again, **READY)
        numbers += written
    assert len(numbers) > 4
    assert numbers == list(range(2, len(numbers) + 2))  # from there on, none is written twice
    assert files(again) == files(once)
    assert not (again / "scores.parts").exists()
    # A further call finds all done, and runs nothing.
    monkeypatch.setattr(Parts, "write", None)
    assert pipeline.score(corpus, ready, directory=again, **READY).equals(scores)


class Scale:
    """A step with a number that no name of it tells."""

    def __init__(self, by):
        self.by = by

    def __call__(self, params, batch):
        return {"value": batch["inputs"] * self.by + params["w"].sum()}


def test_scores_of_something_else_are_refused(corpus, tmp_path):
    def score(given=corpus, by=2, w=3, **options):
        state = {"w": jnp.full(4, w), "scale": 2.0, "key": jax.random.key(0)}
        options = READY | {"max_segments": 16, "state": state} | options
        return pipeline.score(given, Scale(by), directory=tmp_path, **options)

    first = score()
    for changed, sentence in (
        ({"given": pipeline.Corpora({"a": corpus, "b": corpus})}, "tokens was"),
        ({"max_segments": 17}, "max_segments was 16 and is now 17"),
        ({"epoch": 1}, "epoch was 0 and is now 1"),
        ({"positions": "restart"}, "positions was continue and is now restart"),
        ({"reduce": "sum"}, "value was every int32 per position and is now sum int32 per position"),
        ({"w": 4}, "state was"),
        ({"by": 3, "version": "3"}, "version was  and is now 3"),
    ):
        with pytest.raises(ValueError, match=f"{sentence}.* another directory, or delete this one"):
            score(**changed)
    with messages() as said:
        assert score().equals(first)
    assert "scores.arrow has these scores already" in str(said)
    values = first["value"].to_pylist()  # the table is mapped
    flip(tmp_path / "scores.arrow")
    with pytest.raises(ValueError, match=r"scores\.arrow is damaged; delete it, and score again"):
        score()
    (tmp_path / "scores.arrow").unlink()
    assert score()["value"].to_pylist() == values


@pytest.mark.parametrize(("name", "make"), [("scores.arrow", "touch"), ("scores.json", "mkdir")])
def test_a_file_of_somebody_else_by_the_name_of_scores_stays(corpus, name, make, tmp_path):
    getattr(tmp_path / name, make)()
    with pytest.raises(ValueError, match="score into another directory, or delete"):
        pipeline.score(corpus, ready, directory=tmp_path, **READY)
    assert [path.name for path in tmp_path.iterdir() if path.name != ".lock"] == [name]


@pytest.mark.parametrize("content", [None, "{}"])
def test_parts_of_two_models_never_make_one_table(corpus, content, tmp_path, interrupted):
    """Also if what says which scores they are was deleted or damaged in between."""
    options = READY | {"state": {"w": jnp.zeros(1)}, "buckets": SHORT[1:]}
    expected = pipeline.score(corpus, Scale(3), directory=tmp_path / "once", **options)
    options["directory"] = tmp_path / "again"
    assert interrupted(2, corpus, Scale(2), version="2", **options) == ([0, 1], None)
    manifest = tmp_path / "again" / "scores.json"
    if content is not None:
        manifest.write_text(content)
        with pytest.raises(ValueError, match=r"scores\.json does not describe scores"):
            pipeline.score(corpus, Scale(3), **options)
    manifest.unlink()
    assert pipeline.score(corpus, Scale(3), **options).equals(expected)


def test_files_of_the_user_beside_the_scores_stay(corpus, tmp_path):
    mine = [tmp_path / folder / "mine.npz" for folder in ("parts", "scores.parts")]
    for path in mine:
        path.parent.mkdir()
        path.touch()
    pipeline.score(corpus, ready, directory=tmp_path, **READY)
    assert [[*path.parent.iterdir()] for path in mine] == [[path] for path in mine]


def test_a_record_per_row_is_that_of_its_only_example(corpus, tmp_path):
    def step(batch):
        return {"sum": batch["inputs"].sum(1)}

    with pytest.raises(ValueError, match="rows hold up to 16 examples; give max_segments=1"):
        pipeline.score(corpus, step, directory=tmp_path, per="row", **OPTIONS)
    options = OPTIONS | {"max_segments": 1, "length_multiple": 1}  # the longest fills its row
    scores = pipeline.score(corpus, step, directory=tmp_path, per="row", **options)
    sums = [int(each["inputs"].sum()) or None for each in corpus]
    assert scores["sum"].to_pylist() == sums


def test_devices_share_batches_and_a_later_call_keeps_their_rows(corpus, tmp_path):
    mesh = mesh_of(data=4)

    def score(name, **options):
        options |= {"directory": tmp_path / name, "per": "position"}
        return pipeline.score(corpus, ready, **OPTIONS | options)

    few = {"tokens_per_batch": 896, "max_length": 128, "max_buckets": 1}  # for 7 rows, or for 4
    assert score("few", sharding=mesh, **few).equals(score("few", **few))
    scores = score("four", sharding=mesh)
    about = json.loads((tmp_path / "four" / "scores.json").read_text())
    assert about["row_multiple"] == 4
    assert score("four").equals(scores)
    with jax.set_mesh(mesh):
        assert score("four", sharding=mesh).equals(scores)
        assert score("set", num_threads=3).equals(scores)  # the mesh that is set
    assert files(tmp_path / "set") == files(tmp_path / "four")
    score("one", row_multiple=4)
    score("length", sharding=mesh_of(context=4), row_multiple=4)
    assert files(tmp_path / "one") == files(tmp_path / "length") == files(tmp_path / "four")


def start(count, folder, corpus, directory, **asked):
    """Scores a corpus in `count` processes, which have four devices together."""
    asked |= {"do": "score", "mesh": {"data": 4}, "count": count, "port": free_port()}
    asked |= {"corpus": str(corpus.directory), "directory": str(directory)}
    requests = [json.dumps(asked | {"index": index}) for index in range(count)]
    flags = f"--xla_force_host_platform_device_count={4 // count} {COMPILE_QUICKLY}"
    commands = [["tests/runs/host_worker.py", request] for request in requests]
    return Group(commands, folder, environment(XLA_FLAGS=flags, NPROC="16"))


@pytest.mark.slow
def test_files_are_equal_on_1_2_and_4_processes_and_after_ten_kills(tmp_path):
    many = write_documents(tmp_path / "many", 600)  # some of them longer than 32
    for count in (1, 2, 4):
        group = start(count, tmp_path / f"logs{count}", many, tmp_path / str(count))
        assert group.wait() == [0] * count, group.outputs()
    assert files(tmp_path / "1")["scores.arrow"]
    assert files(tmp_path / "1") == files(tmp_path / "2") == files(tmp_path / "4")
    moments, killed = random.Random(0), tmp_path / "killed"

    def saved():
        return len(list((killed / "scores.parts").glob("0*.npz")))

    for number in range(10):
        logs = tmp_path / f"kill{number}"
        # Every other time by two processes, so that each number continues what the other began.
        group = start(1 + number % 2, logs, many, killed, seconds=0.2)
        before, asked = saved(), moments.choice([0, 1, 1, 2])
        while "BEGUN" not in group.outputs()[0] or saved() < before + asked:
            assert group.processes[0].is_alive(), group.outputs()
            time.sleep(0.02)
        time.sleep(moments.uniform(0, 0.3))
        assert group.processes[0].is_alive(), group.outputs()
        group.kill()
    assert saved() > 3  # every start went on
    assert start(1, tmp_path / "last", many, killed).wait() == [0]
    assert files(killed) == files(tmp_path / "1")
