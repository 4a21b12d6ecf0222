"""Datasets for the commands: corpora, the corpus of a config, or lengths alone."""

import dataclasses
import json
import os
import pathlib
import runpy
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from pipeline.corpus.corpora import Corpora
from pipeline.corpus.interface import AnyCorpus
from pipeline.corpus.manifest import MANIFEST
from pipeline.corpus.pairs import open_corpus
from pipeline.errors import InvalidValue, Missing, NotInstalled
from pipeline.fs.atomic import as_path
from pipeline.planning import lengths as lengths_lib
from pipeline.planning.plan import Plan

# The most examples that a file of counts may say there are: 16 GiB of lengths.
MOST = 1 << 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """Lengths, with the corpora that they come from and the options of a config.

    Attributes:
        name: its name in the report.
        lengths: positions of each example, integers [n], for pairs [n, 2].
        sources: name and number of examples of each source, in the order of `lengths`.
        corpora: the corpus of each source, or one of all; empty if only lengths are known.
        options: the options of `pipeline.load` that a config gives; empty without one.
        plan: the plan of a run, with all its changes; None: the report makes one.
    """

    name: str
    lengths: np.ndarray
    sources: tuple[tuple[str, int], ...]
    corpora: tuple[AnyCorpus, ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    plan: Plan | None = None

    @property
    def pairs(self) -> bool:
        """Whether its examples are pairs."""
        return self.lengths.ndim == 2

    @property
    def examples(self) -> Any:
        """What a plan is made from: the one corpus, or the lengths."""
        return self.corpora[0] if len(self.corpora) == 1 else self.lengths

    @property
    def corpus(self) -> AnyCorpus:
        """The one corpus.

        Raises:
            ValueError: there is none, or there are several.
        """
        if len(self.corpora) != 1:
            raise InvalidValue(
                f"{self.name} is {len(self.corpora)} corpora and tokens are needed; give the "
                "directory of one corpus, or a config"
            )
        return self.corpora[0]


def open_dataset(paths: Sequence[str], workdir: str | None = None) -> Dataset:
    """The data that the paths name; several paths are the sources of one mixture.

    Args:
        paths: directories of corpora; or one config (`.py`); or files of lengths: `.npy`, an
            integer array, or `.json`, an object that maps length to count.
        workdir: for a config, where its corpus lies or is prepared; default `runs/NAME`.

    Raises:
        ValueError: a path is none of these, or its content is not as above.
        FileNotFoundError: a path does not exist.
    """
    parts = [_open(path, workdir) for path in paths]
    if len(parts) == 1:
        return parts[0]
    if any(part.options for part in parts):
        raise InvalidValue(
            "a config was given together with other paths; give it alone, or give directories of "
            "corpora and files of lengths"
        )
    if len({part.lengths.ndim for part in parts}) > 1:
        raise InvalidValue("some of these are pairs and others are not; give those of one kind")
    return Dataset(
        name=" + ".join(part.name for part in parts),
        lengths=np.concatenate([part.lengths for part in parts]),
        sources=tuple(source for part in parts for source in part.sources),
        corpora=tuple(corpus for part in parts for corpus in part.corpora),
    )


def _open(path: str, workdir: str | None) -> Dataset:
    place = as_path(path)
    name = os.fspath(path).rstrip("/") or "/"
    if place.suffix in (".npy", ".json", ".py") and not place.exists():
        raise Missing(f"there is no file {path}; check the path")
    if place.suffix == ".npy":
        return from_lengths(name, _from_npy(place))
    if place.suffix == ".json":
        return from_lengths(name, _from_json(place))
    if place.suffix == ".py":
        return _from_config(pathlib.Path(os.fspath(place)), workdir)
    if place.is_file():
        raise InvalidValue(
            f"{path} is a file, and its name does not say of what; give the directory of a corpus, "
            "a config (.py), or lengths (.npy, or .json that maps length to count)"
        )
    try:
        return from_corpus(open_corpus(place), name)
    except FileNotFoundError as error:
        depths = (f"{'*/' * depth}{MANIFEST}" for depth in (1, 2, 3))
        inside = [str(found.parent) for depth in depths for found in sorted(place.glob(depth))]
        if inside:
            raise Missing(
                f"there is no corpus in {path} itself, but there is in {' and in '.join(inside)}; "
                "give one of these"
            ) from error
        raise


def from_corpus(
    corpus: AnyCorpus,
    name: str,
    options: Mapping[str, Any] | None = None,
    plan: Plan | None = None,
) -> Dataset:
    """The dataset that is this corpus."""
    parts = corpus.corpora if isinstance(corpus, Corpora) else {name: corpus}
    return Dataset(
        name=name,
        lengths=corpus.lengths,
        sources=tuple((name, len(part)) for name, part in parts.items()),
        corpora=(corpus,),
        options=options or {},
        plan=plan,
    )


def from_lengths(name: str, lengths: np.ndarray) -> Dataset:
    """The dataset of these lengths, without tokens."""
    return Dataset(name=name, lengths=lengths, sources=((name, len(lengths)),))


def _from_npy(path: epath.Path) -> np.ndarray:
    try:
        lengths = np.load(os.fspath(path), mmap_mode="r")
        return lengths_lib.as_lengths(np.asarray(lengths))
    except (ValueError, EOFError) as error:
        raise InvalidValue(f"{path} is not an array of lengths: {error}") from error


def _from_json(path: epath.Path) -> np.ndarray:
    try:
        counts = {int(length): count for length, count in json.loads(path.read_text()).items()}
        for length, count in counts.items():
            if length < 0 or not isinstance(count, int) or count < 0:
                raise InvalidValue(f"it says {count!r} for length {length}")
        if (total := float(sum(counts.values()))) > MOST:
            raise InvalidValue(f"{total:.3g} examples is too large a number: {MOST:,} is the most")
    except (ValueError, AttributeError, TypeError) as error:
        raise InvalidValue(
            f"{path} does not map length to count ({error}); it must hold one object of whole "
            'numbers, such as {"12": 3400, "13": 3120}'
        ) from error
    lengths = sorted(counts)
    return np.repeat(np.array(lengths, np.uint32), [counts[length] for length in lengths])


def _from_config(path: pathlib.Path, workdir: str | None) -> Dataset:
    from pipeline.trainer.corpora import prepare_corpora

    # A config may import others: beside it, and those of a clone that this package lies in.
    for place in (path.resolve().parent, pathlib.Path(__file__).parents[2]):
        if os.fspath(place) not in sys.path:
            sys.path.append(os.fspath(place))
    try:
        module = runpy.run_path(os.fspath(path), run_name=path.stem)
    except ImportError as error:
        raise NotInstalled(
            f"{path} cannot be imported: {error}. Python looks in the current directory, in that "
            "of the config, and in those that PYTHONPATH names"
        ) from error
    if "get_config" not in module:
        raise InvalidValue(f"{path} has no function get_config(), which a config must have")
    config = module["get_config"]()
    directory = as_path(workdir or f"runs/{path.stem}")
    corpus, _ = prepare_corpora(config, directory / "corpus")
    options = {**config.batches, **config.get("mixture", {}), "seed": config.seed}
    return from_corpus(corpus, os.fspath(path), options)
