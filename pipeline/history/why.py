"""Why: which documents a loss is from, beside what they lost before and what is usual."""

from collections.abc import Iterator

import numpy as np
from etils import epath

from pipeline.errors import InvalidValue
from pipeline.history.loss_archive import Losses, losses
from pipeline.history.plans import read_history
from pipeline.planning.text_table import text_table

# Tokens of a document that are printed, and epochs.
TOKENS, EPOCHS = 64, 4


class Why:
    """The losses of a run, document by document, as lines of text of at most some width.

    Losses are means in nats, by weight. Where some are not finite, their documents come first. A
    step or a document without losses is a `ValueError`.
    """

    def __init__(self, workdir: epath.PathLike, width: int = 110):
        self._corpus, self._plan = read_history(workdir)
        self._losses, self._width = losses(workdir), width

    def step(self, step: int) -> Iterator[str]:
        """The documents of a step, the largest loss first, and what they lost before."""
        every = self._losses.step
        here = self._losses.select(every == step)
        if not len(here.step):
            raise InvalidValue(
                f"step is {step:,}; there are losses of the steps {every[0]:,} to {every[-1]:,}, "
                "but for steps that were left out"
            )
        numbers, loss, excess = here.documents()
        mean = here.loss.sum(dtype=float) / max(here.weight.sum(dtype=float), 1e-9)
        yield f"step {step:,}: {len(numbers):,} documents, loss {mean:.4f}"
        order = np.lexsort((-loss, np.isfinite(loss)))
        before = self._losses.select(every < step)
        yield from self._table(numbers[order], loss[order], excess[order], before, "before")

    def worst(self, count: int) -> Iterator[str]:
        """The documents of the run whose losses are the most above what is usual."""
        numbers, loss, excess = self._losses.documents()
        order = np.lexsort((-excess, np.isfinite(loss)))[:count]
        yield f"{len(numbers):,} documents in {len(np.unique(self._losses.step)):,} steps"
        yield from self._table(numbers[order], loss[order], excess[order], self._losses, "by epoch")

    def document(self, number: int) -> Iterator[str]:
        """What a document lost in each of its steps, and its text."""
        found = self._losses.select(self._losses.example == number)
        if not len(found.step):
            raise InvalidValue(
                f"document is {number:,}, and it has no losses; there are documents up to "
                f"{len(self._corpus) - 1:,}, and the run may have left it out, or not come to it"
            )
        rows = [["step", "epoch", "loss", "usual", "weight"]]
        for step in np.unique(found.step).tolist():
            here = found.select(found.step == step)
            _, (loss,), (excess,) = here.documents()
            cells = f"{loss:.3f}", f"{loss - excess:.3f}", f"{here.weight.sum():,g}"
            rows.append([f"{step:,}", f"{here.epoch[0]}", *cells])
        yield from text_table(rows)
        yield self._start(number)

    def _table(
        self, numbers: np.ndarray, loss: np.ndarray, excess: np.ndarray, past: Losses, title: str
    ) -> Iterator[str]:
        """A line for each document, with its losses by epoch and the start of its text."""
        past = past.select(np.isin(past.example, numbers))
        by_epoch: dict[int, list[str]] = {number: [] for number in numbers.tolist()}
        for epoch in np.unique(past.epoch):
            examples, then, _ = past.select(past.epoch == epoch).documents()
            for example, mean in zip(examples.tolist(), then, strict=True):
                by_epoch[example].append(f"{mean:.2f}")
        rows = [["document", "loss", "usual", title]]
        firsts = [source.first for source in self._plan.stages[-1].sources]
        owners = np.searchsorted(firsts, numbers, side="right") - 1
        for (number, means), owner, one, above in zip(
            by_epoch.items(), owners, loss, excess, strict=True
        ):
            several = "… " * (len(means) > EPOCHS) + " ".join(means[-EPOCHS:])
            name = f"{number:,} {self._plan.names[owner]}".rstrip()
            rows.append([name, f"{one:.3f}", f"{one - above:.3f}", several or "–"])
        for line, text in zip(text_table(rows), ["", *map(self._start, by_epoch)], strict=True):
            yield f"{line}  {text}"[: max(self._width, len(line))].rstrip()

    def _start(self, number: int) -> str:
        """The first tokens of a document, of pairs those of its targets, on one line."""
        fields = self._corpus[number]
        tokens = fields.get("decoder_inputs", fields["inputs"])[:TOKENS]
        tokenizer = self._corpus.tokenizer
        text = " ".join(map(str, tokens)) if tokenizer is None else tokenizer.decode(tokens)
        return " ".join(text.split())
