"""Show: one batch, as it reaches the model, in colour: in a terminal, or as a picture."""

import dataclasses
import itertools
import os
from collections.abc import Iterator

import numpy as np
from etils import epath

from pipeline.extras import require
from pipeline.loading.collate import collate
from pipeline.loading.sharding import slice_of_process
from pipeline.planning.plan import Plan
from pipeline.planning.planned import PlannedBatch
from pipeline.storage.interface import AnyCorpus

# ANSI colours of the segments of a row, in turn, and the same for a picture.
COLOURS = (36, 33, 35, 32, 34, 31)
PAINTS = ("#2f6fde", "#e0a030", "#9a3fb5", "#2a9d6f", "#cf3d5b", "#3a8fa3")
NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
PADDING = "·"


@dataclasses.dataclass(frozen=True)
class Segment:
    """A segment of a row, read back from the arrays of its batch.

    Attributes:
        name: a letter; after Z they start again.
        number: which of the row's it is, from 0.
        side: "", or of pairs "inputs" or "targets".
        example: the example it is from.
        columns: its first place in the row and one past its last.
        positions: first and last of `inputs_positions`.
        weight: the sum of its `loss_weights`.
        tokens: its `inputs`.
    """

    name: str
    number: int
    side: str
    example: int
    columns: tuple[int, int]
    positions: tuple[int, int]
    weight: float
    tokens: np.ndarray


