"""Show: one batch, as it reaches the model, in colour."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pipeline.corpus.interface import AnyCorpus
from pipeline.errors import InvalidValue, counted
from pipeline.loading.collate import collate_side
from pipeline.loading.sharding import slice_of_process
from pipeline.planning.bucket import Bucket
from pipeline.planning.lengths import weigh
from pipeline.planning.plan import Plan
from pipeline.planning.planned import PlannedBatch

COLOURS = (36, 33, 35, 32, 34, 31)  # ANSI colours of the segments of a row, in turn
NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
PADDING = "·"
LOSS = "⟦", "⟧"
SHOWN = "decoder_inputs", "loss_weights"  # besides the fields of one word


class Segment(NamedTuple):
    """A segment of a row, read back from the arrays of its batch.

    `number` counts the segments of the row, from 0. `columns` are its first column and one past
    its last, `positions` its first and last position, and `fields` the token ids and `loss_weights`
    of its columns, by the name of the field.
    """

    number: int
    example: int
    columns: tuple[int, int]
    positions: tuple[int, int]
    fields: dict[str, np.ndarray]

    @property
    def name(self) -> str:
        """A letter; after Z comes A again."""
        return NAMES[self.number % len(NAMES)]

    @property
    def tokens(self) -> np.ndarray:
        """The ids that the model reads: `inputs`, or for targets `decoder_inputs`."""
        return next(iter(self.fields.values()))

    @property
    def loss(self) -> np.ndarray:
        """Whether each position carries loss: bool [positions]."""
        return self.fields["loss_weights"] > 0

    @property
    def has_text(self) -> bool:
        """Whether the side has tokens, and not arrays alone."""
        return len(self.fields) > 1


class Shown:
    """The batch of a step, from 0 over all epochs, collated as `Batches` does for one process."""

    def __init__(self, corpus: AnyCorpus, plan: Plan, step: int):
        if step < 0:
            raise InvalidValue(f"step is {step}; steps count from 0 over all epochs")
        self.planned: PlannedBatch = plan.batch(step)
        epoch, self.bucket = self.planned.epoch, self.planned.bucket
        self.corpus, self.step = corpus, step
        batch = f"batch {step - plan.first_step(epoch):,} of {plan.num_batches(epoch):,}"
        self.position = f"epoch {epoch}, {batch}"
        length = " + ".join(f"{length:,}" for length in self.bucket.lengths)
        self.shape = f"{counted(self.bucket.rows, 'row')} × {length}"
        costs = plan.options.cost
        real = weigh(self.planned.segments[:, 3:].sum(axis=0), costs)
        self.padding = 1 - real / (self.bucket.rows * weigh(self.bucket.lengths, costs))
        sides = zip(corpus.sides.items(), self.bucket.sides, strict=True)
        #: For each side: its name, bucket, and arrays.
        self.sides: list[tuple[str, Bucket, dict[str, np.ndarray]]] = []
        for number, ((name, reader), bucket) in enumerate(sides):
            rows = slice_of_process(bucket.shape, 0, 1)
            arrays = collate_side(reader, self.planned, number, rows, name=name)
            self.sides.append((name, bucket, arrays))

    def rows(self, row: int | None = None) -> range:
        """The numbers of all rows, or this row alone."""
        rows = range(self.bucket.rows)
        if row is None:
            return rows
        if row not in rows:
            raise InvalidValue(f"row is {row}; bucket {self.bucket} has the rows 0 to {rows[-1]}")
        return rows[row : row + 1]

    def segments(self, row: int, side: int = 0) -> list[Segment]:
        """The segments of a row, in order, on one side."""
        of_side, _, arrays = self.sides[side]
        ids, positions = arrays[f"{of_side}_segment_ids"][row], arrays[f"{of_side}_positions"][row]
        examples = self.planned.segments[self.planned.segments[:, 0] == row, 1]
        fields = {name: arrays[name][row] for name in arrays if "_" not in name or name in SHOWN}
        edges = np.flatnonzero(np.diff(ids, prepend=0, append=0))
        segments = []
        for first, last in itertools.pairwise(edges.tolist()):
            if number := int(ids[first]):
                between = int(positions[first]), int(positions[last - 1])
                inside = {name: values[first:last] for name, values in fields.items()}
                example = int(examples[number - 1])
                segments.append(Segment(number - 1, example, (first, last), between, inside))
        return segments

    def text(self, segment: Segment, side: int = 0) -> str:
        """The text of a segment, or its ids without a tokenizer; ⟦ and ⟧ mark text with loss."""
        tokens, loss = segment.tokens, segment.loss
        if self._shifted(side):  # a weight is for the next token; the last token is only a target
            tokens = np.append(tokens, segment.fields["targets"][-1])
            loss = np.append(False, loss)
        if segment.loss.all() or not segment.loss.any():
            return self._decode(tokens)
        edges = [0, *(np.flatnonzero(np.diff(loss)) + 1).tolist(), len(loss)]
        runs = itertools.pairwise(edges)
        texts = ((self._decode(tokens[first:last]), loss[first]) for first, last in runs)
        return "".join(text.join(LOSS) if has_loss else text for text, has_loss in texts)

    def _decode(self, tokens: np.ndarray) -> str:
        if self.corpus.tokenizer is None:
            return " ".join(map(str, tokens.tolist()))
        return self.corpus.tokenizer.decode(tokens)

    def _shifted(self, side: int) -> bool:
        """Whether each target is the next token of its segment, as for decoders."""
        name, _, arrays = self.sides[side]
        if "targets" not in arrays:
            return False
        ids, tokens = arrays[f"{name}_segment_ids"], next(iter(arrays.values()))
        inside = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] > 0)
        return bool((tokens[:, 1:] == arrays["targets"][:, :-1])[inside].all())

    def lines(
        self, *, row: int | None = None, width: int = 100, colour: bool = False, ids: bool = False
    ) -> Iterator[str]:
        """The batch as text: every row with a line for each segment, or one row with all its text.

        A small letter stands for positions without loss. If all rows are shown, each segment is
        cut to a line of `width` characters. `ids` adds a line for each field.
        """
        rows = self.rows(row)
        real = self.planned.num_tokens
        learnt = [arrays for name, _, arrays in self.sides if name == self.corpus.loss]
        weights = sum(float(arrays["loss_weights"].sum()) for arrays in learnt)
        yield f"step {self.step:,} ({self.position}), {self.shape} positions"
        yield (
            f"{counted(len(self.planned.segments), 'segment')}, {counted(real, 'real position')}, "
            f"{self.padding:.2%} padding, weights {weights:,g}, digest {self.planned.digest}"
        )
        if self.planned.sources:
            total = max(sum(self.planned.sources.values()), 1)
            shares = [f"{name} {n / total:.1%}" for name, n in self.planned.sources.items()]
            yield f"of {', '.join(shares)}"
        for number in rows:
            yield ""
            for side in range(len(self.sides)):
                yield from self._row(number, side, row is not None, width, colour, ids)

    def _row(
        self, row: int, side: int, whole: bool, width: int, colour: bool, ids: bool
    ) -> Iterator[str]:
        segments = self.segments(row, side)
        name, bucket, arrays = self.sides[side]
        learns, ids_of = name == self.corpus.loss, arrays[f"{name}_segment_ids"][row]
        real = int(np.count_nonzero(ids_of))
        label = f"{name} " if len(self.sides) > 1 else ""
        head, tail = f"row {row:<4}{label}", f" {real:,} of {bucket.length:,}"
        cells = min(max(width - len(head) - len(tail) - 2, 10), bucket.length)
        by_id = {segment.number + 1: segment for segment in segments}
        # The middle of a cell decides its segment; 0 is padding.
        middles = ((np.arange(cells) + 0.5) * bucket.length / cells).astype(int)
        whose = ids_of[middles].tolist()
        loss = arrays["loss_weights"][row, middles] > 0
        strip = ""
        for (at, counts), cell in itertools.groupby(zip(whose, loss, strict=True)):
            if not at:
                strip += PADDING * len(list(cell))
            else:
                letter = by_id[at].name if counts else by_id[at].name.lower()
                strip += _paint(letter * len(list(cell)), by_id[at], colour)
        yield f"{head}▕{strip}▏{tail}"
        for segment in (segment for segment in segments if segment.has_text):
            first, last = segment.positions
            about = f"  {segment.name} example {segment.example:,}, positions {first:,} to {last:,}"
            if learns:
                about += f", weights {segment.fields['loss_weights'].sum():g}"
            text = printable(self.text(segment, side))
            if whole:
                yield f"{_paint(about, segment, colour)}, columns {segment.columns[0]:,} on:"
                yield _paint(text, segment, colour)
            else:
                room = max(width - len(about) - 2, 12)
                line = text.replace("\n", "⏎")
                line = line if len(line) <= room else line[: room - 1] + "…"
                yield f"{about}: {_paint(line, segment, colour)}"
            for field, values in segment.fields.items() if ids else ():
                if field != "loss_weights" or learns:
                    yield f"    {field:<14} {' '.join(map(str, values))}"
        end = segments[-1].columns[1] if segments else 0
        if whole and end < bucket.length:
            yield f"  {PADDING} padding, columns {end:,} on"


def _paint(text: str, segment: Segment, colour: bool) -> str:
    code = COLOURS[segment.number % len(COLOURS)]
    return f"\033[{code}m{text}\033[0m" if colour else text


def printable(text: str) -> str:
    """Text that cannot control a terminal: control characters become U+FFFD."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text.replace("\r\n", "\n")
    )
