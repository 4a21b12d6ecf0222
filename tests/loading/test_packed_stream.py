"""Packed streams of one process: what is in their batches, where they go on, what they refuse."""

import collections
import functools
import itertools
import json

import grain
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from absl import flags
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline import Bucket, DynamicContext, Feature, PackedStream, load
from tests.meshes import mesh_of

check = grain.experimental.assert_equal_output_after_checkpoint
OF_ELEMENT = 1000  # token k of element e is e * OF_ELEMENT + k


def tokens_of(sizes):
    return [e * OF_ELEMENT + np.arange(n, dtype=np.int32) for e, n in enumerate(sizes)]


def source_of(sizes):
    return grain.MapDataset.source(tokens_of(sizes))


def drawn(count=45, high=40, seed=0):
    return np.random.default_rng(seed).integers(0, high, count).tolist()


def segments_of(batches):
    """Each segment of some batches: its row of each field, in order."""
    for batch in batches:
        ids = batch["inputs_segment_ids"]
        for row in range(len(ids)):
            for segment in range(1, ids[row].max() + 1):
                at = np.flatnonzero(ids[row] == segment)
                yield {name: field[row][at] for name, field in batch.items()}, row, at


def positions_of(batches, align=1):
    """How often each position of each element comes; each segment is checked on the way."""
    found = collections.Counter()
    for fields, _, at in segments_of(batches):
        element, first = divmod(int(fields["inputs"][0]), OF_ELEMENT)
        wanted = first + np.arange(len(at))
        assert at[0] % align == 0
        assert (at == at[0] + np.arange(len(at))).all()
        assert (fields["inputs"] == element * OF_ELEMENT + wanted).all()
        assert (fields["targets"] == fields["inputs"] + 1).all()
        assert (fields["inputs_positions"] == wanted).all()
        assert (fields["loss_weights"] == 1).all()
        found.update((element, int(position)) for position in wanted)
    for batch in batches:
        empty = batch["inputs_segment_ids"] == 0
        assert not any(batch[name][empty].any() for name in batch)
    return found


def expected_of(sizes, overflow, longest):
    kept = {"split": lambda n: n, "truncate": lambda n: min(n, longest)}
    keep = kept.get(overflow, lambda n: n * (n <= longest))
    return collections.Counter(
        (e, k) for e, n in enumerate(sizes) for k in range(keep(max(n - 1, 0)))
    )


SHAPES = [
    [Bucket(3, 16)],
    [Bucket(4, 8), Bucket(2, 24)],
    [Bucket(2, 8), Bucket(3, 16), Bucket(1, 32)],
]


