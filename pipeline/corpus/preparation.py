"""Prepare: text to a corpus; once, in parallel, and resumed where it was interrupted."""

import functools
import logging
import os
from collections.abc import Mapping
from typing import Any, TypedDict, Unpack

import numpy as np
from etils import epath

from pipeline.corpus.corpus import Corpus
from pipeline.corpus.engines import Engine, Processes, refuse_import
from pipeline.corpus.groups import Groups, add_parents
from pipeline.corpus.log import Log
from pipeline.corpus.manifest import LOG, MANIFEST, RANGES, Manifest, require_same_origin
from pipeline.corpus.pairs import Pairs
from pipeline.corpus.ranges import (
    NAME,
    RangeFiles,
    assemble,
    divide_records,
    make_once,
    run_ranges,
    write_range,
)
from pipeline.corpus.tasks import CAUSAL, GROUPS, INPUTS, TARGETS, Task
from pipeline.corpus.tokenisation import Job, OnError, require_tokenizable
from pipeline.corpus.writer import PartWriter
from pipeline.errors import InvalidValue
from pipeline.fs.atomic import as_path, is_local, make_directory, remove_files
from pipeline.text import templates
from pipeline.text.features import Feature, check_features
from pipeline.text.sources import Source
from pipeline.text.templates import Template
from pipeline.text.tokenizers import Tokenizer

logger = logging.getLogger(__name__)


def prepare(
    source: Source,
    tokenizer: Tokenizer,
    directory: epath.PathLike,
    *,
    field: str = "text",
    template: Template | None = None,
    features: Mapping[str, Feature] | None = None,
    task: Task = CAUSAL,
    on_error: OnError = "raise",
    num_workers: int | None = None,
    engine: Engine | None = None,
    progress: bool = True,
) -> Corpus:
    """The corpus of `source`, tokenised into `directory`; opened at once if it is there already.

    It may be killed at any time: run again, it keeps finished files, does the rest, and makes the
    same corpus, bit for bit. Meanwhile, `Corpus.open(directory, follow=True)` reads the parts that
    are sealed so far. If several processes of a machine (or of a shared file system) call it at
    once, one prepares the corpus and the others wait. The corpus does not depend on `num_workers`
    or on `engine`. Until all is done, tokens are also in `directory`/ranges; both together take the
    space of the corpus and of a part or two.

    Args:
        source: records by number; see `pipeline.text.sources`.
        tokenizer: see `pipeline.text.tokenizers`; it is stored with the corpus.
        directory: where to write.
        field: the field of each record that holds its text, all of which is trained on.
        template: in place of `field`, a function from a record to spans of text with loss weights;
            see `pipeline.text.templates`. With `task=INPUTS`, all weights must be 1. A template of
            groups, such as `templates.Preference`, makes a corpus like `Corpus.from_groups`.
        features: the features of examples, by name, each with a dtype. Each is read from the field
            of its name in the records; with a template, those of tokens come from the third entry
            of each span.
        task: decides the fields and the lengths; see `pipeline.corpus.tasks`.
        on_error: "raise" (default) ends the work at the first record that fails. "skip" makes it an
            example without tokens, which no batch has, and logs why and how many there are.
        num_workers: processes to tokenise in; 0 or 1 mean this one. By default as many as
            there are CPUs, if there is enough to do. They start by `spawn`, so a script must
            guard its main part with `if __name__ == "__main__":`.
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
    job = _make_job(source, tokenizer, field, template, features, task, on_error)
    return _open_or_prepare(
        job, directory, num_workers=num_workers, engine=engine, progress=progress
    )


class RunOptions(TypedDict, total=False):
    """The options of `prepare` that both sides of pairs share, for type checkers."""

    on_error: OnError
    num_workers: int | None
    engine: Engine | None
    progress: bool


def prepare_pairs(
    source: Source,
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
        **options: `on_error`, `num_workers`, `engine` and `progress`, as for `prepare`.
    """
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
    how: Any = dict(options)
    on_error = how.pop("on_error", "raise")
    known = check_features(features)
    sides = []
    for text, task in zip(fields, (INPUTS, TARGETS), strict=True):
        field, template = (text, None) if isinstance(text, str) else ("text", text)
        mine = {n: each for n, each in known.items() if (each.of == "inputs") == (task == INPUTS)}
        job = _make_job(source, tokenizer, field, template, mine, task, on_error, of_pair=True)
        sides.append(_open_or_prepare(job, as_path(directory) / task.name, **how))
    inputs, targets = sides
    then, now = (side.origin["source"] for side in (inputs, targets))
    if then != now:
        raise InvalidValue(
            f"the source changed between inputs and targets: its fingerprint was {then} and is now "
            f"{now}. Let nothing write to it meanwhile, delete {os.fspath(directory)}, and prepare "
            "again"
        )
    return Pairs(inputs, targets)


