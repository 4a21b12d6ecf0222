"""Lockstep beside Grain's packer: Grain's own tests, and the pipeline of the migration page."""

import functools
import itertools
import tempfile

import grain
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from grain._src.python.dataset.transformations import testing_util

import pipeline
from pipeline import Bucket, Feature
from pipeline.corpus.tasks import INPUTS
from pipeline.planning.options import Options
from tests.pages import SNIPPETS

# Nested fields, by names that features may have.
flatten = functools.partial(traverse_util.flatten_dict, sep="__")
unflatten = functools.partial(traverse_util.unflatten_dict, sep="__")


def feature(name):
    """The feature of a field, which may be called like a field of batches."""
    return f"feature_{name}"


def widen(values, width, padding=0):
    """`values` with padding up to `width` entries."""
    wide = np.full((width, *values.shape[1:]), padding, values.dtype)
    wide[: len(values)] = values
    return wide


SIDES = ("inputs", "targets")


def sides_of(columns):
    """The names of fields whose elements are equally long, by side; that of the tokens first.

    Without a field of integers, `[n]`, that is None. A field of single numbers is on the side of
    the inputs, where Lockstep refuses it.
    """
    by_sizes = {}
    for name, values in columns.items():
        sizes = tuple(len(each) if each.ndim else None for each in values)
        by_sizes.setdefault(sizes, []).append(name)
    numbers = [name for sizes in [*by_sizes] if None in sizes for name in by_sizes.pop(sizes)]
    sides = {}
    for side, names in zip(SIDES, by_sizes.values(), strict=False):
        integers = (n for n in names if columns[n][0].dtype.kind == "i" and columns[n][0].ndim == 1)
        tokens = next(integers, None)
        sides[side] = [tokens, *(name for name in names if name != tokens)]
    sides["inputs"] += numbers
    return sides


def with_mark(values):
    """The entries of a decoder's side, which begins with a mark."""
    return np.concatenate([np.ones_like(values, shape=(1, *values.shape[1:])), values])


def corpus_of(columns, sides, of_examples, folder):
    """The corpus of some columns: pairs, if there are two sides.

    A side without tokens has placeholders. Features have no bfloat16, which float32 holds exactly.
    """
    features, given = {}, []
    for side, (tokens, *others) in sides.items():
        sized = columns[tokens or others[0]]
        mine = {"tokens": [each if tokens else np.zeros(len(each), int) for each in sized]}
        for name in others:
            dtype = np.float32 if columns[name][0].dtype == jnp.bfloat16 else None
            mine[feature(name)] = [np.asarray(each, dtype) for each in columns[name]]
            features[feature(name)] = Feature(side, shape=columns[name][0].shape[1:])
        if side == "targets":
            mine = {name: [*map(with_mark, values)] for name, values in mine.items()}
        given.append(mine)
    for name in of_examples:
        given[0][feature(name)] = columns[name]
        features[feature(name)] = Feature("example", shape=columns[name][0].shape)
    if len(given) > 1:
        return pipeline.Pairs.from_arrays(*given, folder, features=features)
    return pipeline.Corpus.from_arrays(*given, folder, features=features, task=INPUTS)


