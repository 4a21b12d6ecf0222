"""`load(…, state=…)` continues with the shapes and options of a state, on any number of devices."""

import json
import subprocess
import sys
import threading

import grain
import jax
import numpy as np
import pytest

import pipeline
from pipeline import Bucket, Corpora, Examples
from pipeline.corpus import CAUSAL
from pipeline.errors import UserError
from tests.loading.drawn import Drawn
from tests.loading.some_devices import OPTIONS, draw, run
from tests.meshes import mesh_of
from tests.processes import COMPILE_QUICKLY, ROOT, TIME_LIMIT, environment


@pytest.fixture(scope="module")
def on_eight(tmp_path_factory):
    """`on_eight(**options)`: what `run` returns in a process with 8 devices, which starts once."""
    flags = f"--xla_force_host_platform_device_count=8 {COMPILE_QUICKLY}"
    command = sys.executable, "-m", "tests.loading.some_devices"
    log = tmp_path_factory.mktemp("eight") / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(XLA_FLAGS=flags, NPROC="16"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        stuck = threading.Timer(TIME_LIMIT, process.kill)
        stuck.start()

        def ask(**options):
            process.stdin.write(json.dumps(options) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            assert answer, log.read_text()[-3000:]
            return json.loads(answer)

        yield ask
        stuck.cancel()


def test_a_run_on_eight_devices_continues_on_four_and_back(on_eight):
    """Both processes have devices of their own; nothing but the state passes between loaders."""
    assert jax.device_count() == 4
    eight = on_eight(steps=9, **OPTIONS)
    begun = on_eight(steps=3, **OPTIONS)
    assert begun["batches"] == eight["batches"][:3]
    assert run(**OPTIONS)["shapes"] != eight["shapes"]
    on_four = run(state=begun["state"])
    assert on_four["batches"] == eight["batches"][3:6]
    again = on_eight(state=on_four["state"], **OPTIONS)
    assert (again["batches"], again["shapes"]) == (eight["batches"][6:], eight["shapes"])
    assert again["state"] == eight["state"]


def test_rows_that_do_not_divide_need_a_dynamic_context(on_eight):
    four = run(steps=6, **OPTIONS)
    begun = run(**OPTIONS)
    assert any(Bucket.parse(shape).rows % 8 for shape in four["shapes"])
    on_mesh = on_eight(state=begun["state"])
    assert "pipeline.DynamicContext(mesh)" in on_mesh["error"]
    assert "divides 4" in on_mesh["error"]
    on_contexts = on_eight(state=begun["state"], dynamic=True)
    assert on_contexts["batches"] == four["batches"][3:]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_state_of_other_devices_is_refused_with_the_call_that_takes_it(on_eight, dynamic):
    begun = on_eight(dynamic=dynamic, **OPTIONS)
    refused = run(restored=begun["state"], dynamic=dynamic, **OPTIONS)["error"]
    assert "fitted to 4 devices, and those of the state to 8" in refused
    assert "load(…, state=state)" in refused
    assert "new run" not in refused
    continued = run(state=begun["state"], dynamic=dynamic, steps=1, **OPTIONS)
    assert continued["shapes"] == begun["shapes"]


def load(data, devices=None, **options):
    mesh = None if devices is None else mesh_of(data=devices)
    return pipeline.load(data, sharding=mesh, **options)


@pytest.fixture(scope="module")
def text():
    return draw()


FURTHER = [
    {"seed": 7, "tiers": 2, "packing": "fill", "positions": "restart"},
    {"overflow": "truncate", "max_segments": 3, "shuffle": False, "attention": "segment"},
    {"overflow": "drop", "packing": "none", "window": 512, "num_epochs": 2, "align": 2},
    {"curriculum": "short_first", "cycles": 2, "max_buckets": 2},
    {"read_shares": 2},
]


@pytest.mark.parametrize("options", FURTHER)
def test_options_that_are_not_given_are_those_of_the_state(text, options):
    with load(text, 4, **OPTIONS, **options) as loader:
        next(loader)
        state, due = json.loads(json.dumps(loader.get_state())), next(loader)
    kept = {name: value for name, value in options.items() if name == "num_epochs"}
    with load(text, 2, state=state, **kept) as loader:
        batch = next(loader)
    assert all((np.asarray(batch[name]) == np.asarray(due[name])).all() for name in due)


def test_options_that_differ_from_those_of_the_state_are_refused_by_name(text):
    with load(text, 4, **OPTIONS) as loader:
        next(loader)
        state = loader.get_state()
    wrong = {"seed": 1}, {"positions": "restart"}, {"exclude": [3]}, {"max_buckets": 1}
    for options in (*wrong, {"tokens_per_batch": 4096}, {"buckets": [Bucket(4, 512)]}):
        (name,) = options
        with pytest.raises(UserError, match="lengths" if name == "exclude" else name):
            load(text, 4, state=state, **options).close()
    for options in ({}, OPTIONS, {"row_multiple": 2}, {"max_buckets": 4, "seed": 0}):
        load(text, 4, state=state, **options).close()
    for damaged in (3, {}, {**state, "step": 2}, {**state, "fitted": {"devices": 4}}):
        with pytest.raises(UserError, match="not a data state"):
            load(text, 4, state=damaged)


def test_shapes_that_were_given_have_no_devices(text):
    with load(text, buckets=[Bucket(8, 512)]) as loader:
        state = loader.get_state()
    assert "fitted" not in state
    with pytest.raises(UserError, match="tokens_per_batch was not given and is now 8192"):
        load(text, state=state, **OPTIONS)
    with load(text, 4, **OPTIONS) as loader, pytest.raises(UserError) as caught:
        loader.set_state(state)
    assert "fitted to 4 devices. To continue" in str(caught.value)


def test_a_mixture_takes_its_weights_from_the_call(text):
    both = Corpora({"a": text, "b": Examples([[5, 6, 7, 8]] * 90)})
    weights = [(0, {"a": 3, "b": 1}), (2, {"a": 1, "b": 1})]
    with load(both, 4, weights=weights, by="examples", **OPTIONS) as loader:
        for _ in range(3):
            next(loader)
        state, due = loader.get_state(), next(loader)
    with pytest.raises(UserError, match=r"mixes a, b, .*weights="):
        load(both, 2, state=state)
    with load(both, 2, state=state, weights=weights) as loader:
        assert (np.asarray(next(loader)["inputs"]) == np.asarray(due["inputs"])).all()


def test_weights_that_were_changed_while_it_ran_stay_on_other_devices(text):
    both = Corpora({"a": text, "b": Examples([[5, 6, 7, 8]] * 90)})
    with load(both, 4, weights={"a": 3, "b": 1}, prefetch=0, **OPTIONS) as loader:
        next(loader)
        at = loader.change(weights={"a": 1, "b": 1})
        while loader.step <= at:
            next(loader)
        state, due = json.loads(json.dumps(loader.get_state())), next(loader)
    with load(both, 2, state=state, weights={"a": 3, "b": 1}) as loader:
        assert (np.asarray(next(loader)["inputs"]) == np.asarray(due["inputs"])).all()


def draw_groups():
    rng = np.random.default_rng(0)
    ids = [rng.integers(3, 99, size).tolist() for size in rng.integers(20, 400, 80)]
    return Examples.from_groups([([1, 2], [each[:9], each]) for each in ids])


def draw_pictures():
    drawn = Drawn(np.random.default_rng(0), CAUSAL, ["patches", "images"], 40, most=8)
    drawn.add_pointers()
    return drawn.examples()


PICTURES = {"inputs": 16, "patches": 24, "images": 8}


def test_several_sides_and_groups_continue_on_other_devices(pairs):
    sides = {"inputs": 1, "patches": 0.5, "images": 0}
    for data, options in (
        (pairs, {"overflow": "drop", "max_length": (96, 64)}),
        (draw_pictures(), {"max_length": PICTURES, "length_multiple": 8, "cost": sides}),
        (draw_groups(), {"overflow": "truncate", "max_length": 256}),
    ):
        with load(data, 4, tokens_per_batch=2048, **options) as loader:
            next(loader)
            state, due = json.loads(json.dumps(loader.get_state())), next(loader)
        with load(data, 2, state=state) as loader:
            batch = next(loader)
        assert all((np.asarray(batch[name]) == np.asarray(due[name])).all() for name in due)


def test_a_stream_continues_on_other_devices(text):
    ids = [[*text[number]["inputs"].tolist(), 1] for number in range(len(text))]
    source = grain.MapDataset.source(ids)
    options = {**OPTIONS, "window": 256, "seed": 5}
    with load(source, 4, **options) as loader:
        next(loader)
        state, due = json.loads(json.dumps(loader.get_state())), next(loader)
    with load(source, 1, **options) as loader, pytest.raises(UserError) as caught:
        loader.set_state(state)
    assert "fitted to 1 device, and those of the state to 4" in str(caught.value)
    for again in ({}, options):
        with load(source, 1, state=state, **again) as loader:
            batch = next(loader)
            assert loader.get_state()["fitted"] == state["fitted"]
        assert (np.asarray(batch["inputs"]) == np.asarray(due["inputs"])).all()
    with pytest.raises(UserError, match="max_length was 512 and is now 256"):
        load(source, 1, state=state, max_length=256)
