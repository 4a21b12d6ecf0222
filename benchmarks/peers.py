"""Beside other input paths: the same documents, model and optimizer, an epoch of each.

python -m benchmarks peers --text FILE --interpreter trl=OTHER/bin/python

On a GPU the model has 125 million parameters; set XLA_PYTHON_CLIENT_PREALLOCATE=false, since paths
that measure steps share its memory.

Each path runs in a process of its own, because no environment holds all of these libraries, and
leaves its batches in a file. Then one process trains a model on each, step by step in turns.
"""

import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np

from benchmarks.account import account, numbered
from benchmarks.input_paths import BEGIN, PATHS, Batch
from benchmarks.model import MODEL, ON_CPU, Step, model_for
from benchmarks.results import Section
from configs.python_data import Functions
from pipeline.text.tokenizers import Bytes

POSITIONS = 8_192 if ON_CPU else 49_152  # of a batch
DOCUMENTS = 3_000

# Different batches, and how often each is timed. With blocked attention a step depends on what its
# rows hold, so each batch of an epoch is timed, once.
BATCHES, ROUNDS = 12, 6

# Then, a path of more shapes is not timed: each is compiled, and a process has room for about 250.
MOST_SHAPES = 120

COLUMNS = (
    "input path",
    "trained tokens/s",
    "makes tokens/s",
    "padding",
    "mean context",
    "steps",
    "shapes",
    "predict another",
    "see another",
    "untrained tokens",
    "2 hosts: lost, cut, repeated",
    "2 hosts, then 1: lost, cut, repeated",
)


def measure(text: str | None, interpreters: list[str], length: int = 512) -> Section:
    """Runs all input paths whose library is there.

    Args:
        text: a file; each line longer than two characters is a document. None: functions of the
            standard library.
        interpreters: "LIBRARY=PYTHON", for libraries in another environment.
        length: of rows, where an input path has one shape. Longer ones than 512 have blocked
            attention.
    """
    rows = max(POSITIONS // length, 2)
    model = model_for(length)
    every = model.attention == "blocked"
    rounds = 1 if every else ROUNDS
    pythons = dict(each.split("=", 1) for each in interpreters)
    if unknown := pythons.keys() - {library for library, *_ in PATHS.values()}:
        raise SystemExit(f"--interpreter names no library of an input path: {', '.join(unknown)}")
    documents, subject = read_documents(text)
    sizes = np.array([len(document) for document in documents])
    ids = np.concatenate([[0, BEGIN], *(document[1:] for document in documents)]).astype(np.int32)
    with tempfile.TemporaryDirectory() as folder:
        stored = np.concatenate(numbered(sizes))
        np.savez(f"{folder}/documents.npz", ids=stored, sizes=sizes, rows=rows, length=length)
        results = {
            name: _result(name, folder, pythons.get(library, sys.executable))
            for name, (library, *_) in PATHS.items()
        }
    there = {name: result for name, result in results.items() if "batches" in result}
    chosen, steps = dict[str, list[Batch]](), dict[str, Step]()
    for name, result in there.items():
        if every and result["shapes"] > MOST_SHAPES:
            continue
        batches = result["batches"] if every else _choose(result["batches"], BATCHES)
        chosen[name], steps[name] = batches, Step(model)
        for batch in {batch["inputs"].shape: batch for batch in batches}.values():
            jax.block_until_ready(steps[name](_readable(batch, ids)))  # compiles
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in chosen[name]] for name in chosen}
    turns = np.random.default_rng(0)  # a step's seconds depend on what ran before it
    for _ in range(rounds):
        for number in range(max(map(len, chosen.values()))):
            here = [name for name, batches in chosen.items() if number < len(batches)]
            for name in turns.permutation(here).tolist():
                batch = _readable(chosen[name][number], ids)
                begin = time.perf_counter()
                jax.block_until_ready(steps[name](batch))
                seconds[name][number].append(time.perf_counter() - begin)
    versions = {}
    for result in there.values():
        versions |= result["versions"]
    sample = f"{BATCHES} batches of each, as many of a shape as its share of the epoch and at "
    sample += f"least one, each at the median of {ROUNDS} steps"
    about = (
        f"{len(documents):,} {subject} with {int((sizes - 1).sum()):,} tokens to predict; the "
        f"longest has {int(sizes.max() - 1):,}. Rows have {length} positions, and batches {rows} "
        "rows or as many positions. Trained tokens/s: the tokens whose prediction an epoch trains, "
        f"over the seconds of its steps without compilation, for a decoder of {MODEL.num_layers} "
        f"layers of width {MODEL.width}. All paths take turns in random order: "
        f"{'each batch once' if every else sample}. Makes tokens/s: the same for making batches "
        "alone, each path in its own process. Mean context: the number of tokens from which a "
        "token is predicted; paths that cut documents have less of it, and less work. Predict "
        "another: documents with a token that is trained to predict one that does not follow it. "
        "See another: documents whose tokens attend to a document before them. 2 hosts: an epoch "
        "on two hosts, which ends when one of them ends. 2 hosts, then 1: an epoch that two hosts "
        "begin and one ends. Lost, cut, repeated: documents of which nothing is trained on, not "
        "everything, or something twice. "
        f"The machine had a load of {os.getloadavg()[0]:.0f} at the end. "
        f"{', '.join(f'{name} {number}' for name, number in versions.items())}."
    )
    rates = {
        name: _rate(
            there[name]["batches"], some, [float(np.median(each)) for each in seconds[name]]
        )
        for name, some in chosen.items()
    }
    lines = []
    for name, result in results.items():
        if name in there:
            rate = "not timed"
            if name in rates:
                rate = f"{rates[name] / rates['Lockstep']:.2f}× Lockstep's"
            lines.append(_line(name, result, rate, sizes))
        else:
            lines.append((name, f"not installed: {result['missing']}", *[""] * (len(COLUMNS) - 2)))
    of = "functions" if text is None else pathlib.Path(text).name
    of += f" in rows of {length:,}" * (length != 512)
    of += "" if ON_CPU else f": {jax.devices()[0].device_kind}"
    return Section(f"peers: {of}", about, lines, COLUMNS)


