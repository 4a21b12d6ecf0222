"""Prepare: text to a corpus; once, in parallel, and resumed where it was interrupted."""

import collections
import contextlib
import dataclasses
import functools
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import numpy as np
from etils import epath
from tqdm import tqdm

from pipeline.corpus.corpus import Corpus
from pipeline.corpus.engines import Engine, Processes, refuse_import
from pipeline.corpus.groups import Groups
from pipeline.corpus.log import Log, parts_of, record_path
from pipeline.corpus.manifest import (
    BESIDE,
    MANIFEST,
    PART_NAME,
    SHARDS,
    SKIPPED,
    TEMPORARY,
    Manifest,
    is_finished,
    require_same_origin,
)
from pipeline.corpus.pairs import Pairs
from pipeline.corpus.tasks import CAUSAL, GROUPS, INPUTS, TARGETS, TASKS, Task
from pipeline.corpus.tokenisation import Job, Notes, OnError, add_notes, require_tokenizable
from pipeline.corpus.work import Work, failures_path
from pipeline.corpus.writer import finish
from pipeline.errors import InvalidState, InvalidValue, counted, name_some
from pipeline.fs.atomic import as_path, atomic_write, directory_lock, is_local
from pipeline.text.features import Feature, check_features
from pipeline.text.sources import Sharded, Source
from pipeline.text.sources.source import Shard
from pipeline.text.templates import Template
from pipeline.text.tokenizers import Tokenizer

logger = logging.getLogger(__name__)


class _Bar(tqdm):
    """A progress bar with a thread lock; the lock of tqdm would fix how processes start."""

    _lock = threading.RLock()


