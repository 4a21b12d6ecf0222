"""Kills: runs of train.py that end at an instant, go on to their end, and are compared with others.

The process that imports this starts no backend of JAX. So it can fork children that have all
imports done: a run of train.py takes a second or two.
"""

import collections
import contextlib
import functools
import hashlib
import importlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.fs import object_servers
from tests.processes import COMPILE_QUICKLY, Stuck, fork, wait

WORDS = ["pack", "the", "rows", "a", "bucket", "of", "lengths", "and", "step"]

# Seconds that one run may take; on a machine with much other work, a hundred times those it needs.
PATIENCE = 600

# What a process may do to files, as Python's audit hooks call it.
CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.truncate"}

STEPS = 12
REQUESTS = 250  # to a bucket, that a run makes at least


def write_documents(path: Path, count: int = 160) -> None:
    """Writes JSON lines of 1 to 60 words each, the same ones always."""
    rng = random.Random(0)
    texts = [" ".join(rng.choices(WORDS, k=1 + rng.randrange(60) ** 2 // 60)) for _ in range(count)]
    path.write_text(
        "".join(json.dumps({"text": each, "back": each[::-1]}) + "\n" for each in texts)
    )


class Training:
    """A run of train.py: a tiny model, two buckets, evaluations, checkpoints, two epochs.

    Args:
        text: from `write_documents`.
        bucket: the directory of a bucket, from `serve_bucket`, if the work directories are in it.
    """

    def __init__(self, text: Path, bucket: Path | None = None):
        self.text, self.bucket = text, bucket
        self.name = "train.py in a bucket" if bucket else "train.py"

    def root(self, folder: Path) -> Path:
        """The local directory in which a run makes what it makes, or the server keeps it."""
        return self.bucket / f"{folder.parent.name}-{folder.name}" if self.bucket else folder

    def run(self, folder: Path) -> None:
        """Trains, from the beginning or from where a run in the folder stopped."""
        import jax

        import train
        from pipeline.fs import as_path
        from pipeline.history import audit
        from tests.runs.runs import tiny
        from trainer.checkpoint import Checkpoints

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
            steps=STEPS,
            eval_every=4,
            checkpoint_every=3,
            batches__tokens_per_batch=512,
            batches__max_buckets=2,
            batches__max_length=64,
        )
        config.model.update(num_layers=1, width=16, num_heads=1, num_kv_heads=1, mlp_width=16)
        root = self.root(folder)
        workdir = as_path(f"s3://{self.bucket.name}/{root.name}" if self.bucket else root) / "run"
        train.train(config, workdir)
        audit(workdir, lambda line: None)

    def points(self) -> dict[str, tuple[Any, str, int]]:
        """Owners and names of methods, of whose first calls one is hit, and how many those are."""
        import trainer
        from pipeline.fs import objects
        from trainer.checkpoint import Checkpoints

        found: dict[str, tuple[Any, str, int]] = {
            "in a checkpoint": (Checkpoints, "save", 6),
            "in an evaluation": (trainer, "evaluate", 3),
        }
        return found | ({"at a request": (objects, "_open", REQUESTS)} if self.bucket else {})

    def result(self, folder: Path) -> dict[str, Any]:
        """All that must be equal."""
        from tests.runs.runs import lines, summary

        root, run = self.root(folder), self.root(folder) / "run"
        paths = [path for path in root.rglob("*") if path.is_file() and path.name != ".lock"]
        files = {str(path.relative_to(root)): path for path in sorted(paths)}
        kept = {
            name: hashlib.sha256(path.read_bytes()).hexdigest()
            for name, path in files.items()
            if name.startswith("run/corpus/")
        }
        # The other files have times in them, or compiled programs; their names are the same, but
        # for those of the parts of a log, which each start writes as one object.
        names = [name for name in files if not name.startswith(("run/programs", "run/tensorboard"))]
        names = [name for name in names if not name.startswith("run/metrics.jsonl.")]
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


def kill_at_call(number: int, delay: float, owner: Any, name: str) -> None:
    """Kills this process so many seconds after this call of a method begins."""
    method, called = getattr(owner, name), []

    def timed(*arguments, **options):
        called.append(None)
        if len(called) == number:
            threading.Timer(delay, kill_me).start()
        return method(*arguments, **options)

    setattr(owner, name, timed)


#: A kind, and what the child runs.
Instant = tuple[str, Callable[[Path], None]]
END = "to the end"  # no kind of instant


class Kills:
    """Runs in processes that are killed, each run again until it ends, and compared.

    Args:
        training: the run.
        folder: of its own, for all runs.
        seed: decides every instant.

    Attributes:
        kills: how many processes were killed, by the kind of instant.
        found: what was wrong, in words.
    """

    def __init__(self, training: Training, folder: Path, seed: int = 0):
        self.training, self.folder, self.random = training, folder, random.Random(seed)
        self.kills: collections.Counter[str] = collections.Counter()
        self.found: list[str] = []
        folder.mkdir(parents=True)
        self._log = folder / "log"

        def count(whole: Path) -> None:
            counts: list[int] = []
            at_change(whole, counts.append)
            training.run(whole)
            (folder / "changes").write_text(str(len(counts)))

        # The first run fills caches of compiled programs.
        for name, run in (("first", training.run), ("whole", count)):
            begin = time.monotonic()
            if code := self._start(name, run):
                raise RuntimeError(f"{training.name} ended with {code}:\n{self._log.read_text()}")
            self.seconds = time.monotonic() - begin
        self.expected = training.result(folder / "whole")
        self.changes = int((folder / "changes").read_text())

    def _start(self, name: str, run: Callable[[Path], None]) -> int:
        """The exit code of one run in the folder `name`."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        return wait(fork(functools.partial(run, folder), self._log), self._log, PATIENCE)

    def _instant(self) -> Instant:
        points = self.training.points()
        kind = self.random.choice(["at any time", "at a change of a file", *points])
        calls = points[kind][2] if kind in points else self.changes
        number, share = self.random.randint(1, calls), self.random.random()

        def run(folder: Path) -> None:
            if kind == "at any time":
                threading.Timer(share * self.seconds, kill_me).start()
            elif kind == "at a change of a file":
                at_change(folder, lambda count: kill_me() if count == number else None)
            else:
                kill_at_call(number, 0.03 * share, *points[kind][:2])
            self.training.run(folder)

        return kind, run

    def run(self, kills: int) -> None:
        """Kills that many processes.

        After one or several kills in a folder, the run goes on to its end there.
        """
        number = 0
        while (done := self.kills.total()) < kills:
            number += 1
            several = min(self.random.choice((1, 1, 2)), kills - done)
            instants = [self._instant() for _ in range(several)]
            name, story = f"{number}", []
            for kind, run in [*instants, (END, self.training.run)]:
                code = None
                try:
                    code = self._start(name, run)
                except Stuck as error:
                    self._note(name, story, f"{kind}: {error}")
                if code == -signal.SIGKILL and kind != END:
                    story.append(kind)
                    self.kills[kind] += 1
                elif code:
                    said = self._log.read_text()[-3000:]
                    self._note(name, story, f"{kind}: ended with {code}:\n{said}")
            result = self.training.result(self.folder / name) if code == 0 else self.expected
            for key in {**self.expected, **result}:
                if (now := result.get(key)) != (due := self.expected.get(key)):
                    self._note(name, story, f"{key} is {now!s:.2000}, not {due!s:.2000}")

    def _note(self, name: str, story: list[str], wrong: str) -> None:
        killed = ", ".join(story) or "never"
        self.found.append(f"{self.training.name}, run {name}, killed {killed}: {wrong}")
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