class Shown:
    """A batch of a plan, collated whole as `Batches` does for a single process.

    Args:
        corpus: where the tokens are.
        plan: which of them are in which batch.
        step: which batch, counted from 0 over all epochs.

    Raises:
        ValueError: `step` is negative.
    """

    def __init__(self, corpus: AnyCorpus, plan: Plan, step: int):
        if step < 0:
            raise ValueError(f"step is {step}; steps count from 0 over all epochs")
        self.planned: PlannedBatch = plan.batch(step)
        epoch = self.planned.epoch
        self.corpus, self.step = corpus, step
        self.place = f"epoch {epoch}, batch {step - plan.first_step(epoch):,} of "
        self.place += f"{plan.num_batches(epoch):,}"
        self.bucket = self.planned.bucket
        #: For each side: its name, bucket, and arrays.
        self.sides = [
            (name, side.bucket, collate(reader, side, slice_of_process(side.bucket.shape, 0, 1)))
            for name, side, reader in zip(
                ("inputs", "targets") if len(corpus.sides) == 2 else ("",),
                self.planned.sides,
                corpus.sides,
                strict=True,
            )
        ]

    def segments(self, row: int, side: int = 0) -> list[Segment]:
        """The segments of a row, in order; of pairs, of one side."""
        name, _, arrays = self.sides[side]
        ids = arrays["inputs_segment_ids"][row]
        examples = self.planned.segments[self.planned.segments[:, 0] == row, 1]
        tokens = next(iter(arrays.values()))  # inputs, or of targets decoder_inputs
        edges = np.flatnonzero(np.diff(ids, prepend=0, append=0))
        found = []
        for first, last in _runs(ids, edges):
            number = int(ids[first]) - 1
            place = arrays["inputs_positions"][row, [first, last - 1]]
            found.append(
                Segment(
                    name=NAMES[number % len(NAMES)],
                    number=number,
                    side=name,
                    example=int(examples[number]),
                    columns=(first, last),
                    positions=(int(place[0]), int(place[1])),
                    weight=float(arrays["loss_weights"][row, first:last].sum()),
                    tokens=tokens[row, first:last],
                )
            )
        return found

    def text(self, segment: Segment) -> str:
        """What a segment says; its ids, if the corpus has no tokenizer."""
        if self.corpus.tokenizer is None:
            return " ".join(map(str, segment.tokens.tolist()))
        return self.corpus.tokenizer.decode(segment.tokens)

    def lines(
        self, *, row: int | None = None, width: int = 100, colour: bool = False
    ) -> Iterator[str]:
        """The batch as text: every row with a line for each segment, or one row with all its text.

        Args:
            row: the row to show whole; None for all, each segment cut to a line.
            width: characters in a line.
            colour: whether to use ANSI colours.

        Raises:
            ValueError: there is no such row.
        """
        rows = self.bucket.rows
        if row is not None and not 0 <= row < rows:
            raise ValueError(f"row is {row}; bucket {self.bucket} has the rows 0 to {rows - 1}")
        real = self.planned.num_tokens
        lengths = " + ".join(f"{length:,}" for length in self.bucket.lengths)
        yield f"step {self.step:,} ({self.place}), {rows} rows × {lengths} positions"
        yield (
            f"{len(self.planned.segments):,} segments, {real:,} real positions, "
            f"{1 - real / self.bucket.positions:.2%} padding, weights "
            f"{float(self.sides[-1][2]['loss_weights'].sum()):,g}, digest {self.planned.digest}"
        )
        if self.planned.sources:
            shares = (
                f"{name} {tokens / real:.1%}" for name, tokens in self.planned.sources.items()
            )
            yield f"of {', '.join(shares)}"
        for number in range(rows) if row is None else (row,):
            yield ""
            for side in range(len(self.sides)):
                yield from self._row(number, side, row is not None, width, colour)

    def _row(self, row: int, side: int, whole: bool, width: int, colour: bool) -> Iterator[str]:
        segments = self.segments(row, side)
        name, bucket, arrays = self.sides[side]
        ends = [segment.columns[1] for segment in segments]
        real = int(np.count_nonzero(arrays["inputs_segment_ids"][row]))
        head, tail = f"row {row:<4}{f'{name} ' if name else ''}", f" {real:,} of {bucket.length:,}"
        cells = min(max(width - len(head) - len(tail) - 2, 10), bucket.length)
        # The middle of each cell says whose it is.
        middles = (np.arange(cells) + 0.5) * bucket.length / cells
        whose = np.searchsorted(ends, middles, side="right")
        strip = ""
        for at, cell in itertools.groupby(whose):
            count = len(list(cell))
            here = segments[at : at + 1]
            strip += _paint(here[0].name * count, here[0], colour) if here else PADDING * count
        yield f"{head}▕{strip}▏{tail}"
        for segment in segments:
            first, last = segment.positions
            about = f"  {segment.name} example {segment.example:,}, positions {first:,} to {last:,}"
            if segment.side != "inputs":
                about += f", weights {segment.weight:g}"
            text = _printable(self.text(segment))
            if whole:
                yield f"{_paint(about, segment, colour)}, columns {segment.columns[0]:,} on:"
                yield _paint(text, segment, colour)
            else:
                room = max(width - len(about) - 2, 12)
                line = text.replace("\n", "⏎")
                line = line if len(line) <= room else line[: room - 1] + "…"
                yield f"{about}: {_paint(line, segment, colour)}"
        if whole and real < bucket.length:
            yield f"  {PADDING} padding, columns {real:,} on"

    def picture(self, path: epath.PathLike) -> None:
        """Draws rows × positions into a PNG, each segment in a colour and padding in none.

        Raises:
            ImportError: matplotlib is not installed.
        """
        require("matplotlib", extra="report", purpose="drawing a PNG")
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        height = min(max(2.2, 0.12 * self.bucket.rows + 1.2), 12)
        drawn = Figure(figsize=(10, height), dpi=150, layout="constrained")
        every = drawn.subplots(1, len(self.sides), squeeze=False)[0]
        for axes, (name, bucket, arrays) in zip(every, self.sides, strict=True):
            ids = arrays["inputs_segment_ids"]
            axes.imshow(
                np.where(ids == 0, 0, (ids - 1) % len(PAINTS) + 1),
                aspect="auto",
                interpolation="nearest",
                cmap=ListedColormap(["#eceff3", *PAINTS]),
                vmin=0,
                vmax=len(PAINTS),
                extent=(0, bucket.length, bucket.rows - 0.5, -0.5),
            )
            axes.set_xlabel(f"position in the row{f' of {name}' if name else ''}")
            axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        every[0].set_ylabel("row of the batch")
        padding = 1 - self.planned.num_tokens / self.bucket.positions
        lengths = " + ".join(f"{length:,}" for length in self.bucket.lengths)
        every[0].set_title(
            f"step {self.step:,}: {self.bucket.rows} rows × {lengths}, "
            f"{len(self.planned.segments):,} segments, {padding:.2%} padding (grey)",
            loc="left",
            fontsize=10,
        )
        with epath.Path(os.fspath(path)).open("wb") as file:
            drawn.savefig(file, format="png")


def _runs(ids: np.ndarray, edges: np.ndarray) -> Iterator[tuple[int, int]]:
    """The first and one past the last place of each run of one segment id; padding is none."""
    for first, last in itertools.pairwise(edges.tolist()):
        if ids[first]:
            yield first, last


def _paint(text: str, segment: Segment, colour: bool) -> str:
    code = COLOURS[segment.number % len(COLOURS)]
    return f"\033[{code}m{text}\033[0m" if colour else text


def _printable(text: str) -> str:
    """Text that cannot command a terminal: control characters become U+FFFD."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text.replace("\r\n", "\n")
    )
