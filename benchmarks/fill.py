"""Fill: padding and documents that are cut, beside best fit and concatenating and splitting."""

import pathlib

import numpy as np

import pipeline
from benchmarks import lengths
from benchmarks.histograms import lengths_of
from benchmarks.results import Section
from configs.python_data import Functions
from pipeline.text.tokenizers import Bytes

# Documents of a corpus without short ones.
DOCUMENTS = 20_000

COLUMNS = (
    *("lengths, documents, rows", "best fit", "fill", "concatenated"),
    *("cut by all", "fill cuts", "concatenating cuts"),
)


def measure(path: str | None, histograms: list[str]) -> Section:
    """Plans each set of lengths both ways, and counts over all batches of an epoch."""
    _, sizes = Bytes().encode_batch([record["text"] for record in Functions("train")])
    functions = np.array(sizes) - 1
    longer = (120 + np.random.default_rng(0).lognormal(np.log(300), 0.5, DOCUMENTS)).astype(int)
    given = lengths.sample(path)
    sets = [("functions", functions, row) for row in (512, 1024, 2048)]
    sets += [("120 and lognormal", longer, row) for row in (512, 1024, 2048)]
    name = "lognormal" if path is None else pathlib.Path(path).stem
    sets += [(name, given, row) for row in (512, 1024)]
    sets += [(*lengths_of(each), int(lengths_of(each)[1].max())) for each in histograms]
    return Section(
        "fill",
        "Padding, without the empty rows of the last batch, of best fit of whole documents, of "
        'packing="fill", and of documents in random order that are concatenated and split into '
        "rows. Cut by all: documents longer than a row. Fill cuts, concatenating cuts: how many "
        "others each of them cuts.",
        [_line(*each) for each in sets],
        COLUMNS,
    )


def _line(name: str, sizes: np.ndarray, row: int) -> tuple[str, ...]:
    paddings, sizes = [], sizes.astype(np.int64)
    for packing in ("best_fit", "fill"):
        plan = pipeline.Plan(sizes, [pipeline.Bucket(4096, row)], packing=packing)
        ((_, rows, tokens),) = plan.count(*plan.epoch_steps).buckets.values()
        paddings.append(1 - tokens / (rows * row))
    batches = [plan.batch(step).segments for step in range(plan.num_batches())]
    assert all(np.bincount(batch[:, 0], batch[:, 3]).max() <= row for batch in batches)
    example, size = np.concatenate([batch[:, [1, 3]] for batch in batches]).T
    assert np.array_equal(np.bincount(example, size, len(sizes)), sizes)
    long, pieces = sizes > row, np.bincount(example, minlength=len(sizes))
    ends = np.random.default_rng(0).permutation(sizes).cumsum()
    edges = np.arange(row, ends[-1], row)
    over = ends.searchsorted(edges)
    crossed = len(np.unique(over[ends[over] > edges]))
    concatenated = 1 - ends[-1] / ((len(edges) + 1) * row)
    return (
        f"{name}, {len(sizes):,}, {row:,}",
        *(f"{padding:.3%}" for padding in (*paddings, concatenated)),
        f"{long.sum():,}",
        f"{(pieces[~long] > 1).sum():,}",
        f"{crossed - long.sum():,}",
    )
