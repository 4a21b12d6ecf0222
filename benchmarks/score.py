"""Score: examples per second, packed, padded to the longest of a batch, and sorted by length."""

import functools
import pathlib
import tempfile
import time
from collections.abc import Callable

import jax
import numpy as np
from flax import nnx

import pipeline
from benchmarks.lengths import examples_of
from benchmarks.results import Line, Section
from benchmarks.turns import best_seconds
from configs.python_data import Functions
from models.config import TransformerConfig
from models.decoder import Decoder
from models.loss import cross_entropy
from pipeline.steps import make_score_step
from pipeline.text.sources.source import read_texts

EXAMPLES = 2_048
ROWS, FEW = 32, 8  # in a padded batch, as in sentence-transformers, and what suits caches better
TOKENS = 2_048  # in a packed batch, or the longest example
TIMES = 4  # the examples, to measure without compilation, which each call of `score` repeats
BYTES_PER_TOKEN = 4  # of an 8k vocabulary, on the standard library
MODEL = TransformerConfig(
    vocab_size=256, num_layers=2, width=128, num_heads=4, num_kv_heads=4, mlp_width=384
)


def measure(lengths: np.ndarray) -> Section:
    """Sums the losses of each example of the lengths given, and of the standard library."""
    source = Functions("train")
    texts = read_texts(source, range(min(EXAMPLES, len(source))), "text")
    functions = np.array([max(len(text.encode()) // BYTES_PER_TOKEN, 1) for text in texts])
    lines = []
    for name, each in {"the lengths given": lengths[:EXAMPLES], "functions": functions}.items():
        lines += _compare(name, each)
    about = (
        f"Forward passes of a decoder of {MODEL.num_layers} layers of width {MODEL.width}: the sum "
        f"of the losses of each of {EXAMPLES:,} examples, in order. Packed batches have "
        f"{TOKENS:,} positions, or the longest example; others {ROWS} or {FEW} examples, of "
        "lengths rounded up by 4% on average to have few shapes. The first run compiles every "
        f"shape; the later ones do not (for packed batches: the seconds for {TIMES} times the "
        f"examples, less those for once, divided by {TIMES - 1})."
    )
    return Section("score", about, lines)


def _compare(what: str, lengths: np.ndarray) -> list[Line]:
    examples = examples_of(lengths, MODEL.vocab_size)
    graph, params = nnx.split(Decoder(MODEL, rngs=nnx.Rngs(0)))

    def loss(params, batch):
        model = nnx.merge(graph, params)
        logits = model(batch["inputs"], batch["inputs_segment_ids"], batch["inputs_positions"])
        return cross_entropy(logits, batch["targets"], batch["loss_weights"])

    losses = make_score_step(loss)
    with tempfile.TemporaryDirectory() as directory:
        corpora = {
            times: pipeline.Corpus.from_arrays(
                examples * times, pathlib.Path(directory) / f"corpus{times}"
            )
            for times in (1, TIMES)
        }

        def packed(times: int) -> np.ndarray:
            with tempfile.TemporaryDirectory() as scores:
                table = pipeline.score(
                    corpora[times],
                    losses,
                    directory=scores,
                    state=params,
                    reduce="sum",
                    buckets=buckets,
                    per="position",
                )
                return table["nll"].to_numpy()

        def padded(order: np.ndarray, rows: int = ROWS) -> Callable[[], np.ndarray]:
            sums = jax.jit(lambda params, batch: losses(params, batch)["nll"].sum(1))
            return lambda: _padded(sums, params, examples, order, rows)

        longest = -(-int(lengths.max()) // 128) * 128
        buckets = pipeline.fit_buckets(
            lengths, tokens_per_batch=max(TOKENS, longest), max_buckets=4, width=MODEL.width
        )
        by_length = np.argsort(-lengths, kind="stable")
        ways = {
            "packed": functools.partial(packed, 1),
            "several": functools.partial(packed, TIMES),
            "padded to the longest of a batch": padded(np.arange(len(examples))),
            "sorted by length, padded": padded(by_length),
            f"sorted by length, {FEW} a batch": padded(by_length, FEW),
        }
        expected, first = packed(1), {}
        for name, way in ways.items():
            if name != "several":
                begin = time.perf_counter()
                np.testing.assert_allclose(way(), expected, rtol=1e-4)
                first[name] = time.perf_counter() - begin
        seconds = best_seconds(ways, rounds=2)
        more = seconds.pop("several") - seconds["packed"]
        seconds["packed"] = more / (TIMES - 1)
    return [
        Line(
            f"{what}, {name}",
            f"{len(examples) / spent:,.0f} examples/s",
            f"first run {len(examples) / first[name]:,.0f} examples/s"
            + f"; packed: {spent / seconds['packed']:.2f}× and {first[name] / first['packed']:.2f}×"
            * (name != "packed"),
        )
        for name, spent in seconds.items()
    ]


def _padded(
    sums: Callable, params, examples: list[np.ndarray], order: np.ndarray, rows: int
) -> np.ndarray:
    """The sums of the losses of all examples, in batches of `rows` of an order."""
    found, last = np.zeros(len(examples), np.float32), None
    for begin in range(0, len(order), rows):
        chosen = order[begin : begin + rows]
        values = sums(params, _batch([examples[number] for number in chosen], rows))
        if last is not None:  # is fetched while the next batch is computed
            found[last[0]] = np.asarray(last[1])[: len(last[0])]
        last = chosen, values
    if last is not None:
        found[last[0]] = np.asarray(last[1])[: len(last[0])]
    return found


def _batch(examples: list[np.ndarray], rows: int) -> dict[str, np.ndarray]:
    longest = max(map(len, examples)) - 1
    step = max(1 << max(longest.bit_length() - 4, 0), 8)
    length = -(-longest // step) * step
    tokens = np.zeros((rows, length + 1), np.int32)
    sizes = np.zeros(rows, int)
    for row, example in enumerate(examples):
        tokens[row, : len(example)], sizes[row] = example, len(example) - 1
    real = np.arange(length)[None] < sizes[:, None]
    return {
        "inputs": np.where(real, tokens[:, :-1], 0),
        "targets": np.where(real, tokens[:, 1:], 0),
        "inputs_segment_ids": real.astype(np.int32),
        "inputs_positions": np.where(real, np.arange(length, dtype=np.int32), 0),
        "loss_weights": real.astype(np.float32),
    }
