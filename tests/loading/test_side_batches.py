"""Examples of several sides: devices, files, views, masks, scores and what is refused."""

import functools
import pickle

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import pipeline
from pipeline import Batches, Bucket, Corpora, Corpus, Examples, Feature, Plan, follow, pack, unpack
from pipeline.corpus import CAUSAL
from pipeline.corpus.opening import open_corpus
from pipeline.fields import cu_seqlens
from pipeline.loading.loader import Loader
from pipeline.loading.sharding import CONTEXT_ORDERS, batch_sharding, column_order
from pipeline.loading.transfer import field_specs
from tests.loading.definition import require_same
from tests.loading.drawn import Drawn
from tests.meshes import OneProcess, mesh_of


def draw_pictures():
    drawn = Drawn(np.random.default_rng(0), CAUSAL, ["patches", "images"], 40, most=8)
    drawn.add_pointers()
    drawn.add("patch", Feature("inputs", to="patches"))
    drawn.add("patch_image", Feature("patches", to="images"))
    return drawn


PICTURES = Bucket(8, {"inputs": 16, "patches": 24, "images": 8})


def divide(batch, corpus, order, parts):
    """A batch whose columns are in this order, and whose pointers follow what they point to."""
    lengths = zip(corpus.side_names, PICTURES.lengths, strict=True)
    orders = {name: column_order(order, length, parts) for name, length in lengths}
    found = {}
    for name, values in batch.items():
        feature = corpus.features.get(name)
        side = feature.of if feature else name.split("_")[0]
        if side != "example":
            values = values[:, orders["inputs" if side in ("targets", "loss") else side]]
        if feature and feature.to:
            values = np.append(np.argsort(orders[feature.to]), -1)[values].astype(np.int32)
        found[name] = values
    if order != "contiguous":
        for name, moved in orders.items():
            found[f"{name}_columns"] = np.tile(moved.astype(np.int32), (PICTURES.rows, 1))
    return found


