"""Prepare: text to a corpus; once, in parallel, and resumed where it was interrupted."""

import collections
import contextlib
import dataclasses
import functools
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
from etils import epath

from pipeline.bar import Bar
from pipeline.corpus.corpus import Corpus
from pipeline.corpus.interface import AnyCorpus, read_as
from pipeline.corpus.pairs import as_sides
from pipeline.corpus.preparing.block import Notes, add_notes
from pipeline.corpus.preparing.inspect import inspect
from pipeline.corpus.preparing.job import Job, OnError
from pipeline.corpus.preparing.processes import Engine, Processes, refuse_import
from pipeline.corpus.preparing.work import Work
from pipeline.corpus.stored.directory import BESIDE, MANIFEST, PART_NAME, SHARDS, SKIPPED, TEMPORARY
from pipeline.corpus.stored.log import (
    finish,
    list_records,
    parts_of,
    read_counts,
    remove_log,
    require_files,
)
from pipeline.corpus.stored.manifest import Manifest, require_same_origin
from pipeline.corpus.tasks import CAUSAL, Task
from pipeline.errors import DoesNotFit, InvalidState, InvalidValue, counted, name_some, require_type
from pipeline.fs.atomic import (
    as_path,
    atomic_write,
    directory_lock,
    is_local,
    remove_leftovers,
)
from pipeline.text.features import Feature
from pipeline.text.source import Shard
from pipeline.text.sources import Sharded, Source
from pipeline.text.templates import Template
from pipeline.text.tokenizers import Tokenizer

logger = logging.getLogger(__name__)


def prepare(
    source: Source | Sharded,
    tokenizer: Tokenizer | None,
    directory: epath.PathLike,
    *,
    field: str = "text",
    template: Template | None = None,
    features: Mapping[str, Feature] | None = None,
    task: Task = CAUSAL,
    on_error: OnError = "raise",
    strict: bool = False,
    loss: str | None = None,
    num_workers: int | None = None,
    engine: Engine | None = None,
    progress: bool = True,
) -> AnyCorpus:
    """The corpus of `source`, tokenised into `directory`; opened at once if it is there already.

    It may be killed at any time: run again, it keeps finished parts, does the rest, and makes the
    same corpus, bit for bit. If several processes of a machine (or of a shared file system) call it
    at once, one prepares the corpus and the others wait. The corpus does not depend on
    `num_workers` or on `engine`.

    Args:
        source: records; see `pipeline.text.sources`.
        tokenizer: see `pipeline.text.tokenizers`; it is stored with the corpus. None: for examples
            without a side of tokens.
        directory: where to write.
        field: see `Job`, as for the next four.
        template: a function from a record to spans of text with loss weights, or to several sides.
        features: the features of examples, by name. If some are of sides, `Sides` are returned.
        task: decides the fields and the lengths.
        on_error: "raise" (default) or "skip", for records that fail.
        strict: whether text that the tokenizer cannot hold, in a sample of the records, is an
            error; by default it is counted and logged.
        loss: the side of arrays that carries the loss, if one does; see `Sides`.
        num_workers: processes to tokenise in; 0 or 1 mean this one. By default as many as there are
            CPUs, if the source has as many shards. They start by `spawn`, so a script must guard
            its main part with `if __name__ == "__main__":`.
        engine: runs the work in place of these processes, on one machine or on many; see
            `pipeline.corpus.engines`.
        progress: whether to show a progress bar.

    Raises:
        ValueError: the source is empty, a record is not text, an id is outside the vocabulary, all
            records failed, or `directory` holds a corpus of another source, tokenizer, template or
            task; or the source was edited while it was read, and then no part is kept.
        OSError: the disk is full; finished work is kept.
        RuntimeError: a worker died.
    """
    job = Job(source, tokenizer, field, template, features, task, on_error, strict, loss)
    return prepare_job(job, directory, num_workers=num_workers, engine=engine, progress=progress)


class PrepareOptions(TypedDict, total=False):
    """The other options of `prepare`, for type checkers."""

    features: Mapping[str, Feature] | None
    on_error: OnError
    strict: bool
    num_workers: int | None
    engine: Engine | None
    progress: bool


def prepare_share(
    job: Job,
    directory: epath.PathLike,
    share: tuple[int, int],
    *,
    engine: Engine | None = None,
    progress: bool = True,
) -> None:
    """Tokenises one share of the records; `prepare_job` then finds that work done.

    Shares may run on any machines that see the source and `directory`, in any order and at once,
    also beside `prepare_job`, which does the shares that are missing.

    Args:
        job: the recipe of the corpus.
        directory: where to write.
        share: its number, from 0, and the number of shares.
        engine: as for `prepare`.
        progress: as for `prepare`.
    """
    number, shares = share
    if not 0 <= number < shares:
        raise InvalidValue(
            f"share is {share}; of {shares} shares the numbers are 0 to {shares - 1}"
        )
    work = Work(job, _as_directory(directory))
    if work.finished:
        return
    refuse_import()
    work.declare()
    shards = job.records.shards()
    if number == 0 or job.strict:
        _inspect(work, shards)
    numbered = list(enumerate(shards))[number::shares]
    name = f"share {number} of {shares}"
    _run(engine or Processes(), work, numbered, name=name, progress=progress)
    with _discarding(work):
        job.require_unchanged()


