"""`score`: what a step makes of each example of a corpus, once and in order."""

import contextlib
import functools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Unpack

import jax
import numpy as np
import pyarrow as pa
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm.contrib.logging import logging_redirect_tqdm

from pipeline.corpus.interface import AnyCorpus
from pipeline.errors import InvalidType, InvalidValue, require_whole
from pipeline.fs.atomic import as_path, atomic_write, directory_lock, make_directory
from pipeline.history.loss_archive import StepFiles
from pipeline.history.progress import Progress
from pipeline.loading.collate import Positions
from pipeline.loading.loader import Loader, OrderedOptions, load
from pipeline.loading.sharding import batch_sharding, parts
from pipeline.loading.state import differences
from pipeline.planning.bucket import Bucket
from pipeline.planning.planned import PlannedBatch
from pipeline.scoring.table import SEGMENTS, VALUE, Parts, open_table, write_table
from pipeline.scoring.values import Value, find_values
from pipeline.steps import hosts
from pipeline.steps.compiled import Compiled

TABLE, MANIFEST, PARTS = "scores.arrow", "scores.json", "parts"

# The steps of a part; a run that was killed repeats less than a part. Nothing else decides the
# ranges, so every number of hosts writes the same parts.
STEPS = 64

# Options of `load` that decide the order of examples, repeat them, or lay batches out otherwise.
FIXED = ("seed", "shuffle", "num_epochs", "tiers", "weights", "by", "ending", "context_order")


class ScoreOptions(OrderedOptions, total=False):
    """The options that `score` hands on to `load`, for type checkers."""

    buckets: Iterable[Bucket] | None
    prefetch: int
    positions: Positions


