"""Why: planted documents that `why --worst` names, and what the log of losses costs a step."""

import codecs
import functools
import json
import pathlib
import random
import tempfile

import jax
import numpy as np
from etils import epath

import pipeline
import train
from benchmarks.results import Line, Section
from benchmarks.turns import best_seconds
from configs import quickstart
from configs.python_data import Functions
from pipeline.history import losses
from pipeline.history.loss_archive import LossLog
from pipeline.steps import make_mesh
from pipeline.steps.segments import sum_segments
from pipeline.text.source import text_of

DOCUMENTS = 3_000
PLANTED, SHOWN = 20, 40
ROUNDS = 15


def measure(steps: int, seed: int) -> Section:
    """Trains on functions of the standard library, some of which are spoilt."""
    source, chance = Functions("train"), random.Random(seed)
    texts = chance.sample([text_of(record, "text") for record in source], DOCUMENTS)
    long = [number for number, text in enumerate(texts) if len(text) > 200]
    spoilt = chance.sample(long, PLANTED)
    planted = {number: list(WAYS)[at % len(WAYS)] for at, number in enumerate(spoilt)}
    for number, way in planted.items():
        texts[number] = WAYS[way](texts[number], chance)
    with tempfile.TemporaryDirectory() as folder:
        workdir, file = epath.Path(folder) / "run", pathlib.Path(folder) / "documents.jsonl"
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        few = file.with_name("few.jsonl")
        file.write_text("".join(lines))
        few.write_text("".join(lines[: DOCUMENTS // 50]))  # so that an evaluation is short
        config = _config(str(file), str(few), steps)
        train.train(config, workdir)
        return _tell(config, workdir, planted, seed)


def _tell(config, workdir: epath.Path, planted: dict[int, str], seed: int) -> Section:
    """What the losses of a run say of planted documents, with the ways in which they are spoilt."""
    found = losses(workdir)
    numbers, _, excess = found.documents()
    first = numbers[np.argsort(-excess)[:SHOWN]].tolist()
    each = {way: [number in first for number in planted if planted[number] == way] for way in WAYS}
    size = sum(path.stat().length for path in (workdir / "losses").iterdir())
    lines = [
        Line(
            f"planted documents among the first {SHOWN} of `why --worst`",
            f"{sum(map(sum, each.values()))} of {PLANTED}",
            ", ".join(f"{way}: {sum(seen)} of {len(seen)}" for way, seen in each.items()),
        ),
        Line(
            "the log of losses, of the time of a step",
            f"{_cost(config, workdir):.3%}",
            "sums, transfer, order",
        ),
        Line(
            "the log of losses on disk",
            f"{size / found.weight.sum(dtype=float):.4f} bytes/token",
            f"{size / len(found.step):.2f} bytes for each of {len(found.step):,} segments",
        ),
    ]
    about = (
        f"{DOCUMENTS:,} functions of the standard library, {PLANTED} of them spoilt (seed {seed}). "
        f"{found.step[-1] + 1} steps of the quickstart's model with two layers are "
        f"{found.epoch.max()} epochs and a part. The time of the log is the least of {ROUNDS}, in "
        "turns with steps, without writing its files, which happens with checkpoints."
    )
    return Section("why", about, lines)


def _shuffle(text: str, chance: random.Random) -> str:
    words = text.split()
    chance.shuffle(words)
    return " ".join(words)


def _replace(text: str, chance: random.Random) -> str:
    return codecs.encode(text, "rot13")


def _repeat(text: str, chance: random.Random) -> str:
    line = max(text.splitlines(), key=len)
    return "\n".join([line] * (len(text) // len(line) + 1))


WAYS = {"words shuffled": _shuffle, "other letters": _replace, "one line repeated": _repeat}


def _config(trained: str, evaluated: str, steps: int):
    config = quickstart.get_config()
    config.steps = config.eval_every = config.checkpoint_every = steps
    config.train.source = config.eval.source = ""
    config.train.files, config.eval.files = trained, evaluated
    config.model.num_layers, config.optimizer.warmup_steps = 2, 10
    return config


def _cost(config, workdir: epath.Path) -> float:
    """What the sums and their log take, as a share of the time of a step."""
    corpus = pipeline.Corpus.open(workdir / "corpus/train")
    with pipeline.load(corpus, tokens_per_batch=4096, max_length=1024, max_buckets=1) as loader:
        batch = next(loader)
        (most,) = loader.plan.most_segments().values()
        model, mesh = train.make_model(config, corpus), make_mesh(config.mesh)
        init_state, train_step = train.make_init_and_step(config, mesh, model, most)
        state, log = init_state(jax.random.key(0)), LossLog(workdir / "cost", 0)
        step, sums = (
            jax.jit(train_step),
            jax.jit(functools.partial(sum_segments, shape=(len(batch["inputs"]), most))),
        )

        def add():
            log.add(0, loader.planned, jax.device_get(sums(batch["loss_weights"], batch)))

        ways = {"step": lambda: jax.block_until_ready(step(state, batch)), "log": add}
        best_seconds(ways, rounds=1)  # compiles
        seconds = best_seconds(ways, rounds=ROUNDS)
    return seconds["log"] / seconds["step"]
