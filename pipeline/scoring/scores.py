"""`score`: a step's results for each example of a corpus, in order."""

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pipeline.corpus.interface import AnyCorpus
from pipeline.corpus.opening import open_corpus
from pipeline.corpus.stored.parts import json_digest
from pipeline.errors import (
    InvalidType,
    InvalidValue,
    require_type,
    require_whole,
    suggest_option,
)
from pipeline.fs.atomic import atomic_write, directory_lock, make_directory, remove_files
from pipeline.history.progress import Progress
from pipeline.history.step_files import StepFiles
from pipeline.loading.dynamic_context import DynamicContext
from pipeline.loading.from_options import OrderedOptions, load
from pipeline.loading.loader import Loader
from pipeline.loading.segments import Positions
from pipeline.loading.sharding import batch_sharding, multiples
from pipeline.planning.bucket import Bucket
from pipeline.planning.identity import differences
from pipeline.planning.options import list_keywords
from pipeline.planning.planned import PlannedBatch
from pipeline.scoring.table import SEGMENTS, VALUE, Parts, open_table, write_table
from pipeline.scoring.values import Value, find_values
from pipeline.steps import hosts
from pipeline.steps.checksum import checksums
from pipeline.steps.compiled import Compiled

logger = logging.getLogger(__name__)

TABLE, PARTS, MANIFEST = "scores.arrow", "scores.parts", "scores.json"

# Names of our files in the directory of parts, and of our temporary files there.
NAME = re.compile(r"\.?\d+-\d+-[0-9a-f]{16}\.[0-9a-f]{12}\.npz(\.[0-9a-f]{32}\.tmp)?")

# The steps of a part. A killed run repeats less than a part. The ranges depend on nothing else, so
# any number of hosts writes the same parts.
STEPS = 64


class ScoreOptions(OrderedOptions, total=False):
    """The options that `score` hands on to `load`, for type checkers."""

    buckets: Iterable[Bucket] | None
    prefetch: int
    num_threads: int
    positions: Positions
    features: Iterable[str] | None


