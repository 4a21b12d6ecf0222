"""Datasets for the commands: lengths with the corpora that they come from, and options."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from pipeline.corpus.interface import AnyCorpus
from pipeline.corpus.opening import open_corpus
from pipeline.corpus.stored.directory import MANIFEST
from pipeline.corpus.token_formats import recognise
from pipeline.errors import InvalidValue, Missing, StorageError, suggest_option
from pipeline.fs.atomic import as_path
from pipeline.planning.bucket import PAIR, Bucket
from pipeline.planning.fit import fit_buckets
from pipeline.planning.lengths import as_lengths, weigh
from pipeline.planning.options import by_side, list_keywords, select_options
from pipeline.planning.plan import PLANNING, Plan
from pipeline.report.run import Run

# Lengths in a file of counts must be below this, and their number at most this: 16 GiB.
MOST = 1 << 32

FITTING = list_keywords(fit_buckets)

DEFAULTS: dict[str, Any] = {
    "tokens_per_batch": 16_384,
    "max_buckets": 4,
    "max_length": None,
    "length_multiple": None,
    "row_multiple": 1,
    "packing": "best_fit",
    "attention": "dense",
    "width": 1024,
    "seed": 0,
}


class Options(dict[str, Any]):
    """Options of `fit_buckets` and `Plan`, and `buckets`; None stands for the default.

    >>> Options({"max_buckets": 1}).fit([120, 30])
    (Bucket(rows=128, length=128),)
    """

    def __init__(self, options: Mapping[str, Any]):
        names = {"buckets", *FITTING, *PLANNING}
        for name in options:
            if name not in names:
                raise InvalidValue(f"there is no option {suggest_option(name, names)}")
        values = {name: value for name, value in options.items() if value is not None}
        super().__init__(DEFAULTS | values)

    def replace(self, **changes) -> "Options":
        """A copy with other values."""
        return Options(self | changes)

    def for_lengths(self, lengths: np.ndarray) -> "Options":
        """These options; of one side, with a `max_length` such that a batch can hold a row."""
        if lengths.ndim == 2 or self["max_length"] is not None:
            return self
        most = self["tokens_per_batch"] // self["row_multiple"]
        (multiple,) = by_side("length_multiple", self["length_multiple"] or 128, PAIR[:1])
        most -= most % multiple
        return self.replace(max_length=most) if 0 < most < lengths.max(initial=0) else self

    def fit(self, lengths) -> tuple[Bucket, ...]:
        """The option `buckets`, or those that `fit_buckets` chooses for `lengths`."""
        if self.get("buckets"):
            return tuple(self["buckets"])
        return fit_buckets(lengths, **select_options(FITTING, self))

    def plan(self, lengths, buckets: tuple[Bucket, ...] | None = None) -> Plan:
        """The plan of `lengths` (with weights, of several corpora); default buckets: `fit`."""
        return Plan(lengths, buckets or self.fit(lengths), **select_options(PLANNING, self))


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Lengths, with the corpora that they come from and the options of a config."""

    name: str  # the title of the report
    lengths: np.ndarray  # positions of each example, integers [n], of several sides [n, sides]
    corpus: AnyCorpus | None = None  # None for lengths alone and several paths
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of a config
    plan: Plan | None = None  # of a run, with all its changes; None: the report makes one
    run: Run | None = None  # what the log of the run says

    @property
    def side_names(self) -> tuple[str, ...]:
        """The names of several sides; empty for examples of one length."""
        if self.lengths.ndim == 1:
            return ()
        return PAIR if self.corpus is None else self.corpus.side_names

    @property
    def by_side(self) -> Any:
        """The lengths, of several sides by name."""
        if self.lengths.ndim == 1:
            return self.lengths
        return dict(zip(self.side_names, self.lengths.T, strict=True))

    @property
    def examples(self) -> Any:
        """The argument of `Plan`: the corpus, or the lengths."""
        return self.lengths if self.corpus is None else self.corpus


def from_corpus(corpus: AnyCorpus, name: str, options: Mapping[str, Any] | None = None) -> Dataset:
    """The dataset of this corpus."""
    return Dataset(name, corpus.lengths, corpus, options or {})


