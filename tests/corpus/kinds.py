"""Corpora of every kind, and columns with every kind of feature."""

import dataclasses

import numpy as np
import pyarrow as pa

import pipeline
from pipeline import Corpora, Corpus, Feature, FillInTheMiddle, InPlace, Masked, Pairs
from pipeline.corpus import CAUSAL, INPUTS
from pipeline.text.sources import Records
from pipeline.text.tokenizers import Bytes
from tests.corpus.token_writers import write_flat, write_megatron
from tests.loading.definition import Field, define_batch
from tests.text.record_files import write_table

FORMATS = ["arrow", "stream", "lz4", "uint16", "npy", "megatron", "flat"]
STORED = ["arrays", "weighted", "features", "cached", "weighted cached", "features cached"]
STORED += ["groups", "groups cached"]
JOINED = {"joined": ("arrays", "weighted"), "groups joined": ("groups", "arrays")}
JOINED |= {"masked joined": ("masked", "masked"), "pairs joined": ("pairs", "pairs")}
KINDS = [*STORED, *JOINED, *FORMATS, "masked", "middle", "pairs"]
SIZES = np.random.default_rng(0).integers(0, 45, 80)
FEATURES = {
    "logprob": Feature("targets"),
    "routing": Feature("inputs", dtype="uint8", shape=(2, 3)),
    "seen": Feature("inputs", shape=3),
    "half": Feature("targets", dtype="float16"),
    "reward": Feature("example"),
    "flags": Feature("example", dtype=bool, shape=5),
    "offsets": Feature("example", dtype="int32"),  # as a part of a file is named
}


def draw_columns(sizes):
    """Tokens, weights and features of examples of these sizes."""
    rng = np.random.default_rng(0)
    return {
        "tokens": [rng.integers(1, 99, n, np.int32) for n in sizes],
        "weights": [(rng.random(n) < 0.5) * (1 if at < 8 else 0.25) for at, n in enumerate(sizes)],
        "logprob": [rng.normal(size=n) for n in sizes],
        "routing": [rng.integers(0, 256, (n, 2, 3)) for n in sizes],
        "seen": [rng.random((n, 3)) < 0.5 for n in sizes],
        "half": [rng.normal(size=n).astype(np.float16) for n in sizes],
        "reward": [rng.normal() for _ in sizes],
        "flags": [rng.random(5) < 0.5 for _ in sizes],
        "offsets": range(len(sizes)),
    }


def ids_of(sizes):
    """Ids that differ from those of any other number of sizes."""
    rng = np.random.default_rng(len(sizes))
    return [rng.integers(3, 99, size) for size in sizes]


def make(kind, directory, sizes=SIZES):
    """A corpus of examples of about these sizes."""
    if kind in JOINED:
        shares = zip(JOINED[kind], (sizes[:30], sizes[30:]), strict=True)
        made = (make(one, directory / f"{n}", some) for n, (one, some) in enumerate(shares))
        return Corpora({f"{number}": corpus for number, corpus in enumerate(made)})
    ids, options = ids_of(sizes), {"progress": False, "num_workers": 0}
    if kind in FORMATS:
        directory.mkdir()
        return in_place(kind, directory, ids)
    if kind in STORED:
        if "groups" in kind:
            Corpus.from_groups([*map(group_of, ids)], directory, vocab_size=99)
        elif "features" in kind:
            Corpus.from_arrays(draw_columns(sizes), directory, features=FEATURES, vocab_size=99)
        else:
            weights = {"weights": [row / 7 for row in ids]} if "weighted" in kind else {}
            Corpus.from_arrays({"tokens": ids, **weights}, directory, vocab_size=99)
        cache = directory.with_name(f"cache of {directory.name}")
        return Corpus.open(directory, cache=cache if "cached" in kind else None)
    if kind == "pairs":
        return Pairs.from_arrays(ids, ids[::-1], directory, vocab_size=99)
    texts = Records(["".join(chr(id_ + 31) for id_ in some) for some in ids])
    if kind == "middle":
        corpus = pipeline.prepare(texts, Bytes(), directory, **options)
        return FillInTheMiddle(corpus, 0.6, mode="spm", loss="middle")
    corpus = pipeline.prepare(texts, Bytes(), directory, task=INPUTS, **options)
    return Masked(corpus)