class LockstepRows(grain.IterDataset):
    """Rows in place of Grain's, from all elements at once; `folder` is set by the tests.

    Packed fields are tokens and features of tokens, meta features are features of examples.
    """

    folder = None

    def __init__(
        self,
        parent,
        *,
        length_struct,
        meta_features=(),
        pack_alignment_struct=None,
        padding_struct=None,
        max_sequences_per_bin=None,
        shuffle_bins_group_by_feature=None,
        **_,
    ):
        super().__init__(parent)
        self._lengths, self._padding = flatten(length_struct), flatten(padding_struct or {})
        self._group = shuffle_bins_group_by_feature
        fields = [*self._lengths, *(name for name in meta_features if name not in length_struct)]
        self._meta = [name for name in fields if name.split("__")[0] in meta_features]
        self._packed = [name for name in fields if name not in self._meta]
        (align,) = {*flatten(pack_alignment_struct or {"all": 1}).values()}
        self._options = {"max_segments": max_sequences_per_bin, "align": align, "shuffle": False}
        Options(buckets=[Bucket(1, align)], **self._options)  # refuses them before any element

    def __iter__(self):
        elements = [flatten(each) for each in itertools.islice(iter(self._parent), 200)]
        groups = {}  # a plan for each, as epochs are planned one after another
        for element in elements:
            group = element[self._group].item() if self._group else None
            groups.setdefault(group, []).append(element)
        rows = [self._rows(groups[group]) for group in sorted(groups)]
        if len(rows) > 1:
            return iter(grain.MapDataset.concatenate(rows).to_iter_dataset())
        return iter(rows[0].to_iter_dataset())

    def _rows(self, elements):
        packed, meta = (
            {name: [np.asarray(element[name]) for element in elements] for name in names}
            for names in (self._packed, self._meta)
        )
        of_examples = [name for name, values in meta.items() if len({v.shape for v in values}) == 1]
        sides = sides_of(packed)
        folder = tempfile.mkdtemp(dir=self.folder)
        corpus = corpus_of(packed | meta, sides, of_examples, folder)
        widths = [min(self._lengths[name] for name in names if name) for names in sides.values()]
        bucket = Bucket(1, tuple(widths) if len(widths) > 1 else widths[0])
        plan = pipeline.Plan(corpus, [bucket], **self._options)

        def to_row(batch):
            batch = {name: values[0] for name, values in batch.items()}
            row = {}
            for side, (tokens, *others) in sides.items():
                ids, positions = batch[f"{side}_segment_ids"], batch[f"{side}_positions"]
                fields = {name: feature(name) for name in others}
                for name, ours in (fields | ({tokens: side} if tokens else {})).items():
                    padding, width = self._padding.get(name, 0), self._lengths[name]
                    values = np.array(batch[ours], packed[name][0].dtype)
                    values[ids == 0] = padding
                    row[name] = widen(values, width, padding)
                    row[f"{name}_segment_ids"] = widen(ids, width)
                    row[f"{name}_positions"] = widen(positions, width)
            numbers = batch["example_id"][batch["example_id"] >= 0]
            for name in meta:
                if name in of_examples:
                    values = batch[feature(name)][: len(numbers)]
                else:  # arrays of several shapes are no feature: looked up by number
                    values = [meta[name][number] for number in numbers]
                in_row = name in self._lengths
                row[name] = widen(np.ravel(values), self._lengths[name]) if in_row else [*values]
            return unflatten(row)

        batches = pipeline.Batches(corpus, plan, features=[*corpus.features, "example_id"])
        return batches.map(to_row)


def segments_of(row):
    """The segments of a row, in any order, with their meta features; what its padding holds."""
    ends = ("_segment_ids", "_positions")
    fields = sorted(name for name in row if not name.endswith(ends))
    packed = [name for name in fields if f"{name}_segment_ids" in row]
    meta = [name for name in fields if name not in packed]
    ids = {name: row[f"{name}_segment_ids"] for name in packed}

    def entries(number):
        """Those of the segment with this id, 0: of padding."""
        for name in packed:
            here = ids[name] == number
            yield [name, row[name][here].tolist(), row[f"{name}_positions"][here].tolist()]

    count = max(int(each.max()) for each in ids.values())
    segments = [
        [*entries(number), *([name, np.asarray(row[name][number - 1]).tolist()] for name in meta)]
        for number in range(1, 1 + count)
    ]
    rest = [np.asarray(row[name][count:]).tolist() for name in meta]
    return sorted(segments), [*entries(0)], rest