@given(
    st.lists(st.integers(0, 60), max_size=80),
    st.sampled_from(SHAPES),
    st.integers(1, 90),
    st.sampled_from(["best_fit", "fill", "none"]),
    st.sampled_from(["split", "truncate", "drop"]),
    st.sampled_from([None, 1, 3]),
    st.sampled_from(["pad", "drop"]),
    st.integers(0, 3),
)
@example([], SHAPES[0], 30, "best_fit", "split", None, "pad", 0)
@example([0, 1, 1, 0], SHAPES[0], 30, "best_fit", "split", None, "pad", 0)
# Each leaves a piece of one position, and a window of such pieces fills no batch.
@example([18] * 150, SHAPES[0], 20, "best_fit", "split", None, "pad", 0)
@example([6] * 5, [Bucket(8, 32)], 5, "best_fit", "split", None, "pad", 0)
@example([60] * 9, SHAPES[1], 1, "best_fit", "drop", None, "pad", 0)
def test_each_position_comes_once_and_any_state_goes_on(
    sizes, buckets, window, packing, overflow, most, ending, seed
):
    options = {"packing": packing, "overflow": overflow, "max_segments": most, "seed": seed}
    stream = PackedStream(source_of(sizes), buckets, window=window, ending=ending, **options)
    iterator, batches, states = iter(stream), [], []
    states.append(iterator.get_state())
    for batch in iterator:
        batches.append(batch)
        states.append(json.loads(json.dumps(iterator.get_state())))
    shapes = {bucket.shape for bucket in buckets}
    assert {batch["inputs"].shape for batch in batches} <= shapes
    limit = 1 if packing == "none" else most
    assert limit is None or all(b["inputs_segment_ids"].max() <= limit for b in batches)
    found, wanted = positions_of(batches), expected_of(sizes, overflow, buckets[-1].length)
    if ending == "pad":
        assert found == wanted
        assert all(batch["inputs_segment_ids"].any() for batch in batches)
    else:
        assert not found - wanted
        assert all((batch["inputs_segment_ids"][:, 0] > 0).all() for batch in batches)
    for step in {0, 1, len(batches) // 2, len(batches) - 1, len(batches)} & {*range(len(states))}:
        again = iter(stream)
        again.set_state(states[step])
        assert again.get_state() == states[step]
        np.testing.assert_equal([*again], batches[step:])
        assert again.get_state() == states[-1]


# Each makes a data set of another one, before it is packed.
BEFORE = {
    "nothing": lambda source: source.to_iter_dataset(),
    "map": lambda source: source.to_iter_dataset().map(lambda ids: {"tokens": ids}),
    "filter": lambda source: source.to_iter_dataset().filter(lambda ids: len(ids) % 3 != 1),
    "mix": lambda source: grain.IterDataset.mix(
        [source[::2].to_iter_dataset(), source[1::2].to_iter_dataset()], [1, 2]
    ),
    "shuffle": lambda source: grain.experimental.WindowShuffleIterDataset(
        source.to_iter_dataset(), window_size=7, seed=1
    ),
    "threads": lambda source: grain.experimental.ThreadPrefetchIterDataset(
        source.to_iter_dataset(), prefetch_buffer_size=5
    ),
    "random": lambda source: (
        source.seed(2)
        .to_iter_dataset()
        .random_map(lambda ids, rng: ids[: rng.integers(len(ids) + 1)])
    ),
    "flat": lambda source: grain.experimental.FlatMapIterDataset(
        source.to_iter_dataset(), Halves()
    ),
    "epochs": lambda source: source.shuffle(3).repeat(2).to_iter_dataset(),
}


class Halves(grain.experimental.FlatMapTransform):
    max_fan_out = 2

    def flat_map(self, ids):
        return [ids[: len(ids) // 2], ids[len(ids) // 2 :]]


# Each makes a data set of a stream.
AFTER = {
    "nothing": lambda stream: stream,
    "map": lambda stream: stream.map(lambda batch: batch["inputs"][::-1]),
    "filter": lambda stream: stream.filter(lambda batch: batch["inputs"].sum() % 3),
    "threads": lambda stream: grain.experimental.ThreadPrefetchIterDataset(
        stream, prefetch_buffer_size=2
    ),
    "shuffle": lambda stream: grain.experimental.WindowShuffleIterDataset(
        stream, window_size=3, seed=5
    ),
    "mix": lambda stream: grain.IterDataset.mix([stream, other_stream()], [1, 2]),
    "limit": lambda stream: grain.experimental.LimitIterDataset(stream, count=3),
    "device": lambda stream: grain.experimental.device_put(
        stream, jax.devices()[0], cpu_buffer_size=1, device_buffer_size=1
    ).map(lambda batch: jax.tree.map(np.asarray, batch)),
}


def other_stream():
    return PackedStream(source_of(drawn(30, seed=1)), [Bucket(2, 64)], window=12)


CHAINS = [*itertools.product(BEFORE, ["nothing"]), *itertools.product(["nothing"], [*AFTER][1:])]
LONGER = [each for each in zip(BEFORE, [*AFTER][::-1], strict=False) if each not in CHAINS]


@pytest.mark.parametrize(
    ("before", "after"),
    [*CHAINS, *(pytest.param(*each, marks=pytest.mark.slow) for each in LONGER)],
)
def test_grains_own_check_passes_for_every_chain(before, after):
    source = BEFORE[before](source_of(drawn(30)))
    check(AFTER[after](PackedStream(source, [Bucket(3, 32), Bucket(2, 64)], window=12)))


def test_grains_checkpoint_handler_saves_and_restores(tmp_path):
    stream = PackedStream(source_of(drawn()), [Bucket(3, 64)], window=20)
    items = ocp.args.Composite
    for number, make in enumerate([lambda: iter(stream), lambda: load(stream)]):
        saved, fresh = make(), make()
        with ocp.CheckpointManager(tmp_path / str(number)) as manager:
            for _ in range(3):
                next(saved)
            manager.save(3, args=items(data=grain.checkpoint.CheckpointSave(saved)))
            wanted = jax.tree.map(np.asarray, next(saved))
            manager.restore(3, args=items(data=grain.checkpoint.CheckpointRestore(fresh)))
            np.testing.assert_equal(jax.tree.map(np.asarray, next(fresh)), wanted)
        for each in (saved, fresh):
            each.close()


def test_rows_by_hand():
    """Elements 0 and 2 fill a batch; 1 and 3 wait, and fill one with 4 and 5; then 6 is left."""
    stream = PackedStream(source_of([9, 4, 9, 4, 6, 6, 9]), [Bucket(2, 8)], window=4)
    rows = [
        sorted(sorted({*(row[ids > 0] // OF_ELEMENT).tolist()}) for row, ids in rows_of(batch))
        for batch in stream
    ]
    assert rows == [[[0], [2]], [[1, 4], [3, 5]], [[], [6]]]


def rows_of(batch):
    return zip(batch["inputs"], batch["inputs_segment_ids"], strict=True)


def test_what_was_carried_comes_in_the_next_window():
    """Also in a row that is half empty, while there are full ones."""
    stream, seen = PackedStream(source_of([5] + [9] * 40), [Bucket(2, 8)], window=5), []
    iterator = iter(stream)
    for _ in iterator:
        seen.append({*iterator.planned.segments[:, 1].tolist()})
    assert seen[0] | seen[1] == {1, 2, 3, 4}
    assert 0 in seen[2] | seen[3]


def test_a_state_is_small_json_without_tokens():
    sizes = np.clip(np.random.default_rng(0).lognormal(4, 1, 12_000), 2, 500).astype(int)
    stream = PackedStream(source_of(sizes % OF_ELEMENT), [Bucket(8, 512)], window=2048)
    iterator, most = iter(stream), 0
    for _ in iterator:
        state = iterator.get_state()
        text = json.dumps(state)
        assert json.loads(text) == state
        most = max(most, len(text))
    assert most < 4096
    assert {*state["source"]} == {"next_index"}


FEATURES = {
    "score": Feature("example", dtype=np.int32),
    "level": Feature("targets", dtype=np.float32, shape=(2,)),
}


def test_features_weights_and_transforms_are_those_of_each_element():
    sizes = [n + 2 for n in drawn()]
    elements = [
        {
            "tokens": ids,
            "weights": ids % 2,
            "score": 7 * e,
            "level": np.stack([ids, -ids], axis=1),
        }
        for e, ids in enumerate(tokens_of(sizes))
    ]

    def transform(batch, planned):
        numbers = np.pad(planned.segments[:, 1], (0, 64))[:64]
        return {**batch, "element": numbers[None].repeat(3, 0)}

    stream = PackedStream(
        grain.MapDataset.source(elements),
        [Bucket(3, 64)],
        window=20,
        features=FEATURES,
        max_segments=5,
        transform=transform,
    )
    iterator, seen = iter(stream), set()
    for batch in iterator:
        numbers = iterator.planned.segments[:, 1].tolist()
        assert batch["element"][0, : len(numbers)].tolist() == numbers
        for row, ids in enumerate(batch["inputs_segment_ids"]):
            for segment in range(1, ids.max() + 1):
                at = np.flatnonzero(ids == segment)
                tokens = batch["inputs"][row, at]
                element = int(tokens[0]) // OF_ELEMENT
                seen.add(element)
                assert batch["score"][row, segment - 1] == 7 * element
                assert (batch["loss_weights"][row, at] == (tokens + 1) % 2).all()
                assert (batch["level"][row, at, 0] == tokens + 1).all()
                assert (batch["level"][row, at, 1] == -tokens - 1).all()
            assert not batch["score"][row, ids.max() :].any()
    silent = {e for e, n in enumerate(sizes) if n == 2 and not e * OF_ELEMENT % 2}
    assert len(seen) + len(silent & {e for e in range(len(sizes)) if e not in seen}) == len(sizes)
    specs = stream.batches.specs[Bucket(3, 64)]
    assert {*specs} == {*batch}
    for name, spec in specs.items():
        assert spec.shape == batch[name].shape
        assert spec.dtype == batch[name].dtype or name == "element"


def test_sides_are_packed_by_all_their_lengths():
    features = {
        "patch": Feature("patches", dtype=np.float32, shape=(2,)),
        "place": Feature("inputs", to="patches"),
    }
    rng = np.random.default_rng(0)
    elements = []
    for e, ids in enumerate(tokens_of(rng.integers(3, 30, 50))):
        patches = rng.integers(1, 12)
        place = np.full(len(ids), -1)
        place[: min(patches, len(ids))] = np.arange(min(patches, len(ids)))
        patch = np.full((patches, 2), e, np.float32)
        elements.append({"tokens": ids, "patch": patch, "place": place})
    buckets = [Bucket(2, {"inputs": 64, "patches": 24})]
    stream = PackedStream(
        grain.MapDataset.source(elements),
        buckets,
        window=16,
        features=features,
        cost={"inputs": 1, "patches": 0.5},
    )
    seen = set()
    for batch in stream:
        assert batch["patch"].shape == (2, 24, 2)
        for row, ids in enumerate(batch["inputs_segment_ids"]):
            for segment in range(1, ids.max() + 1):
                element = int(batch["inputs"][row][ids == segment][0]) // OF_ELEMENT
                seen.add(element)
                of_patches = batch["patches_segment_ids"][row] == segment
                assert (batch["patch"][row][of_patches] == element).all()
                assert of_patches.sum() == len(elements[element]["patch"])
                place = batch["place"][row][ids == segment]
                columns = place[place >= 0]
                assert (batch["patches_segment_ids"][row][columns] == segment).all()
    assert seen == {*range(50)}
    check(stream)


def test_a_loader_goes_on_from_any_state_and_compiles_for_its_specs():
    source = source_of(drawn(80))
    with load(source, tokens_per_batch=256, length_multiple=16, window=30) as loader:
        batches, states = [], [loader.get_state()]
        for batch in loader:
            batches.append(jax.tree.map(np.asarray, batch))
            states.append(loader.get_state())
            spec = loader.specs[loader.planned.bucket]
            assert {n: (v.shape, v.dtype) for n, v in batch.items()} == {
                n: (v.shape, v.dtype) for n, v in spec.items()
            }
        assert loader.step == len(batches) > 3
        found = positions_of(batches)
        assert found == expected_of(drawn(80), "split", 0)
        for step in (4, 0, len(batches), 2):
            loader.set_state(json.loads(json.dumps(states[step])))
            assert loader.step == step
            assert loader.get_state() == states[step]
            np.testing.assert_equal(
                [jax.tree.map(np.asarray, batch) for batch in loader], batches[step:]
            )
            assert loader.get_state() == states[-1]
        with pytest.raises(TypeError, match="has no length"):
            len(loader)
    with pytest.raises(ValueError, match="closed"):
        next(loader)


class Failing:
    """A source whose elements `fails` raise an error the first time."""

    def __init__(self, sizes, fails):
        self.elements, self.fails = tokens_of(sizes), {*fails}

    def __len__(self):
        return len(self.elements)

    def __getitem__(self, number):
        if number in self.fails:
            self.fails.remove(number)
            raise OSError(f"no answer for {number}")
        return self.elements[number]


def test_errors_of_the_source_lose_nothing_also_while_a_state_is_restored():
    buckets, sizes = [Bucket(2, 64)], drawn(80)
    steady = PackedStream(source_of(sizes), buckets, window=20)
    iterator = iter(steady)
    begin = [next(iterator) for _ in range(5)]
    state, rest = iterator.get_state(), [*iterator]
    for wanted, at in ((begin + rest, None), (rest, state)):
        source = grain.MapDataset.source(Failing(sizes, (0, 19, 33, 34, 79)))
        iterator, found, said = iter(PackedStream(source, buckets, window=20)), [], []
        if at is not None:
            iterator.set_state(at)
        while True:
            try:
                found.append(next(iterator))
            except OSError as error:
                said.append(str(error))
            except StopIteration:
                break
        np.testing.assert_equal(found, wanted)
        assert len(said) >= 3


def test_a_batch_whose_transform_fails_is_made_again():
    wanted = [*PackedStream(source_of(drawn()), [Bucket(2, 64)])]
    for error in (ValueError, StopIteration):
        calls = itertools.count()

        def transform(batch, calls=calls, error=error):
            if next(calls) == 3:
                raise error("mine")
            return batch

        for make in (iter, load):
            calls = itertools.count()
            iterator = make(
                PackedStream(
                    source_of(drawn()),
                    [Bucket(2, 64)],
                    transform=functools.partial(transform, calls=calls),
                )
            )
            found, errors = [], 0
            while True:
                try:
                    found.append(jax.tree.map(np.asarray, next(iterator)))
                except StopIteration:
                    break
                except (ValueError, RuntimeError):
                    errors += 1
            assert errors == 1
            np.testing.assert_equal(found, wanted)
            iterator.close()


OPTIONS = {
    "seed": {"seed": 1},
    "window": {"window": 21},
    "ending": {"ending": "drop"},
    "packing": {"packing": "none"},
    "overflow": {"overflow": "drop"},
    "max_segments": {"max_segments": 2},
    "align": {"align": 4},
    "positions": {"positions": "restart"},
    "buckets": {"buckets": [Bucket(3, 64)]},
}


@pytest.mark.parametrize("what", OPTIONS)
def test_the_state_of_other_options_is_refused_by_name(what):
    usual = {"buckets": [Bucket(2, 64)], "window": 20}
    iterator = iter(PackedStream(source_of(drawn()), **usual))
    next(iterator)
    other = iter(PackedStream(source_of(drawn()), **usual | OPTIONS[what]))
    with pytest.raises(ValueError, match=f"belongs to another stream: {what} was .* and is now"):
        other.set_state(iterator.get_state())


def test_other_data_and_other_states_are_refused():
    sizes = drawn()
    stream = PackedStream(source_of(sizes), [Bucket(2, 64)], window=20)
    iterator = iter(stream)
    for _ in range(4):
        next(iterator)
    state = iterator.get_state()
    for other, said in (
        (sizes[: state["mark"]] + [n + 1 for n in sizes[state["mark"] :]], "have other lengths"),
        (sizes[: state["read"] - 1], "fewer than"),
    ):
        changed = iter(PackedStream(source_of(other), [Bucket(2, 64)], window=20))
        changed.set_state(state)
        with pytest.raises(ValueError, match=said):
            next(changed)
    edited = ({"read": -1}, {"carried": "x"}, {"within": state["within"] + 1}, {"lost": 1})
    for wrong in ({}, {"next_index": 3}, None, *(state | edit for edit in edited)):
        with pytest.raises(ValueError, match="is not the state of a PackedStream"):
            iter(stream).set_state(wrong)


def leave(ids):
    raise SystemExit(0)


def test_an_exit_in_the_data_set_is_an_error_and_ends_no_program():
    stream = PackedStream(source_of([4]).map(leave), SHAPE)
    with pytest.raises(
        RuntimeError, match=r"window 0 was not made: the data set raised SystemExit"
    ):
        next(iter(stream))


SHAPE = [Bucket(2, 64)]


def batch_of(*elements, buckets=SHAPE, **options):
    return next(iter(PackedStream(grain.MapDataset.source([*elements]), buckets, **options)))


TOKENS = np.arange(5)
SCORE = {"score": Feature("example", dtype=np.int32)}
PATCH = {"patch": Feature("patches", dtype=np.int32)}
REFUSED = {
    "element 1 is no example: example 0 holds the token id -3": lambda: batch_of(
        TOKENS, np.array([1, -3])
    ),
    "element 1 has tokens, weights, and element 0 tokens": lambda: batch_of(
        TOKENS, {"tokens": TOKENS, "weights": TOKENS}
    ),
    "element 0 has inputs, targets: pairs, or tokens that are shifted already": lambda: batch_of(
        {"inputs": TOKENS, "targets": TOKENS}
    ),
    "the column 'text' has no feature": lambda: batch_of({"tokens": TOKENS, "text": "a"}),
    "element 2 has 80 positions, more than the longest bucket": lambda: batch_of(
        TOKENS, TOKENS, np.arange(81), overflow="error"
    ),
    "window is 0": lambda: batch_of(TOKENS, window=0),
    "ending is 'stop'": lambda: batch_of(TOKENS, ending="stop"),
    "has no dtype": lambda: batch_of(TOKENS, features={"score": Feature("example")}),
    "give max_segments= to fix the shape": lambda: batch_of(TOKENS, features=SCORE),
    "these examples are not groups": lambda: batch_of(
        TOKENS, features={"score": Feature("continuation", dtype=np.int32)}, max_segments=2
    ),
    "buckets is empty": lambda: batch_of(TOKENS, buckets=[]),
    "of inputs, patches, and the longest bucket is": lambda: batch_of(TOKENS, features=PATCH),
    "workers cannot share": lambda: next(
        iter(
            PackedStream(source_of([4]), SHAPE)
            .map(len)
            .mp_prefetch(grain.MultiprocessingOptions(1))
        )
    ),
    "workers cannot share the batches": lambda: PackedStream(
        source_of([4]), [Bucket(2, 64)]
    ).mp_prefetch(),
    "whose elements are batches": lambda: PackedStream(
        PackedStream(source_of([4]), [Bucket(2, 64)]), [Bucket(2, 64)]
    ),
    "it must be a grain.MapDataset": lambda: PackedStream([TOKENS], [Bucket(2, 64)]),
    "no option 'windows'; did you mean 'window'": lambda: batch_of(TOKENS, windows=3),
    "tiers is given for a Grain data set; only a plan has it": lambda: load(
        source_of([4]), buckets=[Bucket(2, 64)], tiers=4
    ),
    "weights is given for a Grain data set; mix data sets": lambda: load(
        source_of([4]), tokens_per_batch=64, weights={"a": 1}
    ),
    "num_epochs is given for a Grain data set; repeat": lambda: load(
        source_of([4]), tokens_per_batch=64, num_epochs=1
    ),
    "dataset has no element": lambda: load(source_of([]), tokens_per_batch=64),
}


@pytest.fixture
def parsed_flags():
    """Grain reads its flags when workers start, as in `absl.app.run`."""
    parsed = flags.FLAGS.is_parsed()
    flags.FLAGS.mark_as_parsed()
    yield
    if not parsed:
        flags.FLAGS.unparse_flags()


@pytest.mark.usefixtures("parsed_flags")
@pytest.mark.parametrize("said", REFUSED)
def test_what_a_stream_cannot_do_is_refused_with_the_way_out(said):
    with pytest.raises((ValueError, TypeError), match=said):
        REFUSED[said]()


def test_what_is_lost_is_counted_and_said_once(caplog):
    sizes = [100] * 6 + [20] * 60
    iterator = iter(PackedStream(source_of(sizes), [Bucket(2, 64)], window=9, overflow="truncate"))
    batches = [*iterator]
    assert iterator.get_state()["lost"] + 0 == 6 * (99 - 64)
    assert positions_of(batches) == expected_of(sizes, "truncate", 64)
    assert sum("lose positions" in record.message for record in caplog.records) == 1


def test_part_of_a_mesh_builds_its_columns():
    """One host with a sharded length has all rows, and any order of columns."""
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "context"), axis_types=auto)
    sizes, found = drawn(), {}
    for order in ("contiguous", "zigzag"):
        options = {"buckets": [Bucket(2, 64)], "sharding": mesh, "context_order": order}
        with load(source_of(sizes), window=20, **options) as loader:
            found[order] = [np.asarray(batch["inputs"]) for batch in loader]
    whole = [b["inputs"] for b in PackedStream(source_of(sizes), [Bucket(2, 64)], window=20)]
    np.testing.assert_equal(found["contiguous"], whole)
    chunks = [0, 3, 1, 2]
    order = np.concatenate([np.arange(16) + 16 * chunk for chunk in chunks])
    np.testing.assert_equal(found["zigzag"], [batch[:, order] for batch in whole])


def test_each_shape_of_a_stream_may_have_a_mesh_of_its_own():
    """Rows are those without a mesh; 8 of them are whole on 4 devices, and 1 is on all of them."""
    sharding = DynamicContext(mesh_of(fsdp=4))
    options = {"buckets": [Bucket(8, 16), Bucket(1, 64)], "window": 20}
    source = source_of([*drawn(high=16), *drawn(count=9, high=60)])
    whole = [batch["inputs"] for batch in PackedStream(source, **options)]
    assert {len(batch) for batch in whole} == {1, 8}
    stripes = np.arange(64).reshape(-1, 4).T.ravel()
    more = {"sharding": sharding, "context_order": "striped"}
    with load(source, **options, **more) as loader:
        for batch, due in zip(loader, whole, strict=True):
            assert batch["inputs"].sharding == sharding.of(len(due))
            divided = due if len(due) == 8 else due[:, stripes]
            np.testing.assert_array_equal(batch["inputs"], divided)
    # Their shapes can be fitted to the first window, too: a row of all tokens is on all devices.
    with load(
        source, sharding=sharding, window=60, tokens_per_batch=64, length_multiple=8
    ) as loader:
        assert all(4 % bucket.rows == 0 for bucket in loader.specs)
        assert next(loader)["inputs"].sharding in map(sharding.of, (1, 2, 4))