def prepare_share(
    source: Source,
    tokenizer: Tokenizer,
    directory: epath.PathLike,
    share: tuple[int, int],
    *,
    field: str = "text",
    template: Template | None = None,
    features: Mapping[str, Feature] | None = None,
    task: Task = CAUSAL,
    on_error: OnError = "raise",
    engine: Engine | None = None,
    progress: bool = True,
) -> None:
    """Tokenises one share of the records; `prepare` then finds that work done.

    Shares may run on any machines that see `source` and `directory`, in any order and at once.
    `prepare` itself does the shares that are missing. A `share` is its number, from 0, and the
    number of shares; all other arguments and the errors are those of `prepare`.
    """
    directory = _as_directory(directory)
    number, shares = share
    if not 0 <= number < shares:
        raise InvalidValue(
            f"share is {share}; of {shares} shares the numbers are 0 to {shares - 1}"
        )
    job = _make_job(source, tokenizer, field, template, features, task, on_error)
    if (directory / MANIFEST).exists():
        return
    refuse_import()
    files, ranges = RangeFiles.of(job, directory), divide_records(job.count_records())
    mine = ranges[len(ranges) * number // shares : len(ranges) * (number + 1) // shares]
    name = f"share {number} of {shares}"
    function = functools.partial(write_range, job, files)
    make_directory(directory / RANGES)
    for _ in run_ranges(engine or Processes(), function, mine, name=name, progress=progress):
        pass
    try:
        job.require_unchanged()
    except ValueError:
        for records in mine:
            files.path(records).unlink(missing_ok=True)
        raise


def _make_job(
    source: Source,
    tokenizer: Tokenizer,
    field: str,
    template: Template | None,
    features: Mapping[str, Feature] | None,
    task: Task,
    on_error: OnError,
    *,
    of_pair: bool = False,
) -> Job:
    known = check_features(features)
    if templates.count_nodes(template) > 1:
        if task != CAUSAL:
            raise InvalidValue(
                f"the template {templates.fingerprint(template)} makes groups, which are of the "
                f"task 'causal', and the task is {task.name!r}; leave task= out"
            )
        task, source = GROUPS, templates.source_of_nodes(source, template)
        known = add_parents(known)
    return Job(source, tokenizer, field, template, task, on_error, known, of_pair)


def _open_or_prepare(
    job: Job,
    directory: epath.PathLike,
    *,
    num_workers: int | None = None,
    engine: Engine | None = None,
    progress: bool = True,
) -> Corpus:
    if engine is not None and num_workers is not None:
        raise InvalidValue(
            f"num_workers is {num_workers} and engine is {engine}; workers are processes of this "
            "machine without an engine, so give only one of the two"
        )
    engine, directory = engine or Processes(num_workers), _as_directory(directory)
    origin = job.origin
    work = functools.partial(_prepare, job, directory, engine, progress)
    make_once(directory / MANIFEST, "preparing a corpus", work)
    if (directory / LOG).exists():  # a process was killed between the manifest and this
        Log(directory).remove()
    corpus = Corpus(directory)
    require_same_origin(directory, corpus.origin, origin)
    corpus.require_task(job.task)
    return Groups(corpus) if job.task == GROUPS else corpus  # type: ignore[return-value]


def _as_directory(directory: epath.PathLike) -> epath.Path:
    """The absolute path, since other processes may have another working directory."""
    path = as_path(directory)
    return path.absolute() if is_local(path) else path


def _prepare(job: Job, directory: epath.Path, engine: Engine, progress: bool) -> None:
    documents = job.count_records()
    manifest = Manifest(
        task=job.task.name,
        origin=job.origin,
        vocab_size=job.tokenizer.vocab_size,
        source=str(job.source),
        features=dict(job.features),
    )
    save = functools.partial(job.tokenizer.save, directory)
    writer = PartWriter(directory, manifest, again=True, save_tokenizer=save)
    files = RangeFiles.of(job, directory)
    make_directory(directory / RANGES)
    ranges = [each for each in divide_records(documents) if each.stop > writer.examples]
    assemble(writer, job, files, ranges, engine, progress)
    try:
        job.require_unchanged()  # some parts may be from before an edit, others from after it
        parts, counts = writer.collect()
        _require_tokens(job, counts, sum(part.learnt for part in parts))
    except ValueError:
        writer.discard()
        raise
    finally:
        remove_files(directory / RANGES, NAME)
    writer.finish((parts, counts))


def _require_tokens(job: Job, counts: np.ndarray, learnt: int) -> None:
    """Refuses a corpus without tokens or loss; logs which records have no tokens."""
    nodes = templates.count_nodes(job.template)
    records, failed = len(counts) // nodes, np.unique(np.flatnonzero(counts == 0) // nodes)
    if job.on_error == "skip" and len(failed):
        if len(failed) == records:
            raise InvalidValue(f"no record of {job.source} has tokens; the log says why")
        first = ", ".join(f"{number:,}" for number in failed[:10]) + ", …" * (len(failed) > 10)
        text = "%s of %s records have no tokens, for they are empty or failed: numbers %s"
        logger.warning(text, f"{len(failed):,}", f"{records:,}", first)
    if job.template is not None and job.task.has_targets and not learnt:
        raise InvalidValue(
            f"the template gives weight 0 to every token of all {records:,} records, so "
            "nothing would be learnt; give a weight to the parts of a record to train on"
        )