def read_texts(text: str | None) -> tuple[list[str], str]:
    """All documents, and what they are: lines of a file, or functions of this Python."""
    if text is None:
        return [record["text"] for record in Functions("train")], "functions"
    lines = pathlib.Path(text).read_text().splitlines()
    return [line for line in lines if len(line) > 2], "lines"


def read_documents(text: str | None) -> tuple[list[np.ndarray], str]:
    """Some documents as ids of bytes, and what they are."""
    texts, subject = read_texts(text)
    some = np.random.default_rng(0).permutation(len(texts))[:DOCUMENTS]
    ids, counts = Bytes().encode_batch([texts[number] for number in some])
    return np.split(ids, np.cumsum(counts)[:-1]), subject


def _result(name: str, folder: str, python: str) -> dict[str, Any]:
    """What `benchmarks.input_paths` says of this path, run by `python`."""
    root = str(pathlib.Path(__file__).parent.parent)
    environment = os.environ | {"PYTHONPATH": root, "HF_HUB_OFFLINE": "1"}
    if ON_CPU:
        environment["JAX_PLATFORMS"] = "cpu"
    command = [python, "-m", "benchmarks.input_paths", name, folder]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
    return pickle.loads(pathlib.Path(folder, f"{name}.pickle").read_bytes())


def _choose(batches: list[Batch], steps: int) -> list[Batch]:
    """Some batches, as many of each shape as its share of the epoch, and one of each if it can."""
    shapes = [batch["inputs"].shape[::-1] for batch in batches]
    order = sorted(range(len(batches)), key=shapes.__getitem__)
    chosen = {order[int(at)] for at in (np.arange(steps) + 0.5) * len(batches) / steps}
    if len(set(shapes)) <= steps:
        seen = {shapes[number] for number in chosen}
        chosen |= {shapes.index(shape) for shape in set(shapes) - seen}
    return [batches[number] for number in sorted(chosen)]


