"""The losses of a run's documents: their files, as arrays, and the documents that stand out."""

import io
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from etils import epath

from pipeline.errors import InvalidValue, Missing
from pipeline.fs.atomic import as_path
from pipeline.history.plans import find_corpora, read_history
from pipeline.history.step_files import StepFiles
from pipeline.planning.planned import PlannedBatch
from pipeline.planning.text_table import text_table

NAME = "losses"

# The most segments in memory and in a file; each has 12 bytes before compression.
SEGMENTS = 1 << 20

# The usual loss of a step is the mean over this many steps before and after it.
AROUND = 8

# Tokens of a document that are printed.
TOKENS = 64


class LossLog:
    """Writes the sums of losses and weights of all segments, in Arrow files of some steps each.

    A file has the columns `step`, uint32, `loss` and `weight`, float32. The plan knows the example
    of each segment. A run that resumes from `step` removes the files from there on.
    """

    def __init__(self, workdir: epath.Path, step: int):
        self._files = StepFiles(workdir / NAME, "arrow")
        self._files.remove(step)
        self._columns: list[tuple[np.ndarray, ...]] = []
        self._count = 0

    def add(self, step: int, planned: PlannedBatch, sums: np.ndarray) -> None:
        """Takes the sums of the segments of a step, `[2, rows, segments]`; see `sum_segments`."""
        row = planned.segments[:, 0]
        own = sums[:, row, planned.numbers]
        self._columns.append((np.full(len(row), step, np.uint32), *own))
        self._count += len(row)
        if self._count >= SEGMENTS:
            self.flush()

    def flush(self) -> None:
        """Writes the sums that were added since the last call."""
        if not self._count:
            return
        columns = [np.concatenate(column) for column in zip(*self._columns, strict=True)]
        steps = range(int(columns[0][0]), int(columns[0][-1]) + 1)
        self._columns, self._count = [], 0
        table = pa.table(columns, ["step", "loss", "weight"])
        options, buffer = pa.ipc.IpcWriteOptions(compression="zstd"), io.BytesIO()
        with pa.ipc.new_file(buffer, table.schema, options=options) as writer:
            writer.write_table(table)
        self._files.write(steps, buffer.getvalue())


def _read_columns(files: StepFiles) -> Iterator[list[np.ndarray]]:
    """The columns of each file: `step`, `loss` and `weight`."""
    ranges = files.ranges()
    for steps, following in itertools.zip_longest(ranges, ranges[1:]):
        if (content := files.read(steps)) is None:
            raise InvalidValue(
                f"the losses of steps {steps[0]:,} to {steps[-1]:,} in {files.directory} are "
                "damaged; delete their file to read those of other steps"
            )
        columns = pa.ipc.open_file(pa.py_buffer(content)).read_all().columns
        step, *sums = [column.to_numpy() for column in columns]
        # A run that resumed from before the end of a file has these steps in the next one.
        end = np.searchsorted(step, following[0]) if following else len(step)
        yield [step[:end].astype(np.int64), *(column[:end] for column in sums)]


