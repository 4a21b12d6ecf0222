"""Examples of several sides: devices, files, views, masks, scores and what is refused."""

import functools
import pickle

import jax
import numpy as np
import pytest

import pipeline
from pipeline import (
    Batches,
    Bucket,
    Corpora,
    Corpus,
    Examples,
    Feature,
    Plan,
    follow,
    pack,
    score,
    unpack,
)
from pipeline.corpus import CAUSAL, open_corpus
from pipeline.loading import cu_seqlens
from pipeline.loading.sharding import column_order
from tests.loading.definition import (
    require_same,
)
from tests.loading.drawn import Drawn
from tests.meshes import mesh_of

# ---- columns over devices, and what else batches are given to


def draw_pictures():
    drawn = Drawn(np.random.default_rng(0), CAUSAL, ["patches", "images"], 40, most=8)
    drawn.add_pointers()
    for name, feature in {
        "patch": Feature("inputs", to="patches"),
        "patch_image": Feature("patches", to="images"),
        "label": Feature("example", dtype="float32"),
    }.items():
        drawn.add(name, feature)
    drawn.columns["label"] = [float(n) for n in range(40)]
    return drawn


PICTURES = Bucket(8, {"inputs": 16, "patches": 24, "images": 8})


@pytest.mark.parametrize("order", ["contiguous", "zigzag", "striped"])
def test_pointers_follow_the_columns_of_the_side_that_they_point_to(order):
    drawn = draw_pictures()
    corpus = drawn.examples()
    plan = Plan(corpus, [PICTURES])
    mesh = mesh_of(data=2, context=2)
    features = [name for name in drawn.features if name != "label"]
    whole = Batches(corpus, plan, features=features)
    batches = Batches(corpus, plan, features=features, sharding=mesh, context_order=order)
    orders = {
        name: column_order(order, length, 2)
        for name, length in zip(corpus.side_names, PICTURES.lengths, strict=True)
    }
    for step in range(len(batches)):
        expected, batch = whole[step], batches[step]
        for name, values in expected.items():
            feature = drawn.features.get(name)
            side = feature.of if feature else name.split("_")[0]
            side = "inputs" if side in ("targets", "loss") else side
            due = values[:, orders[side]]
            if feature and feature.to:
                places = {column: place for place, column in enumerate(orders[feature.to].tolist())}
                due = np.vectorize(lambda at: places.get(at, -1), otypes=[int])(due)  # noqa: B023
            np.testing.assert_array_equal(batch[name], due, name)
        if order != "contiguous":
            moved = follow(batch["patches"], batch["patch"])
            np.testing.assert_array_equal(
                moved, follow(expected["patches"], expected["patch"])[:, orders["inputs"]]
            )


def test_follow_takes_values_of_numpy_and_in_a_compiled_step():
    rng = np.random.default_rng(0)
    values = rng.random((3, 5, 2)).astype(np.float32)
    for shape in ((3, 4), (3, 4, 2)):
        pointer = rng.integers(-1, 5, shape)
        due = np.zeros((*shape, 2), np.float32)
        for place in np.ndindex(shape):
            if pointer[place] >= 0:
                due[place] = values[place[0], pointer[place]]
        np.testing.assert_array_equal(follow(values, pointer), due)
        np.testing.assert_array_equal(jax.jit(follow)(values, pointer), due)
    gradient = jax.grad(lambda values: follow(values, np.array([[1, -1]] * 3)).sum())(values)
    np.testing.assert_array_equal(np.asarray(gradient).sum(axis=(1, 2)), [2, 2, 2])


def test_a_corpus_of_sides_is_that_of_the_examples_in_memory(tmp_path):
    drawn = draw_pictures()
    examples = drawn.examples()
    made = Corpus.from_arrays(drawn.columns, tmp_path / "made", **drawn.options)
    opened = open_corpus(tmp_path / "made")
    again = Corpus.from_arrays(
        {name: (each for each in column) for name, column in drawn.columns.items()},
        tmp_path / "made",
        **drawn.options,
    )
    cached = open_corpus(tmp_path / "made", cache=tmp_path / "cache", cache_bytes=300_000)
    plan = Plan(opened, [PICTURES], max_segments=9)
    every = [made, opened, again, cached, examples]
    every += [pickle.loads(pickle.dumps(each)) for each in (opened, examples)]
    for corpus in every:
        np.testing.assert_array_equal(corpus.lengths, examples.lengths)
        for step in range(len(Batches(opened, plan))):
            one, other = (Batches(each, plan)[step] for each in (opened, corpus))
            require_same(one, other)
    assert made.fingerprint == opened.fingerprint == again.fingerprint
    opened.verify()
    assert {*opened[1]} == {"inputs", "targets", *drawn.features}
    with pytest.raises(ValueError, match="inputs holds a corpus of other examples"):
        Corpus.from_arrays(
            {name: column[:-1] for name, column in drawn.columns.items()},
            tmp_path / "made",
            **drawn.options,
        )


