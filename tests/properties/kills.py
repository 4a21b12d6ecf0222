"""Kills: processes that end at an instant, run again to their end, and are compared with others.

The process that imports this starts no backend of JAX. So it can fork children that have all
imports done: a run of train.py takes a second or two, and a corpus some hundredths of one.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.fs import object_servers
from tests.processes import COMPILE_QUICKLY, Stuck, fork, wait

WORDS = ["pack", "the", "rows", "a", "bucket", "of", "lengths", "and", "step"]

# Files of others, in a bucket: beside a work directory, and among its checkpoints.
SIBLINGS = (
    "datasets/a",
    "other_run/metrics.jsonl",
    "run-2/metrics.jsonl",
    "run/checkpoints/mine/a",
    "run/checkpoints/best/3/a",
)

# Seconds that one run may take; on a machine with much other work, a hundred times those it needs.
PATIENCE = 600

# What a process may do to files, as Python's audit hooks call it.
CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.truncate"}


def write_documents(path: Path, count: int = 160) -> None:
    """Writes JSON lines of 1 to 60 words each, the same ones always."""
    rng = random.Random(0)
    texts = [" ".join(rng.choices(WORDS, k=1 + rng.randrange(60) ** 2 // 60)) for _ in range(count)]
    path.write_text(
        "".join(json.dumps({"text": each, "back": each[::-1]}) + "\n" for each in texts)
    )


def spell(record: dict[str, Any]) -> dict[str, Any]:
    """The sides of a document: its text as inputs, backwards as targets, and its letters."""
    letters = {"letters": [*record["text"].encode()]} if record["text"] else {}
    return {
        "inputs": [(record["text"], 1.0)],
        "targets": [(record["back"], 1.0)],
        "letters": letters,
    }


spell.sides = "inputs", "targets"  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True)
class Point:
    """Calls of a method at which a kill may hit, up to 30 ms after the call begins.

    Attributes:
        owner: of the method.
        name: of the method.
        calls: the last call that is hit, in one process; any before it may be.
        counts: which calls count.
    """

    owner: Any
    name: str
    calls: int = 6
    counts: Callable[..., bool] = lambda *_, **__: True


class Trial:
    """Work that a process does in a folder, and what is to be the same after each of its ends.

    Attributes:
        name: of the work.
        bucket: where `serve_bucket` keeps its bucket, if what the work makes is there; None: it is
            in the folder of each run.
        requests: to the bucket, before the last of which a kill may hit.
    """

    name: str
    bucket: Path | None = None
    requests = 6

    def root(self, folder: Path) -> Path:
        """The local directory in which a run makes what it makes, or the server keeps it."""
        return self.bucket / f"{folder.parent.name}-{folder.name}" if self.bucket else folder

    def address(self, folder: Path) -> Any:
        """The same directory, as a run names it."""
        from pipeline.fs import as_path

        root = self.root(folder)
        return as_path(f"s3://{self.bucket.name}/{root.name}" if self.bucket else root)

    def begin(self, folder: Path) -> None:
        """Makes what is there before the work begins."""

    def run(self, folder: Path) -> None:
        """Does the work, from the beginning or from where it stopped."""
        raise NotImplementedError

    def points(self) -> dict[str, Point]:
        """Named points at which a kill may hit."""
        if not self.bucket:
            return {}
        from pipeline.fs import objects

        return {"at a request": Point(objects, "_open", self.requests)}

    def result(self, folder: Path) -> dict[str, Any]:
        """All that must be equal: the bytes of each file."""
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return {
            str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in files
            if path.name != ".lock"
        }


class Preparation(Trial):
    """Text becomes a corpus of many small parts; or two corpora.

    Args:
        text: from `write_documents`.
        kind: "prepare", "prepare_sides" or "from_arrays".
        workers: processes that tokenise.
    """

    def __init__(self, text: Path, kind: str = "prepare", workers: int = 0):
        self.text, self.kind, self.workers = text, kind, workers
        self.name = f"{kind}, {workers} workers" if workers else kind

    def run(self, folder: Path) -> None:
        from pipeline.corpus import Corpus, prepare
        from pipeline.text import ragged
        from pipeline.text.sources import JsonLines
        from pipeline.text.sources import source as sizes
        from pipeline.text.tokenizers import Bytes

        ragged.TOKENS_PER_PART, sizes.LEAST, sizes.BLOCK = 600, 1500, 100
        if self.kind == "from_arrays":
            texts = [json.loads(line)["text"] for line in self.text.read_text().splitlines()]
            Corpus.from_arrays([list(text.encode()) for text in texts], folder)
            return
        source, options = JsonLines(self.text), {"num_workers": self.workers, "progress": False}
        if self.kind == "prepare_sides":
            from pipeline import Feature

            options["features"] = {"letters": Feature("letters", dtype="uint8")}
            options["template"] = spell
        prepare(source, Bytes(), folder, **options)


class Stream(Trial):
    """A stream becomes a corpus that others can read meanwhile, and goes on from its cursor.

    What was acknowledged is noted, and so must be there whenever the work goes on. A reader of what
    is sealed sees the beginning of the stream, each example once.

    Args:
        examples: how many.
        bucket: of the corpora, if they are in one.
    """

    def __init__(self, examples: int = 120, bucket: Path | None = None):
        self.examples, self.bucket, self.notes = examples, bucket, True
        self.name = "Writer in a bucket" if bucket else "Writer"

    def example(self, number: int) -> list[int]:
        """The tokens of an example, by which it is told from others."""
        return [number] * (1 + number * 7 % 13)

    def run(self, folder: Path) -> None:
        from pipeline.corpus import Corpus, Writer
        from pipeline.text import ragged

        ragged.TOKENS_PER_PART = 50
        place, note = self.address(folder) / "c", folder / "acknowledged"
        acknowledged = len(note.read_bytes()) if note.exists() else 0
        with contextlib.suppress(FileExistsError), Writer(place) as writer:
            begin = writer.cursor or 0
            assert acknowledged <= begin == writer.examples, (acknowledged, begin)
            self.check(place, begin)
            for number in range(begin, self.examples):
                writer.append(self.example(number))
                if number % 10 == 9:
                    writer.seal(cursor=number + 1)
                    if self.notes:
                        with note.open("ab") as file:
                            file.truncate(number + 1)
            writer.finish()
        self.check(place, self.examples)
        Corpus.open(place).verify()

    def check(self, place: Any, due: int) -> None:
        """Refuses a corpus of which a reader sees something else than `due` examples."""
        from pipeline.corpus import Corpus
        from pipeline.errors import Missing

        try:
            corpus = Corpus.open(place, follow=True)
            corpus.refresh()
            seen = [int(tokens[0]) for tokens in self.tokens(corpus)]
        except Missing:
            seen = []
        assert seen == [*range(due)], seen

    def tokens(self, corpus: Any) -> Iterator[Any]:
        """The tokens of each example of a corpus."""
        numbers = range(len(corpus))
        lengths = corpus.lengths if len(corpus) else ()
        for number, length in zip(numbers, lengths, strict=True):
            assert length == len(self.example(number)) - 1
            yield self.example(number)[:1] if not length else corpus[number]["inputs"]

    def result(self, folder: Path) -> dict[str, Any]:
        return super().result(self.root(folder) / "c")


class Training(Trial):
    """A run of train.py: a tiny model, two buckets, evaluations, checkpoints, two epochs.

    Args:
        text: from `write_documents`.
        steps: how many.
        bucket: of the work directories, if they are in one, each with files of others beside it and
            among its checkpoints.
    """

    requests = 250  # that a run makes at least

    def __init__(self, text: Path, steps: int = 12, bucket: Path | None = None):
        self.text, self.steps, self.bucket = text, steps, bucket
        self.name = "train.py in a bucket" if bucket else "train.py"

    def begin(self, folder: Path) -> None:
        for name in SIBLINGS if self.bucket else ():
            (self.root(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root(folder) / name).write_text(f"{name} of somebody else")

    def run(self, folder: Path) -> None:
        import jax

        import train
        from pipeline.history import audit
        from pipeline.trainer.checkpoint import Checkpoints
        from tests.runs.runs import tiny

        save = Checkpoints.save

        def note(checkpoints, step, state, **options):
            sha = hashlib.sha256()
            for leaf in jax.tree.leaves(state):
                sha.update(jax.device_get(leaf).tobytes())
            (folder / "digests").mkdir(exist_ok=True)
            (folder / "digests" / f"{step}").write_text(sha.hexdigest())
            save(checkpoints, step, state, **options)

        Checkpoints.save = note  # type: ignore[method-assign]
        config = tiny(
            self.text,
            steps=self.steps,
            eval_every=4,
            checkpoint_every=3,
            batches__tokens_per_batch=512,
            batches__max_buckets=2,
            batches__max_length=64,
        )
        config.model.update(num_layers=1, width=16, num_heads=1, num_kv_heads=1, mlp_width=16)
        workdir = self.address(folder) / "run"
        train.train(config, workdir)
        audit(workdir, lambda line: None)

    def points(self) -> dict[str, Point]:
        from pipeline.steps.compiled import Compiled
        from pipeline.trainer.checkpoint import Checkpoints

        def evaluates(compiled, *_):
            return compiled.name == "eval_step"

        return {
            "in a checkpoint": Point(Checkpoints, "save"),
            "in an evaluation": Point(Compiled, "__call__", counts=evaluates),
            **super().points(),
        }

    def result(self, folder: Path) -> dict[str, Any]:
        from tests.runs.runs import lines, summary

        run = self.root(folder) / "run"
        files = super().result(self.root(folder))
        kept = {
            name: sha
            for name, sha in files.items()
            if name in SIBLINGS or not name.startswith("run/") or name.startswith("run/corpus/")
        }
        # The other files have times in them, or compiled programs; their names are the same.
        names = [name for name in files if not name.startswith(("run/programs", "run/tensorboard"))]
        digests = {path.name: path.read_text() for path in (folder / "digests").iterdir()}
        checkpoints = os.listdir(run / "checkpoints")
        return {
            **kept,
            "files": [name for name in names if "/checkpoints/" not in name],
            # One that is older than those kept may stay, if a kill hits its removal in the end.
            "checkpoint": max(int(name) for name in checkpoints if name.isdigit()),
            "plans": (run / "plans.json").read_text(),
            "parameters and moments": digests,
            "metrics": lines(run),
            "summary": summary(run),
        }


def at_change(folder: Path, act: Callable[[int], None]) -> None:
    """Calls `act` with 1, 2, … before each change that this process makes to files of `folder`."""
    place, count = str(folder), 0

    def hook(event: str, arguments: tuple) -> None:
        nonlocal count
        if event == "open":
            changes = bool(arguments[2] & (os.O_ACCMODE | os.O_CREAT))
        else:
            changes = event in CHANGES
        where = arguments[0] if changes and isinstance(arguments[0], str | os.PathLike) else ""
        if os.fspath(where).startswith(place):
            count += 1
            act(count)

    sys.addaudithook(hook)


def kill_me(*_: Any) -> None:
    """Ends this process as the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