def score(
    corpus: AnyCorpus | str | os.PathLike,
    step: Callable,
    *,
    directory: epath.PathLike,
    per: str | Mapping[str, str],
    state: Any = None,
    reduce: str | None = None,
    epoch: int = 0,
    version: str = "",
    sharding: Mesh | NamedSharding | DynamicContext | None = None,
    **options: Unpack[ScoreOptions],
) -> pa.Table:
    """A table of `step`'s results: one row for each example, in the order of the corpus.

    `step` runs on packed batches, each example once. It is compiled for every bucket ahead of time.
    Values are saved every 64 steps: the same call continues where a killed one stopped, with equal
    results, and returns at once if all is done. On several hosts, all make the same call, with a
    shared directory.

    Args:
        corpus: a corpus, a view of one, pairs, `Corpora`, or a directory, as for `load`.
        step: `step(batch)`, or with a state `step(state, batch)`; a function for `jax.jit`. It
            returns a dict of arrays.
        directory: the directory for `scores.arrow`, and for `scores.json`, which describes it and
            has its digest; parts are in `scores.parts` until the table is complete.
        per: the kind of record in the step's arrays, or a dict of kinds by name: "position",
            `[rows, length, …]`; of several sides the name of one, as "targets"; "segment",
            `[rows, segments, …]`, from segment id 1 on, with at least `max_segments` of them;
            "continuation" of groups, `[rows, continuations, …]`, with branch id b in column b - 1,
            as `pipeline.steps.sum_continuations` makes them; or "row", `[rows, …]`, if a row has
            one segment.
        state: a pytree of arrays, such as the parameters of a model; default None. Arrays that
            `step` refers to itself become constants of each program, which suits small models.
        reduce: "sum" or "mean" over the records of each example. Default None: a list of the
            records of positions or continuations, and the record of a segment or row itself; then
            no example may be split.
        epoch: the epoch, which decides the random choices of a view; default 0.
        version: a name for what `step` computes; default "". `score` cannot see that the code of
            `step` has changed: give another version then, or another directory. Scores of another
            version are refused.
        sharding: the devices that share a batch, as for `load`; None: the mesh of `jax.set_mesh`,
            or without one the first local device.
        **options: of `load`: `tokens_per_batch`, `max_length`, `max_segments`, `num_threads` and
            others, but not those of shuffles and mixtures. If `row_multiple` is not given, a call
            that continues takes that of the first call.

    Returns:
        A `pyarrow.Table`, mapped into memory, with a column for each value. Floating-point numbers
        are float32. Examples that are in no batch have nulls.

    Raises:
        ValueError: a row has more segments than a value has room for, or `directory` has other
            scores, or damaged ones.
        RuntimeError: another process is scoring into `directory`.
    """
    known = {*ScoreOptions.__annotations__, *list_keywords(score)}
    if wrong := [name for name in options if name not in known]:
        raise InvalidType(f"score() has no option {suggest_option(wrong[0], known)}")
    if sharding is None and not (mesh := jax.sharding.get_mesh()).empty:
        sharding = mesh
    corpus = open_corpus(corpus) if isinstance(corpus, str | os.PathLike) else corpus
    corpus = corpus.covering() if isinstance(corpus, AnyCorpus) else corpus
    require_type("version", version, str, "text")
    epoch, leads = require_whole("epoch", epoch, 0), jax.process_index() == 0
    directory = make_directory(directory)
    table = directory / TABLE
    hosts.require_shared(directory)
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        if leads:
            enter(directory_lock(directory, "scoring", wait=False))
        past = _read_past(directory)
        if options.get("buckets") is None:
            multiple, _ = multiples(batch_sharding(sharding), "contiguous")
            options.setdefault("row_multiple", past.get("row_multiple") or multiple)
        loader = enter(
            load(corpus, sharding=sharding, shuffle=False, num_epochs=epoch + 1, **options)
        )
        corpus, plan = loader.corpus, loader.plan
        run = _as_step(step, has_state=state is not None)
        outputs = {
            bucket: jax.eval_shape(run, state, specs) for bucket, specs in loader.specs.items()
        }
        values = find_values(outputs, per, reduce, plan, corpus)
        manifest: dict[str, Any] = {
            "corpus": corpus.identity,
            "plan": plan.identity,
            "scores": {
                "epoch": epoch,
                "positions": loader.batches.positions,
                "version": version,
                "state": json_digest(checksums(jax.tree.map(jnp.asarray, state))),
                **{f"value {name}": str(value) for name, value in values.items()},
            },
        }
        then = {name: past[name] for name in manifest if past}
        changes = [each for name in then for each in differences(then[name], manifest[name])]
        if changes:
            raise InvalidValue(
                f"{directory} has other scores: {'; '.join(changes)}. Score into another "
                "directory, or delete this one"
            )
        begin, end = plan.first_step(epoch), plan.first_step(epoch + 1)
        ranges = [range(at, min(at + STEPS, end)) for at in range(begin, end, STEPS)]
        # Parts of other scores have other names, even if their manifest is lost.
        every = Parts(StepFiles(directory / PARTS, f"{json_digest(manifest)}.npz"), ranges)

        whole = "sha256" in past and table.exists()

        def count() -> int:
            """The number of whole parts, from the first on; all of them if the table exists."""
            if whole:
                if _digest_file(table) != past["sha256"]:
                    raise InvalidValue(f"{table} is damaged; delete it, and score again")
                logger.info("%s has these scores already", table)
                return len(ranges)
            contents = map(every.files.read, ranges)
            return next((n for n, each in enumerate(contents) if each is None), len(ranges))

        done = hosts.main_process_first("reading the scores", count)
        hosts.require_agreement({**manifest, "done": {"parts": done}})
        manifest |= {"row_multiple": options.get("row_multiple")}
        if leads and not whole:
            _write_manifest(directory, manifest)
        if done < len(ranges):
            # Each device gets all values, so process 0 writes the same files for any number of
            # hosts.
            everywhere = NamedSharding(loader.sharding.mesh, PartitionSpec())
            compiled = Compiled(run, state, loader.specs, out_shardings=everywhere)
            _write_parts(loader, functools.partial(compiled, state), every, done, values)

        def finish() -> pa.Table:
            if leads and not whole:
                write_table(table, every, values, (len(corpus), len(corpus.sides)))
                _write_manifest(directory, {**manifest, "sha256": _digest_file(table)})
            if leads:
                remove_files(directory / PARTS, NAME)
            return open_table(table)

        return hosts.main_process_first("writing the scores", finish)


