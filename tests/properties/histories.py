"""Histories: writers and readers of corpora that grow, killed at any moment and started again.

Readers note each batch and state. In the end all of them are compared, bit for bit, with those of
a reader who opens the corpora after their end. Each token has an id of its own, so the batches
themselves show one that is trained on twice, or never.
"""

import collections
import contextlib
import functools
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline import Batches, Bucket, Corpora, Corpus, Loader, Plan, Writer
from pipeline.corpus.corpus import open_growing
from pipeline.fs import as_path
from pipeline.planning import growing
from pipeline.text import ragged
from tests.fs import object_servers
from tests.processes import fork
from tests.properties.kills import serve_bucket

HOSTS = 1, 2, 1  # of a reader, in turns
STORED = 2  # every so many histories are in a bucket
LOADS = 0.1  # the share of readers that have a `Loader` while they have one host
FIRST_ID = 1 << 24  # of the tokens of the second corpus; twice that, of the third
END, OVER = -1, object()
PATIENCE = 600  # seconds; on a machine with much other work, a hundred times those needed

BUCKETS = [
    [Bucket(4, 32)],
    [Bucket(4, 32), Bucket(2, 64)],
    [Bucket(4, 16), Bucket(2, 16), Bucket(2, 48)],
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"tiers": 3},
    {"shuffle": False},
    {"packing": "fill"},
    {"packing": "none"},
    {"align": 4},
    {"max_segments": 3},
]
WEIGHTS = [(60, 38, 2), (49, 49, 2), (28, 70, 2)]


# A kill of a reader is one of all its hosts; batches are counted that readers had, also those that
# they had twice; a reader that goes on from a state resumes.
FIGURES = (
    "{histories:,} histories, {windows:,} windows in {chapters:,} chapters; {writer_kills:,} kills "
    "of writers and {reader_kills:,} of readers; {batches:,} batches and {resumes:,} resumes "
    "compared; {wrong:,} wrong"
)


def tell(number: int, seed: int) -> Iterator[str]:
    """What so many histories show on disk, and every so many of them in a bucket."""
    seen = {place: collections.Counter[str]() for place in ("on disk", "in a bucket")}
    os.environ["JAX_PLATFORMS"] = "cpu"
    with tempfile.TemporaryDirectory() as directory, serve_bucket(Path(directory)) as bucket:
        for at in range(number):
            in_bucket = (at + 1) % STORED == 0
            here = seen["in a bucket" if in_bucket else "on disk"]
            history = History(f"{seed}-{at}", Path(directory, f"{at}"), here, in_bucket)
            try:
                history.run()
            except Wrong as error:
                here["wrong"] += 1
                yield f"history {history.name}, {history}: {error}"
            here["histories"] += 1
            shutil.rmtree(history.folder)
            shutil.rmtree(bucket / history.name, ignore_errors=True)
    for place, figures in seen.items():
        yield f"{place}: {FIGURES.format_map(figures)}"


class Wrong(Exception):
    """A process ended with an error, or did not end."""