def _rate(batches: list[Batch], timed: list[Batch], seconds: list[float]) -> float:
    """Trained tokens in a second of an epoch, from the seconds of steps of some of its batches.

    Batches of a shape take as long as the mean of those timed; where none is timed, a position
    takes as long as in others of its length, and lengths between are interpolated.
    """
    of_shape: dict[tuple[int, ...], list[float]] = {}
    of_length: dict[int, list[float]] = {}
    for batch, spent in zip(timed, seconds, strict=True):
        shape = batch["inputs"].shape
        of_shape.setdefault(shape, []).append(spent)
        of_length.setdefault(shape[1], []).append(spent / batch["inputs"].size)
    lengths = sorted(of_length)
    means = [float(np.mean(of_length[length])) for length in lengths]
    total = trained = 0.0
    for batch in batches:
        shape, size = batch["inputs"].shape, batch["inputs"].size
        trained += float(batch["loss_weights"].sum())
        if shape in of_shape:
            total += float(np.mean(of_shape[shape]))
        else:
            total += size * float(np.interp(shape[1], lengths, means))
    return trained / total


def _mean_context(batches: list[Batch]) -> float:
    """The mean number of tokens from which a token is predicted."""
    seen = trained = 0
    for batch in batches:
        segments, trains = batch["inputs_segment_ids"], batch["loss_weights"] > 0
        columns = np.arange(segments.shape[1])
        begins = np.diff(segments, axis=1, prepend=-1) != 0
        first = np.maximum.accumulate(np.where(begins, columns, 0), axis=1)
        seen += int((columns - first + 1)[trains].sum())
        trained += int(trains.sum())
    return seen / trained


def _readable(batch: Batch, ids: np.ndarray) -> Batch:
    """A batch of the ids of bytes, for the model."""
    integers = {name: np.asarray(field, np.int32) for name, field in batch.items()}
    return integers | {
        "inputs": ids[integers["inputs"]],
        "targets": ids[integers["targets"]],
        "loss_weights": np.asarray(batch["loss_weights"], np.float32),
    }


def _line(name: str, result: dict[str, Any], rate: str, sizes: np.ndarray) -> tuple[str, ...]:
    batches, half = result["batches"], result["half"]
    positions = sum(batch["inputs"].size for batch in batches)
    real = sum(int((batch["inputs_segment_ids"] > 0).sum()) for batch in batches)
    tokens = sum(float(batch["loss_weights"].sum()) for batch in batches)
    epoch = account(batches, sizes)
    hosts = result["hosts"]
    steps = min(map(len, hosts))
    pairs = list(zip(*hosts, strict=False))
    unlike = sum(one["inputs"].shape != other["inputs"].shape for one, other in pairs)
    together = account([batch for pair in pairs for batch in pair], sizes)
    on_two = f"{together.lost}, {together.cut}, {together.repeated}"
    if any(len(each) != steps for each in hosts):
        on_two += f"; {' and '.join(str(len(each)) for each in hosts)} steps"
    if unlike:
        on_two += f"; shapes differ at {unlike} of {steps} steps"
    after = result["remark"]
    if result["resumed"] is not None:
        before = [batch for pair in pairs[:half] for batch in pair]
        resumed = account([*before, *result["resumed"]], sizes)
        after = f"{resumed.lost}, {resumed.cut}, {resumed.repeated}"
        after += f" ({result['remark']})" if result["remark"] else ""
    return (
        name,
        rate,
        f"{tokens / result['seconds'] / 1e6:.2f} M",
        f"{1 - real / positions:.2%}",
        f"{_mean_context(batches):.0f}",
        f"{len(batches):,}",
        f"{result['shapes']}",
        f"{epoch.crossing:,}",
        f"{epoch.mixed:,}",
        f"{epoch.missing:.2%}",
        on_two,
        after,
    )