class Losses(NamedTuple):
    """The losses of the segments of a run, in the order in which it trained on them.

    An example that is split has several segments, in one step or in several. Each array is
    [segments]: int64, but losses and weights are float32, and the usual losses float64.
    """

    example: np.ndarray  # its number, over all corpora
    epoch: np.ndarray  # of its corpus
    step: np.ndarray
    loss: np.ndarray  # Σ weight · nll, in nats
    weight: np.ndarray  # Σ weight
    corpus: np.ndarray  # its number among several, from 0
    # The mean loss of its corpus over this step, the 8 before and the 8 after, in nats, which falls
    # as the run learns.
    usual: np.ndarray

    def select(self, which: np.ndarray) -> "Losses":
        """Some of the segments: those that are True in `which`, or that it numbers from 0."""
        return Losses(*(column[which] for column in self))

    def documents(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The numbers of the examples, int64, their mean losses and their excess, float64.

        Losses are means by weight over all segments, in nats; the excess is over `usual`.
        """
        numbers, at = np.unique(self.example, return_inverse=True)
        total, usual, weight = (
            np.bincount(at, each, len(numbers))
            for each in (self.loss, self.weight * self.usual, self.weight)
        )
        weight = np.maximum(weight, 1e-9)
        return numbers, total / weight, (total - usual) / weight


def _usual(
    corpus: np.ndarray, step: np.ndarray, loss: np.ndarray, weight: np.ndarray
) -> np.ndarray:
    """The column `usual`; losses that are not finite do not count."""
    place, usual, window = step - step[0], np.zeros(len(step)), np.ones(2 * AROUND + 1)
    for number in np.unique(corpus):
        here = corpus == number
        counted = here & np.isfinite(loss)
        sums = [
            np.convolve(np.bincount(place[counted], each[counted], place[-1] + 1), window)[AROUND:]
            for each in (loss, weight)
        ]
        usual[here] = (sums[0] / np.maximum(sums[1], 1e-9))[place[here]]
    return usual


def losses(workdir: epath.PathLike) -> Losses:
    """The losses of a run over all its starts, with an entry for each segment.

    The run is of train.py, or of your own loop with `write_history`, if it gives `RunLog.add` the
    value `segments`.
    """
    return Why(workdir).losses


class Why:
    """Lines of text about the documents in the `losses` of a run, those not finite first."""

    def __init__(self, workdir: epath.PathLike):
        self._corpus, self._plan = read_history(workdir)
        place = as_path(workdir) / NAME
        files = [*_read_columns(StepFiles(place, "arrow"))]
        if not files:
            raise Missing(
                f"there are no losses in {place}; train.py writes them when it saves, and your own "
                "loop if its steps return `segments` (pipeline.steps.segments)"
            )
        step, loss, weight = (np.concatenate(column) for column in zip(*files, strict=True))
        examples, epochs = [], []
        for number, count in zip(*(each.tolist() for each in np.unique_counts(step)), strict=True):
            planned = self._plan.batch(number)
            if count != len(planned.segments):
                raise InvalidValue(
                    f"{place} has losses of {count:,} segments at step {number:,}, but the plan "
                    f"has {len(planned.segments):,}; give the losses of this run"
                )
            examples.append(planned.segments[:, 1])
            epochs.append(planned.epoch_of_segments)
        example = np.concatenate(examples)
        owner = find_corpora(self._plan, example)
        usual = _usual(owner, step, loss, weight)
        self.losses = Losses(example, np.concatenate(epochs), step, loss, weight, owner, usual)

    def step(self, step: int) -> Iterator[str]:
        """The documents of a step, the largest loss first."""
        every = self.losses.step
        here = self.losses.select(every == step)
        if not len(here.step):
            raise InvalidValue(
                f"step is {step:,}; there are losses for the steps {every[0]:,} to {every[-1]:,}, "
                "except skipped ones"
            )
        numbers, loss, excess = here.documents()
        mean = here.loss.sum(dtype=float) / max(here.weight.sum(dtype=float), 1e-9)
        yield f"step {step:,}: {len(numbers):,} documents, loss {mean:.4f}"
        order = np.lexsort((-loss, np.isfinite(loss)))
        yield from self._table(numbers[order], loss[order], excess[order])

    def worst(self, count: int) -> Iterator[str]:
        """The documents of the run whose losses are furthest above the usual ones."""
        numbers, loss, excess = self.losses.documents()
        order = np.lexsort((-excess, np.isfinite(loss)))[:count]
        yield f"{len(numbers):,} documents in {len(np.unique(self.losses.step)):,} steps"
        yield from self._table(numbers[order], loss[order], excess[order])

    def document(self, number: int) -> Iterator[str]:
        """The loss of a document in each of its steps, and its text."""
        found = self.losses.select(self.losses.example == number)
        if not len(found.step):
            raise InvalidValue(
                f"document is {number:,}, which has no losses: the run excluded it, or has not "
                "reached it; --worst 20 lists some that have"
            )
        rows = [["step", "epoch", "loss", "usual", "weight"]]
        for step in np.unique(found.step).tolist():
            here = found.select(found.step == step)
            _, (loss,), (excess,) = here.documents()
            cells = f"{loss:.3f}", f"{loss - excess:.3f}", f"{here.weight.sum():,g}"
            rows.append([f"{step:,}", f"{here.epoch[0]}", *cells])
        yield from text_table(rows)
        yield self._start(number)

    def _table(self, numbers: np.ndarray, loss: np.ndarray, excess: np.ndarray) -> Iterator[str]:
        """A line for each document, with the start of its text."""
        names = [self._plan.names[owner] for owner in find_corpora(self._plan, numbers)]
        rows = [["document", "loss", "usual"]]
        for number, name, one, above in zip(numbers, names, loss, excess, strict=True):
            rows.append([f"{number:,} {name}".rstrip(), f"{one:.3f}", f"{one - above:.3f}"])
        texts = ["", *map(self._start, numbers.tolist())]
        for line, text in zip(text_table(rows), texts, strict=True):
            yield f"{line}  {text}".rstrip()

    def _start(self, number: int) -> str:
        """The first tokens of a document (for pairs, of its targets), on one line."""
        fields = self._corpus[number]
        tokens = fields.get("decoder_inputs", fields["inputs"])[:TOKENS]
        tokenizer = self._corpus.tokenizer
        text = " ".join(map(str, tokens)) if tokenizer is None else tokenizer.decode(tokens)
        return " ".join(text.split())