def _read_past(directory: epath.Path) -> dict[str, Any]:
    """The manifest of the scores in a directory, whole or in parts; empty if there are none."""
    table, manifest = directory / TABLE, directory / MANIFEST
    past: Any = {}
    if manifest.exists():
        with contextlib.suppress(ValueError, IsADirectoryError):
            past = json.loads(manifest.read_text())
        if not (isinstance(past, dict) and past.keys() >= {"corpus", "plan", "scores"}):
            raise InvalidValue(
                f"{manifest} does not describe scores; score into another directory, or delete "
                "that file"
            )
    if table.exists() and not (past and table.is_file()):
        raise InvalidValue(
            f"{table} is not a table that {MANIFEST} describes; score into another directory, "
            "or delete it"
        )
    return past


def _write_manifest(directory: epath.Path, manifest: Mapping[str, Any]) -> None:
    with atomic_write(directory / MANIFEST) as file:
        file.write((json.dumps(manifest, indent=1) + "\n").encode())


def _digest_file(path: epath.Path) -> str:
    with path.open("rb") as opened:
        file: Any = opened  # of etils, which does not say what it can do
        return hashlib.file_digest(file, "sha256").hexdigest()


def _as_step(step: Callable, has_state: bool) -> Callable:
    """`step` as a function of a state and a batch."""

    def run(state, batch):
        return step(state, batch) if has_state else step(batch)

    run.__name__ = getattr(step, "__name__", "step")
    return run


def _write_parts(
    loader: Loader, step: Callable, every: Parts, done: int, values: Mapping[str, Value]
) -> None:
    """Runs the steps of all parts but the first `done`, and writes these parts on process 0."""
    leads = jax.process_index() == 0
    begin, first, end = every.ranges[0][0], every.ranges[done][0], every.ranges[-1][-1] + 1
    loader.set_state(loader.batches.origin.state(first))
    results = _run(loader, step, end - first)
    shown = None if leads else False
    with contextlib.closing(
        Progress("scoring", end - begin, first - begin, shown=shown)
    ) as progress:
        for number in range(done, len(every.ranges)):
            found: dict[str, list[np.ndarray]] = {}
            for now in every.ranges[number]:
                planned, returned, waited = next(results)
                jax.block_until_ready(returned)
                if not leads:
                    continue
                for name, value in values.items():
                    whole = np.asarray(returned[name].addressable_data(0))
                    found.setdefault(VALUE + name, []).append(value.cut(whole, planned))
                found.setdefault(SEGMENTS, []).append(planned.segments)
                progress.update(now + 1 - begin, planned.num_tokens, waited, f"{planned.bucket}")
            if leads:
                arrays = {name: np.concatenate(pieces) for name, pieces in found.items()}
                every.write(number, arrays)


def _run(
    loader: Loader, step: Callable, count: int
) -> Iterator[tuple[PlannedBatch, dict[str, jax.Array], float]]:
    """Each batch, its values, and the seconds of waiting for it, once the next step has begun."""
    last = None
    for _ in range(count):
        begin = time.perf_counter()
        batch = next(loader)
        waited = time.perf_counter() - begin
        now = loader.planned, step(batch), waited
        if last:
            yield last
        last = now
    if last:
        yield last
