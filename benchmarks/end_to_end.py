"""End to end: a small decoder trained on the same documents, batched in four ways."""

import itertools
import tempfile
import time
from collections.abc import Iterator

import jax
import numpy as np
import optax
from flax import nnx

import pipeline
from benchmarks import packers
from benchmarks.results import Line, Section
from models.config import TransformerConfig
from models.decoder import Decoder
from models.loss import cross_entropy
from pipeline.steps.compiled import CompileLog

# Real tokens in a step, about; all ways get as many, so that they make as many updates.
TOKENS = 2_048
STEPS = 40
MODEL = TransformerConfig(
    vocab_size=256,
    num_layers=2,
    width=128,
    num_heads=4,
    num_kv_heads=4,
    mlp_width=384,
    attention="dense",
)

Batch = dict[str, np.ndarray]


def measure(lengths: np.ndarray) -> Section:
    """Trains for the same number of updates, each of about the same number of real tokens."""
    longest = int(lengths.max())
    rows = round(TOKENS / lengths.mean())
    documents = _documents(lengths[: 4 * STEPS * rows])
    held_out = list(itertools.islice(_padded(_documents(lengths[-64:]), 64, longest), 1))
    with tempfile.TemporaryDirectory() as directory:
        corpus = pipeline.Corpus.from_arrays(documents, directory)
        buckets = pipeline.fit_buckets(
            corpus, tokens_per_batch=TOKENS, max_buckets=4, width=MODEL.width
        )
        batches = pipeline.Batches(corpus, pipeline.Plan(corpus, buckets)).repeat()
        packed = packers.grain_packed(documents, longest).batch(TOKENS // longest).map(_weighted)
        ways = {
            "Lockstep": batches.to_iter_dataset(),
            "Grain best fit, 32 bins": packed,
            "padded to the longest of all": _padded(documents, rows, longest),
            "padded to the longest of the batch": _padded(documents, rows, None),
        }
        runs = {name: Run(iter(way)) for name, way in ways.items()}
        for _ in range(STEPS):  # taking turns, so that a busy moment hits all of them
            for run in runs.values():
                run.step()
    lines: list[Line] = []
    for name, run in runs.items():
        ratio = f"{run.rate / runs['Lockstep'].rate:.2f}× Lockstep's, " if lines else ""
        lines.append(
            Line(
                name,
                f"{run.rate:,.0f} tokens/s",
                f"{ratio}loss {run.loss(held_out[0]):.3f} after {run.tokens:,} tokens, "
                f"{run.compiles} compiled shapes ({run.compiling:.0f} s)",
            )
        )
    about = (
        f"A decoder of {MODEL.num_layers} layers of width {MODEL.width}, dense attention, "
        f"{STEPS} steps of about {TOKENS:,} real tokens on this CPU; real tokens per second "
        "without compilation, loss on held-out documents. Shapes of Lockstep: "
        f"{', '.join(map(str, buckets))}."
    )
    return Section("end_to_end", about, lines)


class Run:
    """One model in training; `rate` leaves out the steps that compiled.

    Args:
        batches: what it trains on.
        model: its sizes.

    Attributes:
        tokens: real tokens so far.
        compiles: how often the step was compiled.
        compiling: seconds of the steps that compiled.
    """

    def __init__(self, batches: Iterator[Batch], model: TransformerConfig = MODEL):
        self._batches = batches
        graph, self._params = nnx.split(Decoder(model, rngs=nnx.Rngs(0)))
        optimizer = optax.adamw(3e-3)
        self._moments = optimizer.init(self._params)
        self._seconds, self._counted = 0.0, 0
        self.tokens, self.compiles, self.compiling = 0, 0, 0.0

        def mean_loss(params, batch):
            model = nnx.merge(graph, params)
            logits = model(batch["inputs"], batch["inputs_segment_ids"], batch["inputs_positions"])
            sums = cross_entropy(logits, batch["targets"], batch["loss_weights"])
            return sums.total / sums.weight

        def train_step(params, moments, batch):
            gradients = jax.grad(mean_loss)(params, batch)
            updates, moments = optimizer.update(gradients, moments, params)
            return optax.apply_updates(params, updates), moments

        self._step, self._loss = jax.jit(train_step), jax.jit(mean_loss)

    def step(self) -> float | None:
        """Loads a batch and takes a step; the seconds from start to end, None if it compiled."""
        log, begin = CompileLog(), time.perf_counter()
        batch = next(self._batches)
        self._params, self._moments = jax.block_until_ready(
            self._step(self._params, self._moments, batch)
        )
        spent = time.perf_counter() - begin
        log.close()
        tokens = int(batch["loss_weights"].sum())
        self.tokens += tokens
        if any("train_step" in name for name in log.names):
            self.compiles, self.compiling = self.compiles + 1, self.compiling + spent
            return None
        self._seconds, self._counted = self._seconds + spent, self._counted + tokens
        return spent

    @property
    def rate(self) -> float:
        """Real tokens per second."""
        return self._counted / self._seconds

    def loss(self, batch: Batch) -> float:
        """The mean loss on a batch."""
        return float(self._loss(self._params, batch))


def _documents(lengths: np.ndarray) -> list[np.ndarray]:
    """Documents that can be learnt from: mostly each token decides the next."""
    rng = np.random.default_rng(int(lengths[0]))
    follows = np.random.default_rng(0).permutation(MODEL.vocab_size - 1) + 1
    tokens = np.zeros((len(lengths), int(lengths.max()) + 1), np.int32)
    noise = rng.integers(1, MODEL.vocab_size, tokens.shape, dtype=np.int32)
    surprises = rng.random(tokens.shape) < 0.2
    tokens[:, 0] = noise[:, 0]
    for at in range(1, tokens.shape[1]):
        tokens[:, at] = np.where(surprises[:, at], noise[:, at], follows[tokens[:, at - 1] - 1])
    return [row[: length + 1] for row, length in zip(tokens, lengths, strict=True)]


def _padded(documents: list[np.ndarray], rows: int, length: int | None) -> Iterator[Batch]:
    """Batches of `rows` documents, one in a row, padded to `length` or to their longest."""
    for begin in range(0, len(documents) - rows + 1, rows):
        chosen = documents[begin : begin + rows]
        width = length or max(map(len, chosen)) - 1
        tokens = np.zeros((rows, width + 1), np.int32)
        for row, document in zip(tokens, chosen, strict=True):
            row[: len(document)] = document
        sizes = np.array([len(document) - 1 for document in chosen])
        real = np.arange(width)[None] < sizes[:, None]
        yield {
            "inputs": np.where(real, tokens[:, :-1], 0),
            "targets": np.where(real, tokens[:, 1:], 0),
            "inputs_segment_ids": real.astype(np.int32),
            "inputs_positions": np.where(real, np.arange(width, dtype=np.int32), 0),
            "loss_weights": real.astype(np.float32),
        }


def _weighted(batch: Batch) -> Batch:
    return {
        "inputs": batch["inputs"],
        "targets": batch["targets"],
        "inputs_segment_ids": batch["inputs_segment_ids"],
        "inputs_positions": batch["inputs_positions"],
        "loss_weights": (batch["inputs_segment_ids"] > 0).astype(np.float32),
    }