@pytest.mark.parametrize("order", CONTEXT_ORDERS)
def test_columns_are_divided_like_positions_pointers_follow_and_segments_are_like_rows(order):
    drawn = draw_pictures()
    drawn.add_features()
    corpus = drawn.examples()
    plan = Plan(corpus, [PICTURES], max_segments=16)  # as many as inputs: no shape tells
    whole, sharding = Batches(corpus, plan), batch_sharding(mesh_of(data=2, context=2))
    by_row = NamedSharding(sharding.mesh, PartitionSpec(("data",)))
    with Loader(Batches(corpus, plan, sharding=sharding, context_order=order)) as loader:
        for batch, expected in zip(loader, whole, strict=True):
            due = divide(expected, corpus, order, 2)
            require_same({name: batch[name] for name in due}, due)
            assert {*batch} == {*due}
            for name, array in batch.items():
                spec = loader.specs[PICTURES][name]
                assert (array.shape, array.dtype) == (spec.shape, spec.dtype)
                for placed in (by_row if name in ("reward", "group") else sharding, spec.sharding):
                    assert array.sharding.is_equivalent_to(placed, array.ndim), name
    # A part of the length has its columns, and all segments of its rows.
    third = OneProcess(batch_sharding(mesh_of(data=1, context=4)), [2])
    part = Batches(corpus, plan, sharding=third, context_order=order)
    for name, values in divide(whole[0], corpus, order, 4).items():
        half = values.shape[1] // 2
        due = values if name in ("reward", "group") else values[:, half : half + half // 2]
        np.testing.assert_array_equal(part[0][name], due, name)
    specs = field_specs(part[0], third, PICTURES, part.features)
    assert all(specs[name].shape == values.shape for name, values in whole[0].items())


def test_follow_takes_values_of_numpy_and_in_a_compiled_step():
    rng = np.random.default_rng(0)
    values = rng.random((3, 5, 2)).astype(np.float32)
    for shape in ((3, 4), (3, 4, 2)):
        pointer = rng.integers(-1, 5, shape)
        due = np.zeros((*shape, 2), np.float32)
        for place in np.argwhere(pointer >= 0):
            due[tuple(place)] = values[place[0], pointer[tuple(place)]]
        for found in (follow(values, pointer), jax.jit(follow)(values, pointer)):
            np.testing.assert_array_equal(found, due)


def test_a_corpus_of_sides_is_that_of_the_examples_in_memory(tmp_path):
    drawn = draw_pictures()
    examples = drawn.examples()
    made = Corpus.from_arrays(drawn.columns, tmp_path / "made", **drawn.options)
    opened = open_corpus(tmp_path / "made")
    columns = {name: (each for each in column) for name, column in drawn.columns.items()}
    again = Corpus.from_arrays(columns, tmp_path / "made", **drawn.options)
    cached = open_corpus(tmp_path / "made", cache=tmp_path / "cache", cache_bytes=300_000)
    plan = Plan(opened, [PICTURES])
    copies = [pickle.loads(pickle.dumps(each)) for each in (opened, examples)]
    for corpus in (made, opened, again, cached, *copies):
        for one, other in zip(Batches(examples, plan), Batches(corpus, plan), strict=True):
            require_same(one, other)
    assert made.fingerprint == opened.fingerprint == again.fingerprint
    opened.verify()
    with pytest.raises(ValueError, match="inputs holds a corpus of other examples"):
        Corpus.from_arrays(drawn.take(range(39)), tmp_path / "made", **drawn.options)


def test_masks_and_boundaries_are_those_of_a_side_or_of_parts():
    corpus = draw_pictures().examples()
    plan, batch = Batches(corpus, Plan(corpus, [PICTURES])).with_plans()[0]
    for options, ids in (
        ({"side": "patches", "causal": False}, batch["patches_segment_ids"]),
        ({"side": "patches", "parts": "patch_image", "causal": False}, batch["patch_image"] + 1),
        ({"side": "images"}, batch["images_segment_ids"]),
    ):
        mask = pipeline.attention_mask(batch, **options)
        compiled = jax.jit(functools.partial(pipeline.attention_mask, **options))
        np.testing.assert_array_equal(compiled(batch), mask)
        causal = options.get("causal", True)
        for row, query, key in np.ndindex(mask.shape):
            sees = ids[row, query] == ids[row, key] and (not causal or key <= query)
            assert mask[row, query, key] == (sees if ids[row, query] else query == key)
    ends = cu_seqlens(batch, plan.numbers.max() + 1, side="patches")["cu_seqlens_q"]
    sizes = plan.segments[:, 4]
    assert np.isin(sizes[sizes > 0], np.diff(ends)).all()
    ends = cu_seqlens({"patch_image": np.array([[0, 0, 2, 2, 2, -1]])}, 4, parts="patch_image")
    assert ends["cu_seqlens_kv"].tolist() == [0, 2, 2, 5, 5, 6]


def test_results_of_any_side_are_those_of_its_examples(tmp_path):
    drawn = draw_pictures()

    def sums(patches, first):
        return patches.astype("float32").sum(tuple(range(first, patches.ndim)))

    def step(batch):
        return {"sum": sums(batch["patches"], 2)}

    learnt = np.flatnonzero(drawn.sizes["inputs"])  # of the others nothing is in a batch
    due = [sums(drawn.columns["patches"][number], 1) for number in learnt]
    options = {"per": "patches", "directory": tmp_path, "buckets": [PICTURES]}
    found = pipeline.score(drawn.examples(), step, **options)["sum"].to_pylist()
    assert [found[number] for number in learnt] == [each.tolist() for each in due]
    some = drawn.examples(learnt)
    results = [
        (planned, step(batch)["sum"])
        for planned, batch in pack(some, [PICTURES], features=["patches"])
    ]
    for one, other in zip(unpack(results, some, per="patches"), due, strict=True):
        np.testing.assert_array_equal(one, other)


def test_arrays_alone_have_a_loss_if_one_is_named():
    columns = {"patches": [np.ones((n, 3), np.uint8) for n in (4, 0, 2)]}
    features = {"patches": Feature("patches", dtype="uint8", shape=3)}
    plain = Examples(columns, features=features)
    learnt = Examples(columns, features=features, loss="patches")
    plan = Plan(learnt, [Bucket(2, {"patches": 6})])
    (batch,) = Batches(learnt, plan)
    assert batch["loss_weights"].tolist() == [[1] * 6, [0] * 6]
    assert "loss_weights" not in Batches(plain, plan)[0]
    assert plain.fingerprint != learnt.fingerprint


# ---- what is refused


def examples_of(**features):
    """An example of three tokens and two patches, with more features."""
    columns = {"tokens": [[5, 6, 7]], "patches": [[[1, 2], [3, 4]]]}
    columns |= {name: [values] for name, (_, values) in features.items()}
    known = {"patches": Feature("patches", dtype="uint8", shape=2)}
    known |= {name: feature for name, (feature, _) in features.items()}
    return Examples(columns, features=known)


PATCHES = {"patches": Feature("patches")}
BOTH_LOSSES = {"tokens": [[1, 2]], "patches": [[1]]}
GROUPS = {"tokens": [([1], [[2], [3]])], "patches": [[1]]}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: examples_of(yx=(Feature("patches"), [1, 2, 3])), "yx of example 0 has 3 values"),
        (lambda: examples_of(patch=(Feature("inputs", to="patches"), [0, 2, 1])), "position 2 of"),
        (lambda: examples_of(patches_positions=(Feature("patches"), [0, 0])), "as a field of the"),
        (lambda: examples_of(patches_columns=(Feature("patches"), [0, 0])), "as a field of the"),
        (lambda: Feature("input"), "of is 'input'"),
        (lambda: Feature("example", to="patches"), "to is 'patches'"),
        (lambda: Examples({"x": [[1]]}, features={}), "one of them must be 'tokens'"),
        (lambda: pipeline.Writer("new", features=PATCHES), "these examples have one side"),
        (lambda: Examples.from_groups(GROUPS, features=PATCHES), "groups have one side"),
        (lambda: Examples(BOTH_LOSSES, features=PATCHES, loss="patches"), "both carry the loss"),
    ],
)
def test_examples_that_do_not_fit_their_sides_are_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_plans_that_would_cut_a_side_are_refused():
    def batches(lengths, **options):
        return Batches(examples, Plan(examples, [Bucket(2, lengths)], **options))

    examples = examples_of(patch=(Feature("inputs", to="patches"), [0, 1, -1]))
    small = {"inputs": 2, "patches": 1}
    arrays = Examples({"patches": [[[1, 2]]]}, features={"patches": examples.features["patches"]})
    budget = {"tokens_per_batch": 64, "max_buckets": 1}
    for call, said in (
        (lambda: batches(small, overflow="split"), "overflow is 'split'; a piece would lose its"),
        (lambda: batches(small, packing="fill"), r"packing is 'fill', which .*several give"),
        (lambda: batches(small, overflow="truncate"), "patch points to patches, so patches cannot"),
        (lambda: pipeline.fit_buckets(examples, **budget), "cost names inputs, but not patches"),
        (lambda: Batches(examples, Plan([2], [Bucket(2, 2)])), "the plan has the sides inputs"),
        (lambda: Corpora({"text": examples, "arrays": arrays}), "only sides of arrays may be miss"),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    # Nothing points to the inputs.
    batch = batches({"inputs": 1, "patches": 2}, overflow="truncate")[0]
    assert batch["patch"].tolist() == [[0], [-1]]