#: A kind, seconds to wait or None, and what the child runs.
Instant = tuple[str, float | None, Callable[[Path], None]]
END = "to the end"  # no kind of instant


class Kills:
    """Trials in processes that are killed, each run again until it ends, and compared.

    Args:
        trial: the work.
        folder: of its own, for all runs.
        seed: decides every instant.

    Attributes:
        kills: how many processes were killed, by the kind of instant.
        found: what was wrong, in words.
    """

    def __init__(self, trial: Trial, folder: Path, seed: int = 0):
        self.trial, self.folder, self.random = trial, folder, random.Random(seed)
        self.kills: collections.Counter[str] = collections.Counter()
        self.found: list[str] = []
        folder.mkdir(parents=True)
        self._log = folder / "log"

        def count(whole: Path) -> None:
            counts: list[int] = []
            at_change(whole, counts.append)
            trial.run(whole)
            (folder / "changes").write_text(str(len(counts)))

        # The first run fills caches of compiled programs.
        for name, run in (("first", trial.run), ("whole", count)):
            begin = time.monotonic()
            if code := self._start(name, run):
                raise RuntimeError(f"{trial.name} ended with {code}:\n{self._log.read_text()}")
            self.seconds = time.monotonic() - begin
        self.expected = trial.result(folder / "whole")
        self.changes = int((folder / "changes").read_text())

    def _start(self, name: str, run: Callable[[Path], None], after: float | None = None) -> int:
        """The exit code of one run in the folder `name`; killed `after` seconds, if given."""
        folder = self.folder / name
        if not folder.exists():
            folder.mkdir()
            self.trial.begin(folder)
        pid = fork(functools.partial(run, folder), self._log)
        if after is not None:
            time.sleep(after)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return wait(pid, self._log, PATIENCE)

    def _instants(self) -> Iterator[Instant]:
        """Instants without end."""
        while True:
            kinds = ["at any time", "at a change of a file", *self.trial.points()]
            kind = self.random.choice(kinds)
            if kind == "at any time":
                yield kind, self.random.uniform(0, self.seconds), self.trial.run
            elif kind == "at a change of a file":
                yield self._at_change(self.random.randint(1, self.changes))
            else:
                point, delay = self.trial.points()[kind], self.random.uniform(0, 0.03)
                call = self.random.randint(1, point.calls)
                yield kind, None, functools.partial(self._run_to_point, point, call, delay)

    def _at_change(self, number: int) -> Instant:
        def run(folder: Path) -> None:
            at_change(folder, lambda count: kill_me() if count == number else None)
            self.trial.run(folder)

        return "at a change of a file", None, run

    def _run_to_point(self, point: Point, number: int, delay: float, folder: Path) -> None:
        method, calls = getattr(point.owner, point.name), []

        def timed(*arguments, **options):
            if point.counts(*arguments, **options):
                calls.append(None)
                if len(calls) == number:
                    threading.Timer(delay, kill_me).start()
            return method(*arguments, **options)

        setattr(point.owner, point.name, timed)
        self.trial.run(folder)

    def run(self, kills: int | None) -> None:
        """Kills that many processes; None: one before each change that an undisturbed run makes.

        After one or several kills in a folder, the work is run to its end there.
        """
        for number, instants in enumerate(self._rounds(kills), 1):
            name, story = f"{number}", []
            for kind, after, run in [*instants, (END, None, self.trial.run)]:
                code = None
                try:
                    code = self._start(name, run, after)
                except Stuck as error:
                    self._note(name, story, f"{kind}: {error}")
                if code == -signal.SIGKILL and kind != END:
                    story.append(kind if after is None else f"{kind} ({after:.3f} s)")
                    self.kills[kind] += 1
                elif code:
                    said = self._log.read_text()[-3000:]
                    self._note(name, story, f"{kind}: ended with {code}:\n{said}")
            result = self.trial.result(self.folder / name) if code == 0 else self.expected
            for key in {**self.expected, **result}:
                if (now := result.get(key)) != (due := self.expected.get(key)):
                    self._note(name, story, f"{key} is {now!s:.2000}, not {due!s:.2000}")
        if kills is None and (done := self.kills.total()) != self.changes:
            self._note("all", [], f"{done} kills before {self.changes} changes")

    def _rounds(self, kills: int | None) -> Iterator[Iterable[Instant]]:
        """The instants of each folder."""
        if kills is None:
            yield from ([self._at_change(number)] for number in range(1, self.changes + 1))
            return
        instants = self._instants()
        while (done := self.kills.total()) < kills:
            several = min(self.random.choice((1, 1, 2)), kills - done)
            yield itertools.islice(instants, several)

    def _note(self, name: str, story: list[str], wrong: str) -> None:
        killed = ", ".join(story) or "never"
        self.found.append(f"{self.trial.name}, run {name}, killed {killed}: {wrong}")
        print(self.found[-1], flush=True)


@contextlib.contextmanager
def serve_bucket(folder: Path) -> Iterator[Path]:
    """A bucket that this process and its children reach; gives the directory that has its files."""
    (folder / "server").mkdir()
    with object_servers.s3(folder / "server") as port:
        os.environ |= object_servers.s3_environment(port)
        yield folder / "server" / object_servers.BUCKET


def prepare_environment(folder: Path) -> None:
    """Sets up children that share compiled programs; call it before JAX is imported.

    Args:
        folder: for the text and the programs.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = COMPILE_QUICKLY
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "programs")
    for name in ("train", "orbax.checkpoint", "tensorboardX", "tests.runs.runs"):
        importlib.import_module(name)