class History:
    """One corpus that grows, or a mixture of two and one that does not, and two readers.

    Args:
        name: decides all that is drawn.
        folder: for what processes note.
        seen: where figures are added.
        in_bucket: whether the corpora are in a bucket; else they are in the folder.
    """

    def __init__(self, name: str, folder: Path, seen: collections.Counter, in_bucket: bool):
        self.name, self.folder, self._seen = name, folder, seen
        root = f"s3://{object_servers.BUCKET}/{name}" if in_bucket else str(folder)
        self.places = {each: as_path(f"{root}/{each}") for each in "abc"}
        folder.mkdir()
        draw = random.Random(name)
        self.growing = draw.choice(["a", "ab"])
        mixed = len(self.growing) > 1
        self.buckets = draw.choice(BUCKETS[: 2 if mixed else 3])
        self.options = {"window": draw.choice([15, 30, 60]), **draw.choice(OPTIONS)}
        weights = dict(zip("abc", draw.choice(WEIGHTS), strict=True))
        self.weights = weights if mixed else None
        self.chapter, self.least = draw.randint(2, 5), draw.choice([8, 20])
        self.epochs = draw.choice([1, 1, 1, 2])
        self.examples = {each: self._draw_examples(draw, each) for each in "abc"}
        # Of each writer: seconds to an example; and the examples, or seconds below 1, to a seal.
        self.paces = {each: draw.uniform(0, 0.006) for each in self.growing}
        self.seals = {each: draw.choice([draw.randint(3, 30), draw.random() / 10]) for each in "ab"}
        # Of each reader: seconds to a batch, batches to a state that is saved, and the last one.
        self.pauses = [0, draw.uniform(0.002, 0.01)]
        self.saves = [draw.choice([1, 3, 10]) for _ in self.pauses]
        self.loads = [draw.random() < LOADS for _ in self.pauses]
        self.states: list[Any] = [None for _ in self.pauses]
        self.notes: list[list[Path]] = [[] for _ in self.pauses]
        # Of each of them, when it is killed: so many seconds after so many seals or batches.
        moments = [(0, 1.0), (20, 0.05), (40, 0.05)]
        self.lives = {
            name: [
                (draw.randint(0, most), draw.uniform(0, seconds))
                for most, seconds in draw.choices(moments, k=draw.randint(0, 4))
            ]
            for name in [*self.growing, *range(len(self.pauses))]
        }

    def __str__(self) -> str:
        return (
            f"of {self.growing}, weights {self.weights}, buckets {self.buckets}, {self.options}, "
            f"chapters of {self.chapter} windows of {self.least} pieces or more, "
            f"{self.epochs} epochs"
        )

    def _draw_examples(self, draw: random.Random, name: str) -> list[np.ndarray]:
        count, most = draw.randint(100, 300), draw.choice([20, 60, 100])
        sizes = [draw.randint(1, most) for _ in range(count if name in self.growing else 12)]
        ends = np.cumsum([0, *sizes]) + "abc".index(name) * FIRST_ID
        return [np.arange(*each) for each in itertools.pairwise(ends.tolist())]

    def run(self) -> None:
        """Lets it happen.

        Raises:
            Wrong: something ended with an error, or is not as it must be.
        """
        whole = functools.partial(Corpus.from_arrays, self.examples["c"], self.places["c"])
        going = [self._live("whole", [], lambda life: [whole])]
        self._finish(going)
        for name in self.growing:
            write = functools.partial(self.write, name)
            going.append(self._live(f"writer {name}", self.lives[name], lambda life, w=write: [w]))
        for reader in range(len(self.pauses)):
            begin = functools.partial(self._begin_reader, reader)
            going.append(self._live(f"reader {reader}", self.lives[reader], begin))
        self._finish(going)
        self._finish([self._live("check", [], lambda life: [self.check])])
        self._seen.update(json.loads((self.folder / "counts").read_text()))

    # ---- processes, which are killed

    def _finish(self, going: list[Iterator[None]]) -> None:
        """Lets all of them go on in turns until they end."""
        with contextlib.ExitStack() as stack:
            for each in going:
                stack.callback(each.close)
            while going:
                going[:] = [each for each in going if next(each, OVER) is not OVER]
                time.sleep(0.002)

    def _live(
        self,
        name: str,
        lives: Sequence[tuple[int, float]],
        begin: Callable[[int], Sequence[Callable]],
    ) -> Iterator[None]:
        """Starts processes, kills them and starts others; the last ones end.

        `begin` gives what the processes of a life do, by its number; `lives`, how many bytes one of
        them prints before the seconds begin after which all are killed.
        """
        for life, (due, seconds) in enumerate([*lives, (0, PATIENCE)]):
            tasks, codes, last = begin(life), set[int](), life == len(lives)
            logs = [self.folder / f"log of {name}, {life}.{n}" for n in range(len(tasks))]
            end = time.monotonic() + PATIENCE
            for log in logs:
                log.touch()
            pids = [fork(task, log) for task, log in zip(tasks, logs, strict=True)]
            try:
                while pids:
                    yield
                    if max(log.stat().st_size for log in logs) >= due:
                        due, end = 1 << 62, time.monotonic() + seconds
                    if time.monotonic() > end:
                        for pid in pids:
                            os.kill(pid, signal.SIGKILL)
                    for pid in [*pids]:
                        done, status = os.waitpid(pid, os.WNOHANG)
                        if done:
                            pids.remove(pid)
                            codes.add(os.waitstatus_to_exitcode(status))
            finally:
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
            if codes - {0, -signal.SIGKILL} or (last and codes != {0}):
                said = [log.read_text()[-3000:] for log in logs]
                raise Wrong("\n".join([f"{name} ended with {codes}", *said]))
            if codes == {0}:
                return
            self._seen[f"{name.split()[0]}_kills"] += 1

    def _begin_reader(self, reader: int, life: int) -> list[Callable]:
        """What its hosts do, which go on from the last state that all hosts before have saved."""
        saved = [
            [
                state
                for state, _ in lines(note)
                if state["step"] != END and not state["step"] % self.saves[reader]
            ]
            for note in self.notes[reader]
        ]
        if saved and all(saved):
            last = [each[-1] for each in saved]
            self.states[reader] = min(last, key=lambda state: state["step"])
        begin = self.states[reader]["step"] if self.states[reader] else 0
        hosts = HOSTS[life % len(HOSTS)]
        notes = [self.folder / f"{reader}-{life}-{begin}-{hosts}-{n}" for n in range(hosts)]
        for note in notes:
            note.touch()
        self.notes[reader] = notes
        return [
            functools.partial(self.read, reader, note, host, hosts)
            for host, note in enumerate(notes)
        ]

    def write(self, name: str) -> None:
        """Writes a corpus, from its cursor on, and notes how many examples are acknowledged."""
        ragged.TOKENS_PER_PART = 150
        note, every = self.folder / f"acknowledged {name}", self.seals[name]
        note.touch()
        with contextlib.suppress(FileExistsError), Writer(self.places[name]) as writer:
            begin, last = writer.cursor or 0, time.monotonic()
            acknowledged = note.stat().st_size
            assert acknowledged <= begin == writer.examples, (acknowledged, begin)
            sealed = begin
            for number, tokens in enumerate(self.examples[name][begin:], begin + 1):
                writer.append(tokens)
                time.sleep(self.paces[name])
                if (time.monotonic() - last if every < 1 else number - sealed) >= every:
                    writer.seal(cursor=number)
                    os.truncate(note, number)
                    print(end=".", flush=True)
                    sealed, last = number, time.monotonic()
            writer.finish()

    def open(self, **hosts: int) -> Batches:
        """The batches of what is sealed and will be, once something is."""
        growing.CHAPTER, growing.LEAST_WINDOW = self.chapter, self.least
        corpora: Any = {name: open_growing(self.places[name]) for name in self.growing}
        parts: Any = {name: corpus.log for name, corpus in corpora.items()}
        if self.weights is None:
            plan = Plan(parts["a"], self.buckets, **self.options)
            return Batches(corpora["a"], plan, **hosts).repeat(self.epochs)
        corpora["c"] = parts["c"] = Corpus.open(self.places["c"])
        plan = Plan(parts, self.buckets, weights=self.weights, **self.options)
        return Batches(Corpora(corpora), plan, **hosts).repeat(self.epochs)

    def read(self, reader: int, note: Path, host: int, hosts: int) -> None:
        """Reads all batches from the reader's state on, and notes them."""
        batches, state = self.open(process_index=host, process_count=hosts), self.states[reader]
        loads = hosts == 1 and self.loads[reader]
        steps: Any = Loader(batches) if loads else iter(batches.to_iter_dataset())
        if state is not None:
            steps.set_state(state)
        with note.open("w", buffering=1) as file:
            for batch in steps:
                print(json.dumps([steps.get_state(), digest(batch)]), file=file)
                print(end=".", flush=True)
                time.sleep(self.pauses[reader])
            print(json.dumps([{"step": END}, ""]), file=file)

    def check(self) -> None:
        """Refuses what readers noted if the finished corpora have other batches; counts."""
        steps: Any = iter(self.open().with_plans().to_iter_dataset())
        states, digests, ids = [steps.get_state()], [], [np.zeros(0, np.int32)]
        for planned, batch in steps:
            states.append(json.loads(json.dumps(steps.get_state())))
            digests.append(digests_of_shares(batch, planned.bucket.rows))
            epochs = np.full(planned.bucket.rows, -1)
            epochs[planned.segments[:, 0]] = planned.epoch_of_segments
            ids.append(batch["targets"][(batch["loss_weights"] > 0) & (epochs[:, None] == 0)])
        found, limit = np.sort(np.concatenate(ids)), len(self.growing) * FIRST_ID
        due = [tokens[1:] for name in self.growing for tokens in self.examples[name]]
        np.testing.assert_array_equal(found[found < limit], np.concatenate(due))
        notes = sorted(self.folder.glob("[0-9]-*"))
        batches = resumes = 0
        for note in notes:
            _, _, begin, hosts, host = map(int, note.name.split("-"))
            noted = lines(note)
            for step, (state, shown) in enumerate(noted, begin + 1):
                if state["step"] == END:
                    assert step == len(states), (note.name, step, len(states))
                else:
                    assert state == states[step], (note.name, state, states[step])
                    assert shown == digests[step - 1][hosts, host], (note.name, step)
                    batches += not host
            resumes += begin > 0 and len(noted) > 0 and not host
        places = [state["plans"][-1]["places"] for state in states]
        known = [(name, place) for each in places for name, place in each.items() if place]
        counts = {
            "batches": batches,
            "resumes": resumes,
            "windows": len({(name, place["last"][0]) for name, place in known}),
            "chapters": len({(name, place["part"]) for name, place in known}),
        }
        (self.folder / "counts").write_text(json.dumps(counts))


def lines(note: Path) -> list[Any]:
    """What a reader noted; without the line that it was writing when it was killed."""
    return [json.loads(line) for line in note.read_text().rpartition("\n")[0].splitlines()]


def digest(batch: Mapping[str, Any]) -> str:
    """A digest of all fields of a batch."""
    sha = hashlib.sha256()
    for name, field in sorted(batch.items()):
        values = np.asarray(field)
        sha.update(f"{name} {values.dtype} {values.shape} ".encode() + values.tobytes())
    return sha.hexdigest()[:16]


def digests_of_shares(batch: Mapping[str, Any], rows: int) -> dict[tuple[int, int], str]:
    """The digest of what each of some hosts has of a batch, by their number and its own."""
    shares = {}
    for hosts in {*HOSTS}:
        for host in range(hosts):
            mine = slice(host * rows // hosts, (host + 1) * rows // hosts)
            share = {name: field[mine] for name, field in batch.items()}
            shares[hosts, host] = digest(share)
    return shares
