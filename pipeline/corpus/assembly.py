"""Assembly: from the files of ranges to the parts of a corpus."""

import contextlib
import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from pipeline.corpus.engines import Engine
from pipeline.corpus.manifest import part_name
from pipeline.corpus.parts import Part, read_part
from pipeline.corpus.ranges import RangeFiles, Receipt
from pipeline.corpus.writer import Writer, write_examples
from pipeline.errors import InvalidState
from pipeline.text.ragged import Ragged, divide


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the examples of a part are.

    Attributes:
        number: of the part.
        pieces: ranges, and of each the numbers of the first record and of the one after the last.
    """

    number: int
    pieces: list[tuple[range, int, int]]


@dataclasses.dataclass(frozen=True)
class Assembly:
    """Writes parts; takes their layouts."""

    files: RangeFiles
    origin: dict[str, Any]

    def __call__(self, layout: Layout) -> tuple[int, Part, int | None]:
        """Writes a part, unless it is there and whole; its number, and what `Writer` needs."""
        path = self.files.directory / part_name(layout.number)
        with contextlib.suppress(ValueError):  # another attempt wrote it
            file = read_part(path)
            file.verify()
            return layout.number, file.part, file.metadata["text_bytes"]
        chunks = [chunk for piece in layout.pieces for chunk in self.files.read(*piece)]
        examples = Ragged.concatenate(chunks)
        return layout.number, *write_examples(path, examples, self.origin)


def assemble(
    writer: Writer,
    files: RangeFiles,
    receipts: Sequence[Receipt],
    engine: Engine,
    progress: bool,
) -> None:
    """Adds the parts that `writer` does not have, and removes each range that is in parts.

    Args:
        writer: has the first parts.
        files: the files of all ranges that are not, as a whole, in these parts.
        receipts: of these ranges, in order.
        engine: what writes the parts.
        progress: whether to show a bar, if it takes more than two seconds.
    """
    starts = [max(each.records.start, writer.examples) for each in receipts]
    counts = [
        each.counts[start - each.records.start :]
        for each, start in zip(receipts, starts, strict=True)
    ]
    parts = list(divide(counts))
    layouts = []
    for number, part in enumerate(parts, len(writer.parts)):
        pieces = [(receipts[at].records, starts[at] + a, starts[at] + b) for at, a, b in part]
        layouts.append(Layout(number, pieces))
    found: dict[int, tuple[Part, int | None]] = {}
    waiting = deque(zip(layouts, parts, strict=True))  # parts are added in order
    options: dict = {"unit": " parts", "delay": 2, "disable": not progress}
    with (
        contextlib.closing(engine.run(Assembly(files, writer.origin), layouts)) as assembled,
        tqdm(desc="assembling", total=len(parts), **options) as bar,
    ):
        for number, file, text_bytes in assembled:
            found[number] = file, text_bytes
            while waiting and waiting[0][0].number in found:
                layout, part = waiting.popleft()
                file, text_bytes = found[layout.number]
                of_part = [counts[at][first:last] for at, first, last in part]
                writer.append(file, np.concatenate(of_part), text_bytes)
                for records, _, _ in layout.pieces:
                    if records.stop <= writer.examples:
                        files.remove(records)
                bar.update()
    if waiting:
        raise InvalidState(
            f"{type(engine).__name__} ended without {len(waiting):,} parts, first "
            f"{part_name(waiting[0][0].number)}; run again to go on"
        )