def group_of(ids):
    """A group, or a tree, of these ids and a few more."""
    prefix, one, two, three = np.array_split(np.append(ids, [3, 4, 5, 6]), 4)
    return (prefix, [one, two, three]) if len(ids) % 2 else (prefix, [(one, [two, three])])


def in_place(kind, directory, examples, task=CAUSAL):
    """Examples as another program would have stored them, in two files of many groups."""
    options = {"task": task, "vocab_size": 99}
    if kind == "npy":
        names = directory / "tokens.npy", directory / "offsets.npy"
        np.save(names[0], np.concatenate(examples).astype(np.uint16))
        np.save(names[1], np.cumsum([0, *map(len, examples)]))
        return InPlace.npy(*names, **options)
    if kind in ("megatron", "flat"):
        for number, mine in enumerate((examples[:15], examples[15:])):
            if kind == "megatron":
                write_megatron(directory / f"{number}", [[document] for document in mine])
            else:
                write_flat(directory / f"{number}.npy", mine)
        if kind == "flat":
            return InPlace.flat(directory / "*.npy", dtype="uint16", **options)
        return InPlace.megatron(directory / "*", **options)
    item = {"arrow": pa.int32(), "stream": pa.int64(), "lz4": pa.int32(), "uint16": pa.uint16()}
    held = pa.large_list(item[kind]) if kind == "lz4" else pa.list_(item.get(kind, pa.int64()))
    for number, mine in enumerate((examples[:15], examples[15:])):
        ids = pa.array([row.tolist() for row in mine], held)
        table = pa.table({"other": ["x"] * len(mine), "input_ids": ids})
        write_table(directory / f"{number}.{kind}", table, rows=4)
    return InPlace.arrow(str(directory / f"*.{kind}"), **options)


def require_read(side, examples, starts, sizes, reach, wholes, **epoch):
    """Pieces that are read together are those of `wholes`, the whole examples."""
    read, at = side.read(examples, starts, sizes, reach, **epoch), 0
    assert all(len(values) == sum(reach) for values in read.values())
    for whole, start, size, end in zip(wholes, starts, sizes, reach, strict=True):
        assert size == 0 or {*whole} <= {*read}
        for name, values in read.items():
            # Of a corpus without weights, beside one that has.
            due = whole.get(name, np.ones(start + size, np.float32))[start : start + size]
            np.testing.assert_array_equal(values[at : at + size], due, name)
            assert values.dtype == due.dtype
        at += end


def require_pieces(corpus, planned, batch):
    """Each segment of a batch is what the corpus, or the one of several, reads; all else is 0."""
    several = isinstance(corpus, Corpora)
    corpora, first = ([*corpus.corpora.values()], corpus.first) if several else ([corpus], [0])
    fields, segments = {}, planned.segments
    whiches = np.searchsorted(first, segments[:, 1], side="right") - 1
    for number, side in enumerate(planned.bucket.names):
        ends, wholes = segments[:, 2] + segments[:, 3 + number], []
        for which, (_, example, *_), end, epoch in zip(
            whiches, segments, ends, planned.epoch_of_segments, strict=True
        ):
            side_of_corpus = [*corpora[which].sides.values()][number]
            wholes.append(side_of_corpus.read([example - first[which]], [0], [end], epoch=epoch))
        learns = number == len(planned.bucket.names) - 1
        for name in {*wholes[0]} | ({"loss_weights"} if learns else set()):
            ones = (np.ones(end, np.float32) for end in ends)
            values = [whole.get(name, one) for whole, one in zip(wholes, ones, strict=True)]
            fields[name] = Field(side, values, values[0].dtype)
    segments = np.insert(np.delete(segments, 1, 1), 1, range(len(segments)), 1)
    numbered = dataclasses.replace(planned, segments=segments)
    for name, values in define_batch(fields, numbered, planned.align).items():
        if not name.endswith("_positions"):
            np.testing.assert_array_equal(batch[name], values, name)