def score(
    corpus: AnyCorpus | str | os.PathLike,
    step: Callable,
    *,
    directory: epath.PathLike,
    state: Any = None,
    model: str = "",
    reduce: str | None = None,
    epoch: int = 0,
    sharding: Mesh | NamedSharding | None = None,
    **options: Unpack[ScoreOptions],
) -> pa.Table:
    """A table of what `step` returns for each example: one row an example, in order of the corpus.

    `step` runs on packed batches, each example once. It is compiled for every bucket ahead of time.
    Values are saved every 64 steps: the same call continues where a killed one stopped, with equal
    results, and returns at once when all is done. On several hosts, all make the same call, with a
    directory that they share.

    Args:
        corpus: a corpus, a view of one, pairs, `Corpora`, or a directory, as for `load`.
        step: `step(batch)`, or with a state `step(state, batch)`; a function for `jax.jit`. It
            returns a dict of arrays: `[rows, length, …]`, a record for each position (of pairs, of
            the inputs or of the targets); or `[rows, segments, …]`, a record for each segment of a
            row, from segment id 1 on, with at least `max_segments` of them.
        directory: where to write `scores.arrow`.
        state: a pytree of arrays, such as the parameters of a model; default None. Arrays that
            `step` refers to itself become constants of each program, which suits small models.
        model: a name for all that `step` computes; a directory has scores of one model.
        reduce: "sum" or "mean", of the records of each example. Default None: a list of the records
            of positions, and the record of a segment itself.
        epoch: the epoch, which decides the random choices of a view; default 0.
        sharding: the devices that share a batch, as for `load`; None: the first local device.
        **options: of `load`: `tokens_per_batch`, `max_length`, `max_segments` and others, but for
            those of shuffles and mixtures. If `row_multiple` is not given, a call that continues
            takes that of the first call.

    Returns:
        A `pyarrow.Table`, mapped into memory, with a column for each value. Floating-point numbers
        are float32. Examples that are in no batch have nulls.

    Raises:
        TypeError: an option is not one of these.
        ValueError: an argument is not as above, a row has more segments than a value has room for,
            or `directory` has scores of something else.
        RuntimeError: another process is scoring into `directory`.
    """
    if wrong := [name for name in options if name in FIXED]:
        raise InvalidType(f"score() has no option {wrong[0]!r}: it has each example once, in order")
    epoch, leads = require_whole("epoch", epoch, 0), jax.process_index() == 0
    directory = as_path(directory)
    make_directory(directory)
    hosts.require_shared(directory)
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        if leads:
            enter(directory_lock(directory, "scoring", wait=False))
        path = directory / MANIFEST
        past: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        if not past and (directory / TABLE).exists():
            raise InvalidValue(
                f"{directory} has {TABLE} and no {MANIFEST}, which says what the scores are of; "
                "score into another directory"
            )
        if options.get("buckets") is None:
            multiple = parts(batch_sharding(sharding))[0]
            options.setdefault("row_multiple", past.get("row_multiple") or multiple)
        loader = enter(
            load(corpus, sharding=sharding, shuffle=False, num_epochs=epoch + 1, **options)
        )
        corpus, plan = loader.corpus, loader.plan
        run = _as_step(step, has_state=state is not None)
        outputs = {
            bucket: jax.eval_shape(run, state, specs) for bucket, specs in loader.specs.items()
        }
        values = find_values(outputs, reduce, plan)
        scores = {"model": model or "not named", "epoch": epoch}
        scores |= {"positions": loader.batches.positions}
        scores |= {f"value {name}": str(value) for name, value in values.items()}
        manifest = {
            "corpus": corpus.fingerprint,
            "plan": plan.fingerprint,
            "scores": ";".join(f"{name}={value}" for name, value in scores.items()),
        }
        both = [(past[name], now) for name, now in manifest.items() if past]
        if changes := [change for then, now in both for change in differences(then, now)]:
            raise InvalidValue(
                f"{directory} has scores of something else: {'; '.join(changes)}. Score into "
                "another directory, or delete this one"
            )
        begin, end = plan.first_step(epoch), plan.first_step(epoch + 1)
        ranges = [range(at, min(at + STEPS, end)) for at in range(begin, end, STEPS)]
        every = Parts(StepFiles(directory / PARTS, "npz"), ranges)

        def count() -> int:
            """Parts that are whole, from the first one on; all of them where the table is there."""
            if (directory / TABLE).exists():
                return len(ranges)
            contents = map(every.files.read, ranges)
            return next((n for n, each in enumerate(contents) if each is None), len(ranges))

        done = hosts.main_process_first("reading the scores", count)
        hosts.require_agreement({**manifest, "done": f"parts={done}"})
        if leads and not past:
            kept = {**manifest, "row_multiple": options.get("row_multiple")}
            with atomic_write(path) as file:
                file.write((json.dumps(kept, indent=1) + "\n").encode())
        if done < len(ranges):
            # Each device gets all values: so process 0 writes files that are the same for any
            # number of hosts.
            everywhere = NamedSharding(loader.sharding.mesh, PartitionSpec())
            compiled = Compiled(run, state, loader.specs, out_shardings=everywhere)
            enter(logging_redirect_tqdm())
            _write_parts(loader, functools.partial(compiled, state), every, done, values)

        def finish() -> pa.Table:
            if leads and not (directory / TABLE).exists():
                shape = len(corpus), len(corpus.sides)
                write_table(directory / TABLE, every, values, shape, manifest)
            if leads:
                every.files.directory.rmtree(missing_ok=True)
            return open_table(directory / TABLE)

        return hosts.main_process_first("writing the scores", finish)


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
    leads, begin, end = jax.process_index() == 0, every.ranges[0][0], every.ranges[-1][-1] + 1
    first = every.ranges[done][0]
    loader.set_state(loader.batches.origin.state(first))
    results = _run(loader, step, end - first)
    with Progress(end - begin, first - begin, name="score", enabled=leads) as progress:
        for number in range(done, len(every.ranges)):
            found: dict[str, list[np.ndarray]] = {}
            for now in every.ranges[number]:
                planned, returned, waited = next(results)
                jax.block_until_ready(returned)
                for name, value in values.items() if leads else ():
                    whole = np.asarray(returned[name].addressable_data(0))
                    found.setdefault(VALUE + name, []).append(value.cut(whole, planned))
                found.setdefault(SEGMENTS, []).append(planned.segments)
                text = f"{planned.bucket}"
                progress.update(now + 1 - begin, planned.num_tokens, waited, text)
            if leads:
                arrays = {name: np.concatenate(pieces) for name, pieces in found.items()}
                every.write(number, arrays)


def _run(
    loader: Loader, step: Callable, count: int
) -> Iterator[tuple[PlannedBatch, dict[str, jax.Array], float]]:
    """Each batch, its values and the seconds of waiting for it, once the next step has begun."""
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
