import gc
import json
import os
import tempfile

from tests.processes import COMPILE_QUICKLY

# Several devices on one CPU, for tests of sharding; JAX reads both when it is first imported.
# Without NPROC, JAX 0.10 can deadlock on two cores with several devices.
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=4 {COMPILE_QUICKLY}"
os.environ["NPROC"] = "16"
os.environ["JAX_PLATFORMS"] = "cpu"

# Programs that a worker or its child compiles are for all of this run, or for others if told so.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    programs = tempfile.TemporaryDirectory()
    os.environ["JAX_COMPILATION_CACHE_DIR"] = programs.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import numpy as np
import pytest
from hypothesis import settings

import pipeline
from pipeline.fs.atomic import directory_lock
from tests.commands import Command

# What modules and tests are made of stays as long as the process: Python need not look through all
# of it whenever it looks for garbage.
gc.disable()


def pytest_collection_finish():
    gc.collect()
    gc.freeze()
    gc.enable()


# Registers a TFDS data set, which can be done once: not also as the module of its doctests.
collect_ignore = ["properties/questions.py"]

# A test that depends on luck or on how busy the machine is helps nobody.
settings.register_profile("lockstep", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("lockstep")


@pytest.fixture(scope="session", autouse=True)
def _caches(tmp_path_factory):
    """Corpora in object storage are read through a cache, by default below this directory."""
    os.environ["XDG_CACHE_HOME"] = os.fspath(tmp_path_factory.mktemp("caches"))


@pytest.fixture(scope="session")
def once(tmp_path_factory, worker_id):
    """`once(name, make)`: a folder that `make(folder)` fills, for all workers of this test run."""
    root = tmp_path_factory.getbasetemp()
    root = root if worker_id == "master" else root.parent

    def fill(name, make):
        folder = root / name
        with directory_lock(root / "locks" / name, f"making {name}"):
            if not (folder / "whole").exists():
                folder.mkdir()
                make(folder)
                (folder / "whole").touch()
        return folder

    return fill


@pytest.fixture(scope="session")
def text(once):
    """160 documents of 5 to 300 characters as JSON lines."""
    return once("text", write_documents) / "documents.jsonl"


def write_documents(folder):
    rng = np.random.default_rng(0)
    words = ["pack", "the", "rows", "a", "bucket", "of", "lengths", "and", "step"]
    documents = [
        " ".join(rng.choice(words, size=int(n))) + "."
        for n in np.clip(rng.lognormal(2.5, 0.8, 160), 1, 60)
    ]
    lines = [json.dumps({"text": document}) + "\n" for document in documents]
    (folder / "documents.jsonl").write_text("".join(lines))


@pytest.fixture(scope="session")
def examples():
    """300 examples of skewed lengths, some with nothing to train on, some over 64 long."""
    rng = np.random.default_rng(0)
    sizes = np.clip(rng.lognormal(3, 1, 300), 0, 200).astype(int)
    return [rng.integers(1, 1000, size).astype(np.int32) for size in sizes]


@pytest.fixture(scope="session")
def corpus(examples, tmp_path_factory):
    """The examples as a corpus."""
    directory = tmp_path_factory.mktemp("corpus")
    return pipeline.Corpus.from_arrays(examples, directory, vocab_size=1000)


@pytest.fixture(scope="session")
def buckets():
    """Three buckets whose rows four hosts can share."""
    return pipeline.Bucket(16, 16), pipeline.Bucket(8, 32), pipeline.Bucket(4, 64)


@pytest.fixture(scope="session")
def sides():
    """300 pairs; some without inputs, some without targets, some too long."""
    rng = np.random.default_rng(0)
    inputs = np.clip(rng.lognormal(2.5, 0.8, 300) - 2, 0, 90).astype(int)
    targets = np.clip(inputs * np.exp(rng.normal(0, 0.4, 300)) - 1, 0, 60).astype(int)
    return (
        [rng.integers(2, 1000, size).astype(np.int32) for size in inputs],
        [np.append(1, rng.integers(2, 1000, size)).astype(np.int32) for size in targets],
    )


@pytest.fixture(scope="session")
def pairs(sides, tmp_path_factory):
    """The pairs, on disk; targets begin with the mark 1."""
    return pipeline.Pairs.from_arrays(*sides, tmp_path_factory.mktemp("pairs"), vocab_size=1000)


@pytest.fixture(scope="session")
def translations():
    """`translations(count, ratio)`: lengths of sentences and their translations, 5 to 45 tokens."""

    def draw(count=29_000, ratio=1.0):
        rng = np.random.default_rng(0)
        inputs = np.clip(np.round(rng.lognormal(2.75, 0.45, count)), 5, 45)
        targets = np.round(inputs * ratio * np.exp(rng.normal(0, 0.18, count)))
        return np.stack([inputs, np.clip(targets, 5, 45)], axis=1).astype(np.int64)

    return draw


@pytest.fixture
def run(capsys):
    """`run(*arguments)`: the exit status of a command, what it prints and complains of."""
    return Command(capsys)


@pytest.fixture
def counter(monkeypatch):
    """A model of one parameter for train.py, which each update makes one larger; the loss is it."""
    import jax.numpy as jnp
    import optax

    import train
    from trainer import Model

    def make_model(config, corpus):
        def loss(params, batch):
            weight = batch["loss_weights"].sum()
            return weight * params["count"], weight

        def init_params(key):
            return {"count": jnp.float32(0)}

        return Model(init_params, loss, flops=lambda planned: planned.num_tokens)

    def make_optimizer(config):
        return optax.sgd(-1.0), lambda updates: updates * 1.0

    monkeypatch.setattr(train, "make_model", make_model)
    monkeypatch.setattr(train, "make_optimizer", make_optimizer)