def test_masks_and_boundaries_are_those_of_a_side_or_of_parts():
    drawn = draw_pictures()
    corpus = drawn.examples()
    (plan, batch) = next(
        iter(Batches(corpus, Plan(corpus, [PICTURES]), features=["patch_image"]).with_plans())
    )
    for options, ids in (
        ({"side": "patches", "causal": False}, batch["patches_segment_ids"]),
        ({"side": "patches", "parts": "patch_image", "causal": False}, batch["patch_image"] + 1),
        ({"side": "images"}, batch["images_segment_ids"]),
    ):
        mask = pipeline.attention_mask(batch, **options)
        compiled = jax.jit(functools.partial(pipeline.attention_mask, **options))
        np.testing.assert_array_equal(compiled(batch), mask)
        for row, query, key in np.ndindex(mask.shape):
            sees = ids[row, query] == ids[row, key] and (
                not options.get("causal", True) or key <= query
            )
            assert mask[row, query, key] == (sees if ids[row, query] else query == key)
    ends = cu_seqlens(batch, plan.numbers.max() + 1, side="patches")["cu_seqlens_q"]
    found = np.sort(np.diff(ends))
    sizes = plan.segments[:, 4]
    assert found.sum() == 8 * 24
    assert np.isin(sizes[sizes > 0], found).all()
    ends = cu_seqlens({"patch_image": np.array([[0, 0, 2, 2, 2, -1]])}, 4, parts="patch_image")
    assert ends["cu_seqlens_kv"].tolist() == [0, 2, 2, 5, 5, 6]


def test_results_of_any_side_are_those_of_its_examples(tmp_path):
    drawn = draw_pictures()
    corpus = drawn.examples()

    def step(batch):
        return {
            "sum": batch["patches"].astype("float32").sum(tuple(range(2, batch["patches"].ndim)))
        }

    due = [
        np.asarray(each, np.float32).sum(tuple(range(1, np.ndim(each))))
        for each in drawn.columns["patches"]
    ]
    due = [
        each if size else each[:0] for each, size in zip(due, drawn.sizes["inputs"], strict=True)
    ]
    scored = score(corpus, step, per="patches", directory=tmp_path, buckets=[PICTURES])
    for found, each in zip(scored["sum"].to_pylist(), due, strict=True):
        assert (found or []) == each.tolist()
    some = corpus.split(0.5)[0]
    kept = np.flatnonzero(some.lengths.any(axis=1))
    packed = pack(
        drawn.examples(some.numbers[kept]),
        [PICTURES],
        max_segments=16,
        cost={"inputs": 1, "patches": 1, "images": 0},
    )
    results = [(planned, step(batch)["sum"]) for planned, batch in packed]
    found = unpack(results, drawn.examples(some.numbers[kept]), per="patches")
    for mine, number in zip(found, some.numbers[kept], strict=True):
        np.testing.assert_array_equal(mine, due[number])


def test_arrays_alone_have_a_loss_if_one_is_named():
    columns = {"patches": [np.ones((n, 3), np.uint8) for n in (4, 0, 2)]}
    features = {"patches": Feature("patches", dtype="uint8", shape=3)}
    plain = Examples(columns, features=features)
    learnt = Examples(columns, features=features, loss="patches")
    plan = Plan(learnt, [Bucket(2, {"patches": 6})])
    assert plan.num_batches() == 1
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
        (lambda: Feature("input"), "of is 'input', too like 'inputs' for the name of a side"),
        (lambda: Feature("example", to="patches"), "to is 'patches', which makes a pointer; its"),
        (lambda: Examples({"x": [[1]]}, features={}), "one of them must be 'tokens'"),
        (lambda: pipeline.Writer("grows", features=PATCHES), "one side, .* cannot grow yet"),
        (lambda: Examples.from_groups(GROUPS, features=PATCHES), "groups have one side"),
        (lambda: Examples(BOTH_LOSSES, features=PATCHES, loss="patches"), "both carry the loss"),
    ],
)
def test_examples_that_do_not_fit_their_sides_are_refused(make, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
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