def from_run(
    corpus: AnyCorpus, name: str, plan: Plan, batches: Mapping[str, Any], run: Run | None = None
) -> Dataset:
    """The dataset of a run, with its last plan; `batches` are those of its config, if any.

    `run` is what its log says, if there is one.
    """
    options, buckets = select_options(FITTING, batches), plan.options.buckets
    others = ("weights", "by", "exclude")
    options |= plan.options.as_json([option for option in PLANNING if option not in others])
    options["exclude"] = np.flatnonzero(~plan.stages[-1].members.stays)
    if "buckets" in batches or buckets != plan.stages[0].options.buckets:
        options.pop("tokens_per_batch", None)  # not the budget of these buckets
    costs = plan.options.cost
    most = max(bucket.rows * weigh(bucket.lengths, costs) for bucket in buckets)
    options.setdefault("tokens_per_batch", int(most))
    return dataclasses.replace(from_corpus(corpus, name, options), plan=plan, run=run)


def open_dataset(paths: Sequence[str], *, lengths: bool = False) -> Dataset:
    """The dataset in `paths`; several paths are the sources of one mixture.

    A path is the directory of a corpus, or with `lengths`, a file of lengths: `.npy`, an integer
    array, or `.json`, an object that maps length to count.
    """
    datasets = [_open(path, lengths) for path in paths]
    if len(datasets) == 1:
        return datasets[0]
    if len({dataset.side_names for dataset in datasets}) > 1:
        raise InvalidValue("these have different sides, such as pairs and text; give one kind")
    return Dataset(
        name=" + ".join(dataset.name for dataset in datasets),
        lengths=np.concatenate([dataset.lengths for dataset in datasets]),
    )


def _open(path: str, lengths: bool) -> Dataset:
    location, name = as_path(path), path.rstrip("/")
    if lengths:
        return Dataset(name, _read_lengths(location))
    if location.is_file() and (location.suffix in (".npy", ".json") or not recognise(path)):
        raise InvalidValue(
            f"{path} is a file; give the directory of a corpus, or a config (.py), or --lengths "
            "if it has the lengths of examples (.npy, or .json that maps length to count), or "
            "--tokens if it has tokens"
        )
    try:
        return from_corpus(open_corpus(location), name)
    except Missing as error:
        depths = (location.glob("*/" * depth + MANIFEST) for depth in (1, 2, 3))
        if inside := [str(manifest.parent) for depth in depths for manifest in sorted(depth)]:
            raise Missing(
                f"there is no corpus in {path} itself, but in {' and in '.join(inside)}; give one "
                "of these"
            ) from error
        raise


def _read_lengths(path: epath.Path) -> np.ndarray:
    if not path.exists():
        raise Missing(f"there is no file {path}; check the path")
    try:
        if path.suffix == ".json":
            return _repeat_lengths(json.loads(path.read_bytes(), object_pairs_hook=tuple))
        return as_lengths(np.asarray(np.load(path, mmap_mode="r")))
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error}; check the path") from error
    except Exception as error:  # a header of .npy is Python, and fails in many ways
        if path.suffix == ".npy":
            raise InvalidValue(f"{path} is not an array of lengths: {error}") from error
        raise InvalidValue(
            f"{path} does not map length to count ({error}); it must hold one object of whole "
            'numbers, such as {"12": 3400, "13": 3120}'
        ) from error


def _repeat_lengths(pairs: Any) -> np.ndarray:
    """Ascending lengths from the pairs (length, count) of a JSON object."""
    if not isinstance(pairs, tuple):
        raise InvalidValue("it has no object")
    counts: dict[int, int] = {}
    for text, count in pairs:
        length = int(text)
        if length in counts:
            raise InvalidValue(f"it has length {length} twice")
        if length < 0 or not isinstance(count, int) or count < 0:
            raise InvalidValue(f"it has the count {count!r} for length {length}")
        counts[length] = count
    if max(counts, default=0) >= MOST or sum(counts.values()) > MOST:
        raise InvalidValue(f"a length, or the number of examples, is above {MOST:,}")
    lengths = sorted(counts)
    return np.repeat(np.array(lengths, np.uint32), [counts[length] for length in lengths])