def prepare_job(
    job: Job,
    directory: epath.PathLike,
    *,
    num_workers: int | None = None,
    engine: Engine | None = None,
    progress: bool = True,
) -> AnyCorpus:
    """The corpus of a recipe; options and errors are those of `prepare`."""
    if engine is not None and num_workers is not None:
        raise InvalidValue(
            f"num_workers is {num_workers} and engine is {engine}; workers are processes of this "
            "machine without an engine, so give only one of the two"
        )
    engine = Processes(num_workers) if engine is None else engine
    require_type("engine", engine, "run", "an engine, as pipeline.engines.Ray()")
    work = Work(job, _as_directory(directory))
    origin = job.origin  # before anything is written
    # Finished work needs no lock, and may lie in a read-only directory.
    if not work.finished:
        refuse_import()
        # The lock only keeps others from doing the same work.
        with directory_lock(work.directory, "preparing a corpus"):
            if not work.finished:
                _prepare(work, engine, progress)
    if (work.last / SHARDS).exists():  # a process was killed between the manifest and this
        work.remove_logs()
    for folder in work.directories.values():  # or came late, and was killed
        remove_leftovers(folder, TEMPORARY)
    corpora = {side: Corpus(folder) for side, folder in work.directories.items()}
    for side, corpus in corpora.items():
        require_same_origin(work.directories[side], corpus.origin, origin)
        corpus.require_task(job.side_tasks[side])
    if not job.is_single:
        return as_sides(corpora, job.loss)
    (corpus,) = corpora.values()
    return read_as(corpus)


def _as_directory(directory: epath.PathLike) -> epath.Path:
    """The absolute path, since other processes may have another working directory."""
    path = as_path(directory)
    return path.absolute() if is_local(path) else path


def _prepare(work: Work, engine: Engine, progress: bool) -> None:
    manifests, shards = work.declare(), work.job.records.shards()
    work.job.require_unchanged()  # such as one whose fingerprint is never the same twice
    _inspect(work, shards)
    _run(engine, work, list(enumerate(shards)), name="preparing", progress=progress)
    try:
        _finish(work, manifests, len(shards), engine)
    except (OSError, ValueError, InvalidState):
        if not work.finished:  # else another process has finished it
            raise


def _inspect(work: Work, shards: Sequence[Shard]) -> None:
    """Says what a sample of the records has, once: not when the work goes on after an end."""
    if work.job.strict or not list_records(work.last):
        with _explaining(work):
            inspect(work.job, shards).log()


@contextlib.contextmanager
def _explaining(work: Work) -> Iterator[None]:
    """Tells why reading failed: because the source was edited, or of a lack of memory."""
    try:
        yield
    except (OSError, ValueError):
        with _discarding(work):
            work.job.require_unchanged()  # or that is why
        raise
    except MemoryError as error:
        raise DoesNotFit(
            "there is not enough memory to tokenise; use fewer workers, or divide the longest "
            f"records ({error or 'MemoryError'}). Finished work is kept; run again to finish"
        ) from error


def _run(
    engine: Engine, work: Work, items: Sequence[tuple[int, Shard]], *, name: str, progress: bool
) -> None:
    """Does the shards that are not done yet, with a progress bar."""
    state = work.read_all((number for number, _ in items), work.last)
    missing = {number: shard for number, shard in items if not state[number][1]}
    total = sum(shard.bytes for _, shard in items)
    done = total - sum(shard.bytes for shard in missing.values())
    options: dict = {"unit": "B", "unit_scale": True, "total": total, "initial": done}
    total_tokens, started = 0, time.monotonic()
    with (
        _explaining(work),
        Bar(name, shown=progress, **options) as bar,
        contextlib.closing(engine.run(work, list(missing.items()))) as results,
    ):
        for number, tokens in results:
            total_tokens += tokens
            rate = total_tokens / max(time.monotonic() - started, 1e-9)
            postfix = f"{total_tokens / 1e6:,.1f} M tokens, {rate / 1e6:.2f} M/s"
            bar.set_postfix_str(postfix, refresh=False)
            if shard := missing.pop(number, None):  # else repeated by the engine
                bar.update(shard.bytes)