def assert_equal_rows(rows, expected):
    """The same segments in the same rows, in any order; those of a group before the next group."""
    assert sorted(map(segments_of, rows)) == sorted(map(segments_of, expected))
    for row, other in zip(rows, expected, strict=True):
        assert "epoch" not in row or row["epoch"].max() == other["epoch"].max()


def assert_equally_aligned(rows, expected):
    """The same segments in as many rows, each at a multiple of 4; others may share a row."""
    assert len(rows) == len(expected)
    segments, others = ([segments_of(row)[0] for row in each] for each in (rows, expected))
    assert sorted(itertools.chain(*segments)) == sorted(itertools.chain(*others))
    for row, (side, padding) in itertools.product(rows, [("inputs", 0), ("targets", -1)]):
        ids = row[f"{side}_segment_ids"]
        assert (row[side][ids == 0] == padding).all()
        starts = np.flatnonzero((row[f"{side}_positions"] == 0) & (ids > 0))
        assert (starts % 4 == 0).all()


# They expect an error in Grain's words; Lockstep refuses the same in its own.
WORDS = ("invalid_value", "nested_feature1")


@pytest.mark.slow
class TestGrainsBestFit(testing_util.BaseBestFitPackIterDatasetTest):
    packer_cls = LockstepRows
    test_pack_sequences_with_zeros = None  # elements with three lengths, of which some are 0

    @pytest.fixture(autouse=True)
    def _lockstep(self, tmp_path, monkeypatch):
        name = self._testMethodName
        if any(each in name for each in WORDS):
            refused = functools.partial(pytest.raises, pipeline.errors.InvalidValue)
            monkeypatch.setattr(self, "assertRaisesRegex", lambda *_: refused())
        compare = assert_equally_aligned if name.endswith("padding_struct_4") else assert_equal_rows
        monkeypatch.setattr(LockstepRows, "folder", tmp_path)
        monkeypatch.setattr(testing_util, "_assert_trees_equal", compare)


# The migration page's pipeline with a score of each token and a label of each document.


def of_documents(batches, scores):
    """What batches have for each document: inputs, targets, score and label of each target.

    Scores are all different, so each tells its document and its token.
    """
    flat = np.concatenate(scores)
    order = np.argsort(flat)
    found = np.full((len(flat), 4), np.nan)
    for batch in batches:
        row, column = np.nonzero(batch["inputs_segment_ids"])
        segments = batch["inputs_segment_ids"][row, column]
        score = batch["score"][row, column]
        fields = [batch[name][row, column] for name in ("inputs", "targets")]
        values = np.stack([*fields, score, batch["label"][row, segments - 1]], 1)
        at = order[np.searchsorted(flat[order], score)]
        assert np.isnan(found[at]).all(), "a score came twice"
        found[at] = values
    return np.split(found, np.cumsum([len(score) for score in scores])[:-1])


@pytest.mark.parametrize("sizes", ["(5, 9, 30, 3)", "range(3, 90)"])
def test_the_pipelines_of_the_migration_page_have_equal_values(sizes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = []
    for snippet in SNIPPETS:
        if '"score"' in snippet.content and snippet.page.name == "migration.md":
            assert "in (5, 9, 30, 3)]" in snippet.content
            names = {}
            exec(snippet.content.replace("(5, 9, 30, 3)", sizes), names)
            rows = names["batches"] if "batches" in names else names["rows"].batch(2)
            found.append(of_documents(rows, names["scores"]))
    theirs, ours = found
    given = (names[each] for each in ("documents", "scores", "labels"))
    documents = zip(theirs, ours, *given, strict=True)
    for expected, values, tokens, score, label in documents:
        np.testing.assert_array_equal(values, expected)
        assert np.isnan(values[0]).all()  # nothing predicts the first token
        known = [tokens[:-1], tokens[1:], score[1:], np.full(len(tokens) - 1, label)]
        np.testing.assert_array_equal(values[1:], np.stack(known, 1))
