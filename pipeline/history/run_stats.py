"""The record of a run: counts over all its starts, kept in every checkpoint, and its summary."""

import dataclasses
import json
import logging
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from pipeline.corpus.interface import AnyCorpus
from pipeline.errors import InvalidValue
from pipeline.fs.atomic import atomic_write
from pipeline.planning.planned import PlannedBatch

logger = logging.getLogger(__name__)


@dataclasses.dataclass(kw_only=True)
class RunStats:
    """Counts of a run over all its starts. Every attribute is JSON.

    Attributes:
        unigram_entropy: entropy of the held-out targets, in nats per token.
        tokens: real positions trained on.
        positions: all computed positions, padding included.
        batches: batches trained on.
        documents: examples trained on; an example counts once in each of its batches.
        flops: floating-point operations of the model's mathematics, where `capacity` is known.
        capacity: floating-point operations that the devices could have done in that time.
        sources: real positions of each source of a mixture.
        skipped: steps without an update, because they were not finite.
        skipped_seconds: seconds that these steps took.
        evaluations: for each evaluated step, `eval_loss` in nats per token and `bits_per_byte`.
        seconds: seconds by phase, of all starts up to the last checkpoint of each. Steps that a
            kill took back are "lost".
        compiles: compilations of the training step by bucket, in this start.
        compiles_after_start: compilations of the steps since the first step of this start.
        other_compiles: compilations of other functions since then.
    """

    unigram_entropy: float | None = None
    tokens: int = 0
    positions: int = 0
    batches: int = 0
    documents: int = 0
    flops: float = 0.0
    capacity: float = 0.0
    sources: dict[str, int] = dataclasses.field(default_factory=dict)
    skipped: int = 0
    skipped_seconds: float = 0.0
    evaluations: dict[str, dict[str, float | None]] = dataclasses.field(default_factory=dict)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    compiles: dict[str, int] = dataclasses.field(default_factory=dict)
    compiles_after_start: int = 0
    other_compiles: int = 0

    def as_json(self) -> dict[str, Any]:
        """A copy as JSON values."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @property
    def padding(self) -> float:
        """The share of computed positions that were padding."""
        return 1 - self.tokens / max(self.positions, 1)

    def add(self, planned: PlannedBatch, documents: int) -> None:
        """Counts a batch that was trained on."""
        self.tokens += planned.num_tokens
        self.positions += planned.bucket.positions
        self.batches += 1
        self.documents += documents
        for name, tokens in planned.sources.items():
            self.sources[name] = self.sources.get(name, 0) + tokens

    def evaluate(
        self, step: int, total: float, weight: float, text_bytes: int | None
    ) -> dict[str, float | None]:
        """Records and logs an evaluation; what is not finite becomes None, as JSON has no NaN.

        Args:
            step: steps trained before it.
            total: sum of the weighted losses, in nats.
            weight: sum of the weights.
            text_bytes: UTF-8 bytes of the evaluated text, where they are known.
        """
        values = {"eval_loss": total / weight}
        if text_bytes:
            values["bits_per_byte"] = total / math.log(2) / text_bytes
        finite = {name: each if math.isfinite(each) else None for name, each in values.items()}
        self.evaluations[str(step)] = finite
        text = ", ".join(f"{name} {each:.4f}" for name, each in finite.items() if each is not None)
        entropy = f" (unigram entropy {self.unigram_entropy:.4f})" if self.unigram_entropy else ""
        logger.info("step %s: %s%s", f"{step:,}", text or "not finite", entropy)
        return finite

    @property
    def training_seconds(self) -> float:
        """Seconds of training steps, waiting for batches included."""
        return self.seconds.get("train", 0.0) + self.seconds.get("wait", 0.0)

    def goodput(self, seconds: Mapping[str, float]) -> float:
        """The share of all time, by phase in `seconds`, that went into steps with an update."""
        useful = seconds.get("train", 0.0) - self.skipped_seconds
        return max(useful, 0.0) / max(sum(seconds.values()), 1e-9)

    def write_summary(self, workdir: epath.Path, steps: int) -> None:
        """Logs the summary after some steps and, on one host, writes it to `summary.json`."""
        text = json.dumps(self.summary(steps), indent=1)
        if jax.process_index() == 0:
            with atomic_write(workdir / "summary.json") as file:
                file.write(f"{text}\n".encode())
        logger.info("%s", text)

    def summary(self, steps: int) -> dict[str, Any]:
        """The content of `summary.json` after some steps."""
        evaluations = list(self.evaluations.values()) or [{}]
        training = max(self.training_seconds, 1e-9)
        return {
            "eval_loss_first": evaluations[0].get("eval_loss"),
            "eval_loss_last": evaluations[-1].get("eval_loss"),
            "unigram_entropy": self.unigram_entropy,
            "bits_per_byte": evaluations[-1].get("bits_per_byte"),
            "steps": steps,
            "tokens": self.tokens,
            "padding": self.padding,
            "shares": {name: tokens / self.tokens for name, tokens in self.sources.items()},
            "tokens_per_batch": self.tokens / max(self.batches, 1),
            "documents_per_batch": self.documents / max(self.batches, 1),
            "tokens_per_second": self.tokens / training,
            "positions_per_second": self.positions / training,
            "flop_utilisation": self.flops / self.capacity if self.capacity else None,
            "skipped_steps": self.skipped,
            "compiles": self.compiles,
            "compiles_after_start": self.compiles_after_start,
            "other_compiles": self.other_compiles,
            "goodput": self.goodput(self.seconds),
            "waiting": self.seconds.get("wait", 0.0) / training,
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
        }


def unigram_entropy(corpus: AnyCorpus) -> float:
    """The entropy of a corpus's targets, by their loss weights, in nats per token.

    A model that ignores context cannot have a lower loss.

    Raises:
        ValueError: no position has a loss.
    """
    side, every = corpus.sides[-1], np.reshape(corpus.lengths, (len(corpus), -1))[:, -1]
    counts: np.ndarray = np.zeros(1)
    step = 1 << 14  # examples at a time
    for first in range(0, len(corpus), step):
        lengths = every[first : first + step]
        examples = np.arange(first, first + len(lengths))
        fields = side.read(examples, np.zeros_like(examples), lengths)
        weights = fields.get("loss_weights", np.ones(len(fields["targets"])))
        more = np.bincount(fields["targets"], weights, minlength=len(counts))
        more[: len(counts)] += counts
        counts = more
    if not counts.any():
        raise InvalidValue(
            f"none of the {len(corpus):,} held-out examples has a position with a loss, so nothing "
            "can be evaluated; give longer ones, or a template whose weights are above 0"
        )
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())