def _finish(work: Work, manifests: Mapping[str, Manifest], shards: int, engine: Engine) -> None:
    """Makes a corpus of the parts, once all shards are done."""
    tokens = learnt = 0
    todo, lines, failures = [], list[str](), list[str]()
    for side, directory in work.directories.items():
        manifest = manifests[side]
        if manifest.finished:  # by a process that was killed before it finished the others
            continue
        state, task = work.read_all(range(shards), directory), work.job.side_tasks[side]
        records = [record for of_shard, _ in state.values() for record in of_shard]
        if missing := [shard for shard, (_, done) in state.items() if not done]:
            raise InvalidState(
                f"{type(engine).__name__} ended without {len(missing):,} of {shards:,} shards, "
                f"first shard {missing[0]}; run again to finish"
            )
        parts = [part for record in records for part in parts_of(directory, record)]
        require_files(directory, parts)
        counts = np.concatenate([np.zeros(0, np.uint32), *read_counts(directory, parts, task)])
        todo.append((directory, dataclasses.replace(manifest, parts=parts), counts))
        tokens += int(counts.sum())
        learnt += sum(part.learnt for part in parts) * task.has_targets
        failures += _list_failures(records)
        lines += _describe_notes(records, len(counts) // work.job.nodes)
    examples = len(todo[0][2])
    if len(todo) == len(manifests):
        with _discarding(work):
            work.job.require_unchanged()  # some parts may be from before an edit, others from later
            _require_tokens(work.job, examples, tokens, learnt, failures + lines)
    for line in lines:
        logger.warning("%s", line)
    if failures:
        path = work.directory / SKIPPED
        with atomic_write(path) as file:
            # A name that is not UTF-8 is spelled as JSON can, with escapes.
            file.writelines(f"{line}\n".encode(errors="backslashreplace") for line in failures)
        text = "%s of %s records failed and have no tokens; %s lists them: %s"
        num_records, failed = f"{examples // work.job.nodes:,}", f"{len(failures):,}"
        logger.warning(text, failed, num_records, os.fspath(path), _count_reasons(failures))
    for directory, manifest, counts in todo:
        finish(directory, manifest, counts)


def _list_failures(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line of JSON for each record that failed, with the number of its example in the corpus."""
    first = 0
    for record in records:
        for failure in record["failed"]:
            reason, example = failure.pop("reason"), failure.pop("example") + first
            (part,) = record["parts"]
            failure |= {"part": part["file"], "example": example, "reason": reason}
            yield json.dumps(failure, ensure_ascii=False)
        first += sum(part["examples"] for part in record["parts"])


def _describe_notes(records: Sequence[Mapping[str, Any]], num_records: int) -> list[str]:
    """A sentence for each kind of note, with the number of records and the first of them."""
    notes: Notes = functools.reduce(add_notes, (record.get("notes", {}) for record in records), {})
    return [
        f"{count:,} of {counted(num_records, 'record')} {about}; the first: {first}"
        for about, (count, first) in notes.items()
    ]


def _require_tokens(
    job: Job, examples: int, tokens: int, learnt: int, failures: Sequence[str]
) -> None:
    """Refuses a corpus without examples, tokens or loss."""
    if not examples:
        raise InvalidValue(
            f"the source is empty ({job.source}); check that it names the right files"
        )
    if failures and not tokens:
        raise InvalidValue(f"no record of {job.source} has tokens; the first: {failures[0]}")
    learns = any(task.has_targets for task in job.tasks)
    if job.template is not None and learns and not learnt:
        raise InvalidValue(
            f"the template gives weight 0 to every token of all {examples // job.nodes:,} "
            "records, so nothing would be learnt; give a weight to the parts of a record to train "
            "on; in chats, weights={'ROLE': 1.0} with the role whose turns are answers"
        )


def _count_reasons(failures: Sequence[str]) -> str:
    """The number of failures of each kind: the beginning of their reasons, without numbers."""
    full_reasons = (json.loads(line)["reason"] for line in failures)
    bare = (re.sub("^it does not suit the template [^:]*: ", "", reason) for reason in full_reasons)
    reasons = [re.split(r"[:;(]|\.(?=\s|$)", reason)[0].strip() for reason in bare]
    kinds = collections.Counter(re.sub(r"[\d,]*\d", "…", reason) for reason in reasons)
    return name_some([f"{count:,} × {kind}" for kind, count in kinds.most_common()])


@contextlib.contextmanager
def _discarding(work: Work) -> Iterator[None]:
    """Removes all that was made, if the block refuses it."""
    try:
        yield
    except ValueError:
        for directory in () if work.finished else {work.directory, *work.directories.values()}:
            (directory / MANIFEST).unlink(missing_ok=True)
            remove_log(directory)
            for path in directory.iterdir():
                named = PART_NAME.fullmatch(path.name) or TEMPORARY.fullmatch(path.name)
                if named or path.name in BESIDE:
                    path.unlink(missing_ok=True)
        raise