def prepare(
    source: Source | Sharded,
    tokenizer: Tokenizer,
    directory: epath.PathLike,
    *,
    field: str = "text",
    template: Template | None = None,
    features: Mapping[str, Feature] | None = None,
    task: Task = CAUSAL,
    on_error: OnError = "raise",
    strict: bool = False,
    num_workers: int | None = None,
    engine: Engine | None = None,
    progress: bool = True,
) -> Corpus:
    """The corpus of `source`, tokenised into `directory`; opened at once if it is there already.

    It may be killed at any time: run again, it keeps finished parts, does the rest, and makes the
    same corpus, bit for bit. Meanwhile, `Corpus.open(directory, follow=True)` reads the parts that
    are done so far, in order. If several processes of a machine (or of a shared file system) call
    it at once, one prepares the corpus and the others wait. The corpus does not depend on
    `num_workers` or on `engine`.

    Args:
        source: records; see `pipeline.text.sources`.
        tokenizer: see `pipeline.text.tokenizers`; it is stored with the corpus.
        directory: where to write.
        field: see `Job`, as for the next four.
        template: a function from a record to spans of text with loss weights.
        features: the features of examples, by name.
        task: decides the fields and the lengths.
        on_error: "raise" (default) or "skip", for records that fail.
        strict: whether text that the tokenizer cannot hold, among the first records, is an error;
            by default it is counted and logged.
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
    job = Job(source, tokenizer, field, template, features, task, on_error, strict)
    return prepare_job(job, directory, num_workers=num_workers, engine=engine, progress=progress)


class RunOptions(TypedDict, total=False):
    """The options of `prepare` that both sides of pairs share, for type checkers."""

    on_error: OnError
    strict: bool
    num_workers: int | None
    engine: Engine | None
    progress: bool


def prepare_pairs(
    source: Source | Sharded,
    tokenizer: Tokenizer,
    directory: epath.PathLike,
    *,
    fields: tuple[str | Template, str | Template] = ("inputs", "targets"),
    features: Mapping[str, Feature] | None = None,
    **options: Unpack[RunOptions],
) -> Pairs:
    """The pairs of `source`, for sequence to sequence: two corpora, one for each side.

    Args:
        source: records by number, each with two texts; for two parallel texts,
            `sources.ParallelText`.
        tokenizer: for both texts; it must have a begin mark, from which the decoder starts.
        directory: where to write; each side is prepared as by `prepare`.
        fields: the fields of each record that hold inputs and targets, or templates; the template
            of the targets decides which tokens carry loss. Default: "inputs" and "targets".
        features: as for `prepare`; those of "inputs" are read with the inputs, others with the
            targets.
        **options: `on_error`, `strict`, `num_workers`, `engine` and `progress`, as for `prepare`.
    """
    how: Any = dict(options)
    jobs = pair_jobs(
        source, tokenizer, fields, features, how.pop("on_error", "raise"), how.pop("strict", False)
    )
    inputs, targets = (prepare_job(job, as_path(directory) / job.task.name, **how) for job in jobs)
    then, now = (side.origin["source"] for side in (inputs, targets))
    if then != now:
        raise InvalidValue(
            f"the source changed between inputs and targets: its fingerprint was {then} and is now "
            f"{now}. Let nothing write to it meanwhile, delete {os.fspath(directory)}, and prepare "
            "again"
        )
    return Pairs(inputs, targets)


def pair_jobs(
    source: Source | Sharded,
    tokenizer: Tokenizer,
    fields: tuple[str | Template, str | Template] = ("inputs", "targets"),
    features: Mapping[str, Feature] | None = None,
    on_error: OnError = "raise",
    strict: bool = False,
) -> list[Job]:
    """The recipes of the two sides of pairs; see `prepare_pairs`."""
    require_tokenizable(source, tokenizer)
    if len(fields) != 2 or isinstance(fields, str):
        raise InvalidValue(
            f"fields is {fields!r}; it must be two, of the inputs and of the targets"
        )
    if tokenizer.begin_id is None:
        raise InvalidValue(
            f"the tokenizer {tokenizer.fingerprint} does not mark where texts begin, and a decoder "
            "begins with that mark; make the tokenizer with begin=True"
        )
    known, jobs = check_features(features), []
    for text, task in zip(fields, (INPUTS, TARGETS), strict=True):
        field, template = (text, None) if isinstance(text, str) else ("text", text)
        mine = {n: each for n, each in known.items() if (each.of == "inputs") == (task == INPUTS)}
        jobs.append(
            Job(source, tokenizer, field, template, mine, task, on_error, strict, of_pair=True)
        )
    return jobs


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
    if is_finished(work.directory):
        return
    refuse_import()
    work.declare()
    mine = list(enumerate(job.records.shards()))[number::shares]
    name = f"share {number} of {shares}"
    _run(engine or Processes(), work, mine, name=name, progress=progress)
    with _discarding(work):
        job.require_unchanged()


def prepare_job(
    job: Job,
    directory: epath.PathLike,
    *,
    num_workers: int | None = None,
    engine: Engine | None = None,
    progress: bool = True,
) -> Corpus:
    """The corpus of a recipe; options and errors are those of `prepare`."""
    if engine is not None and num_workers is not None:
        raise InvalidValue(
            f"num_workers is {num_workers} and engine is {engine}; workers are processes of this "
            "machine without an engine, so give only one of the two"
        )
    engine, work = engine or Processes(num_workers), Work(job, _as_directory(directory))
    origin = job.origin
    # Finished work needs no lock, and may lie in a read-only directory.
    if not is_finished(work.directory):
        refuse_import()
        # The lock only keeps others from doing the same work.
        with directory_lock(work.directory, "preparing a corpus"):
            if not is_finished(work.directory):
                _prepare(work, engine, progress)
    if (work.directory / SHARDS).exists():  # a process was killed between the manifest and this
        Log(work.directory).remove()
    corpus = Corpus(work.directory)
    require_same_origin(work.directory, corpus.origin, origin)
    corpus.require_task(job.stored_task)
    return Groups(corpus) if job.stored_task == GROUPS else corpus  # type: ignore[return-value]


def _as_directory(directory: epath.PathLike) -> epath.Path:
    """The absolute path, since other processes may have another working directory."""
    path = as_path(directory)
    return path.absolute() if is_local(path) else path


def _prepare(work: Work, engine: Engine, progress: bool) -> None:
    manifest, shards = work.declare(), work.job.records.shards()
    work.job.require_unchanged()  # such as one whose fingerprint is never the same twice
    _run(engine, work, list(enumerate(shards)), name="preparing", progress=progress)
    try:
        _finish(work, manifest, len(shards), engine)
    except (OSError, ValueError, InvalidState):
        if not is_finished(work.directory):  # else another process has finished it
            raise


def _run(
    engine: Engine, work: Work, items: Sequence[tuple[int, Shard]], *, name: str, progress: bool
) -> None:
    """Does the shards that are not done yet, with a progress bar."""
    there = work.read_all(number for number, _ in items)
    missing = {number: shard for number, shard in items if not there[number][1]}
    total = sum(shard.bytes for _, shard in items)
    done = total - sum(shard.bytes for shard in missing.values())
    options: dict = {"unit": "B", "unit_scale": True, "total": total, "initial": done}
    # In a log file, a line now and then is enough.
    options |= {"mininterval": 0.2 if sys.stderr.isatty() else 10, "disable": not progress}
    every, started = 0, time.monotonic()
    try:
        with (
            _Bar(desc=name, **options) as bar,
            contextlib.closing(engine.run(work, list(missing.items()))) as results,
        ):
            for number, tokens in results:
                every += tokens
                rate = every / max(time.monotonic() - started, 1e-9)
                postfix = f"{every / 1e6:,.1f} M tokens, {rate / 1e6:.2f} M/s"
                bar.set_postfix_str(postfix, refresh=False)
                if shard := missing.pop(number, None):  # else repeated by the engine
                    bar.update(shard.bytes)
    except (OSError, ValueError):
        with _discarding(work):
            work.job.require_unchanged()  # or that is why
        raise


def _finish(work: Work, manifest: Manifest, shards: int, engine: Engine) -> None:
    """Makes a corpus of the parts, once all shards are done."""
    log, there = Log(work.directory), work.read_all(range(shards))
    records = [record for found, _ in there.values() for record in found]
    if missing := [shard for shard, (_, done) in there.items() if not done]:
        raise InvalidState(
            f"{type(engine).__name__} ended without {len(missing):,} of {shards:,} shards, first "
            f"shard {missing[0]}; run again to finish"
        )
    paths = [record_path(work.directory, each["shard"], each["number"]) for each in records]
    of_records = [parts_of(*pair) for pair in zip(paths, records, strict=True)]
    parts = [part for each in of_records for part in each]
    log.require_files(parts)
    task = TASKS[manifest.task]
    counts = np.concatenate([np.zeros(0, np.uint32), *log.read_counts(parts, task)])
    failures = list(_read_failures(work.directory, records))
    notes = _describe_notes(records, len(counts) // work.job.nodes)
    with _discarding(work):
        work.job.require_unchanged()  # some parts may be from before an edit, others from after it
        _require_tokens(work.job, counts, sum(part.learnt for part in parts), failures + notes)
    for line in notes:
        logger.warning("%s", line)
    if failures:
        path = work.directory / SKIPPED
        with atomic_write(path) as file:
            # A name that is not UTF-8 is spelled as JSON can, with escapes.
            file.writelines(f"{line}\n".encode(errors="backslashreplace") for line in failures)
        text = "%s of %s records failed and have no tokens; %s lists them: %s"
        every, failed = f"{len(counts) // work.job.nodes:,}", f"{len(failures):,}"
        logger.warning(text, failed, every, os.fspath(path), _count_reasons(failures))
    finish(log, dataclasses.replace(manifest, parts=parts), counts)


def _read_failures(directory: epath.Path, records: Sequence[Mapping[str, Any]]) -> Any:
    """A line of JSON for each record that failed, with the number of its example in the corpus."""
    first = 0
    for record in records:
        if record["failed"]:
            path = failures_path(directory, record["shard"], record["number"])
            for line in path.read_text().splitlines():
                each = json.loads(line)
                reason, example = each.pop("reason"), each.pop("example") + first
                (part,) = record["parts"]
                each |= {"part": part["file"], "example": example, "reason": reason}
                yield json.dumps(each, ensure_ascii=False)
        first += sum(part["examples"] for part in record["parts"])


def _describe_notes(records: Sequence[Mapping[str, Any]], every: int) -> list[str]:
    """A sentence for each kind of note, with the number of records and the first of them."""
    notes: Notes = functools.reduce(add_notes, (each.get("notes", {}) for each in records), {})
    return [
        f"{count:,} of {'the first ' * bool(of)}{counted(of or every, 'record')} {about}; "
        f"the first: {first}"
        for about, (count, of, first) in notes.items()
        if count
    ]


def _require_tokens(job: Job, counts: np.ndarray, learnt: int, failures: Sequence[str]) -> None:
    """Refuses a corpus without examples, tokens or loss."""
    if not len(counts):
        raise InvalidValue(
            f"the source is empty ({job.source}); check that it names the right files"
        )
    if failures and not counts.any():
        raise InvalidValue(f"no record of {job.source} has tokens; the first: {failures[0]}")
    if job.template is not None and job.stored_task.has_targets and not learnt:
        raise InvalidValue(
            f"the template gives weight 0 to every token of all {len(counts) // job.nodes:,} "
            "records, so nothing would be learnt; give a weight to the parts of a record to train "
            "on, such as weights={'gpt': 1.0} for the turns of that role"
        )


def _count_reasons(failures: Sequence[str]) -> str:
    """The number of failures of each kind: the beginning of their reasons, without numbers."""
    every = (json.loads(line)["reason"] for line in failures)
    bare = (re.sub("^it does not suit the template [^:]*: ", "", reason) for reason in every)
    reasons = [re.split("[:;.(]", reason)[0].strip() for reason in bare]
    kinds = collections.Counter(re.sub(r"[\d,]*\d", "…", reason) for reason in reasons)
    return name_some([f"{count:,} × {kind}" for kind, count in kinds.most_common()])


@contextlib.contextmanager
def _discarding(work: Work) -> Iterator[None]:
    """Removes all that was made, if the block refuses it."""
    try:
        yield
    except ValueError:
        if not is_finished(work.directory):
            (work.directory / MANIFEST).unlink(missing_ok=True)  # first: it tells readers
            Log(work.directory).remove()
            for path in work.directory.iterdir():
                named = PART_NAME.fullmatch(path.name) or TEMPORARY.fullmatch(path.name)
                if named or path.name in BESIDE:
                    path.unlink(missing_ok=True)
        raise
