"""Curriculum: speed, and loss at equal tokens, with short batches first, beside other orders."""

import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import pipeline
from benchmarks.results import Section
from configs.python_data import Functions
from models.config import TransformerConfig
from models.decoder import Decoder
from models.loss import cross_entropy
from pipeline import sources, tokenizers
from pipeline.fields.names import INPUTS
from pipeline.text.source import text_of

SEEDS = 3
TRAINED, HELD_OUT = 2_000, 150  # functions
TOKENS, LONGEST = 2_048, 512
MODEL = TransformerConfig(
    vocab_size=1_024,
    num_layers=2,
    width=64,
    num_heads=2,
    num_kv_heads=2,
    mlp_width=192,
    attention="dense",
)
ONE = "one bucket"
ORDERS: dict[str, dict[str, Any]] = {
    "evenly spread": {},
    "short first": {"curriculum": "short_first"},
    "short first, 8 cycles": {"curriculum": "short_first", "cycles": 8},
    ONE: {},
}


class Run:
    """A model in training on the batches of a loader, and the processor time that it took."""

    def __init__(self, corpus: Any, seed: int, buckets: Any, options: dict[str, Any]):
        plan = pipeline.Plan(corpus, buckets, seed=seed, **options)
        self._batches, self.count = pipeline.Batches(corpus, plan), plan.num_batches()
        self._graph, params = nnx.split(Decoder(MODEL, rngs=nnx.Rngs(seed)))
        rate = optax.warmup_cosine_decay_schedule(0, 3e-3, self.count // 10, self.count, 1e-4)
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98))
        self.state: Any = (params, optimizer.init(params))
        self.seconds = self.tokens = 0.0

        def step(state: Any, batch: Any) -> Any:
            params, moments = state
            gradients = jax.grad(self._loss)(params, batch)
            updates, moments = optimizer.update(gradients, moments, params)
            return optax.apply_updates(params, updates), moments

        self._step, self._sums = jax.jit(step), jax.jit(self._sum)
        for bucket in plan.batches_per_bucket:  # compiles
            number = next(n for n in range(self.count) if plan.batch(n).bucket == bucket)
            jax.block_until_ready(self._step(self.state, dict(self._batches[number])))

    def _sum(self, params: Any, batch: Any) -> Any:
        logits = nnx.merge(self._graph, params)(*(batch[name] for name in INPUTS))
        return cross_entropy(logits, batch["targets"], batch["loss_weights"])

    def _loss(self, params: Any, batch: Any) -> Any:
        sums = self._sum(params, batch)
        return sums.total / sums.weight

    def train(self, number: int) -> None:
        """A step."""
        batch = dict(self._batches[number])
        begin = time.process_time()
        self.state = jax.block_until_ready(self._step(self.state, batch))
        self.seconds += time.process_time() - begin
        self.tokens += float(batch["loss_weights"].sum())

    def evaluate(self, held_out: Any) -> float:
        """The loss of held-out functions, in nats for each token."""
        sums = np.sum([jax.device_get(self._sums(self.state[0], b)) for b in held_out], axis=0)
        return float(sums[0] / sums[1])


def measure() -> Section:
    """Trains a small model for one epoch in each order, with each seed."""
    train, held_out = _tokenize(_texts("train", TRAINED), _texts("validation", HELD_OUT))
    fitting: Any = {"tokens_per_batch": TOKENS, "max_length": LONGEST, "width": MODEL.width}
    several = pipeline.fit_buckets(train, max_buckets=4, **fitting)
    one = [pipeline.Bucket(TOKENS // LONGEST, LONGEST)]
    plan = pipeline.Plan(held_out, one, shuffle=False)
    tests = [dict(pipeline.Batches(held_out, plan)[n]) for n in range(plan.num_batches())]
    losses: dict[str, list[tuple[float, float]]] = {name: [] for name in ORDERS}
    rates: dict[str, list[float]] = {name: [] for name in ORDERS}
    for seed in range(SEEDS):
        runs = {
            name: Run(train, seed, one if name == ONE else several, options)
            for name, options in ORDERS.items()
        }
        half = dict.fromkeys(runs, 0.0)
        for number in range(max(run.count for run in runs.values())):  # in turns, step by step
            for name, run in runs.items():
                if number < run.count:
                    run.train(number)
                if number == run.count // 2:
                    half[name] = run.evaluate(tests)
        first = next(iter(runs.values()))
        for name, run in runs.items():
            losses[name].append((half[name], run.evaluate(tests)))
            rates[name].append(run.tokens / run.seconds * first.seconds / first.tokens)
    lines = [
        (
            name,
            f"{np.mean(rates[name]):.2f}×",
            *(" ".join(f"{loss:.3f}" for loss in each) for each in zip(*losses[name], strict=True)),
            f"{np.mean([loss for _, loss in losses[name]]):.3f}",
        )
        for name in ORDERS
    ]
    return Section(
        "curriculum",
        f"One epoch of {TRAINED:,} functions of the standard library ({train.num_tokens:,} tokens) "
        f"for a decoder of two layers of width {MODEL.width} with dense attention, in batches of "
        f"{TOKENS:,} positions: {', '.join(map(str, several))}; or one bucket, {one[0]}. All train "
        f"on each token once, so final losses are at equal tokens; those in the middle after half "
        f"of the steps. Tokens a second of processor time, over the first line, in turns step by "
        f"step. Loss of {HELD_OUT} functions of other modules, in nats a token, for {SEEDS} seeds. "
        "The machine was busy with other work: use the ratios.",
        lines,
        ("order of buckets", "tokens/s", "loss in the middle", "loss at the end", "mean"),
    )


def _texts(split: str, count: int) -> list[str]:
    """Some functions, the same ones every time."""
    texts = [text_of(record, "text") for record in Functions(split)]
    some = np.random.default_rng(0).permutation(len(texts))[:count]
    return [texts[number] for number in some]


def _tokenize(*every: list[str]) -> Iterator[pipeline.Examples]:
    """The tokens of some lists of texts, under a tokenizer that is trained on the first."""
    with tempfile.TemporaryDirectory() as folder:
        first = sources.Records([{"text": text} for text in every[0]])
        model = f"{folder}/tokens.model"
        tokenizer = tokenizers.train_sentencepiece(first, MODEL.vocab_size, model)
    for texts in every:
        ids, counts = tokenizer.encode_batch(texts)
        yield pipeline.Examples(np.split(np.asarray(ids), np.cumsum(counts)[:-1]))
