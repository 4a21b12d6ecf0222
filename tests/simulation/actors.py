"""Actors: the project's own code, in processes of a simulation."""

import contextlib
import functools
import itertools
import json
import os
import pathlib
import random
import re
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline import Batches, Bucket, Corpora, Corpus, Plan, Writer
from pipeline.corpus.engines import Processes
from pipeline.corpus.preparing.job import Job
from pipeline.corpus.preparing.preparation import prepare_job, prepare_share
from pipeline.corpus.stored.manifest import Manifest
from pipeline.corpus.tasks import ABOVE, CAUSAL, GROUPS, add_parents
from pipeline.errors import Exists, InvalidState, UserError
from pipeline.fs import as_path, atomic_write, directory_lock
from pipeline.fs.atomic import make_directory
from pipeline.text import ragged, source
from pipeline.text.features import Feature
from pipeline.text.tokenizers import Bytes
from tests.simulation.account import join
from tests.simulation.history import History
from tests.simulation.seam import really
from tests.simulation.threads import run_together

FIRST_ID = 1 << 20  # of the tokens of the second corpus; twice that, of the third
KINDS_OF_READERS = "", "save", "save", "save", "stat", "read", "map"

BUCKETS = [[Bucket(4, 32)], [Bucket(4, 32), Bucket(4, 64)], [Bucket(4, 16), Bucket(4, 48)]]
OPTIONS: list[dict[str, Any]] = [{}, {}, {"tiers": 2}, {"shuffle": False}, {"packing": "fill"}]
OPTIONS += [{"read_shares": 2}]
OPTIONS += [{"packing": "none"}, {"align": 4}]
# Groups of a prefix and continuations: for each node, how many nodes back its parent is.
TREES = [[0, 1], [0, 1, 2], [0, 1, 1, 3]]


class Stream:
    """A stream that one or more writers make a corpus of, one after another.

    Args:
        history: in which it happens.
        name: of the corpus, "a" or "b".
        place: its directory.
        groups: whether some examples continue others, and belong to one group with them.
    """

    def __init__(self, history: History, name: str, place: str, groups: bool = False):
        chance = self._random = history.random
        self._history, self.name, self.place = history, name, as_path(place)
        self.groups, self.account, number = groups, history.account, chance.randint(5, 36)
        trees = [chance.choice(TREES) if groups else [0] for _ in range(number)]
        self._above = [above for tree in trees for above in tree]  # how far back its parent is
        sizes = [chance.randint(1, 7 if groups else 30) for _ in self._above]
        ends = np.cumsum([0, *sizes]) + "abc".index(name) * FIRST_ID
        self.examples = [np.arange(*each) for each in itertools.pairwise(ends.tolist())]
        self._every = chance.choice([1, 2, 5, 9])
        self._pause = chance.choice([0, 0.01, 0.3])
        self.sealed = 0  # examples, in the end
        self._varies = chance.random() < 0.3  # whether the source ends elsewhere after a restart

    def write(self) -> None:
        """Writes the corpus, from its cursor on."""
        account, history = self.account, self._history
        due = account.acknowledged[self.name]
        with contextlib.suppress(Exists), self._open() as writer:
            begin = writer.cursor or 0
            if not history.in_bucket:
                due = account.acknowledged[self.name]
            elif writer.examples and writer.cursor is None:
                return  # it has lost the lock to one that has finished, and could seal nothing
            account.begin(self.name, due, begin, writer.examples)
            end = len(self.examples)
            if self._varies:
                end = self._random.randint(max(begin, end // 2, 1), end)
            while end < len(self.examples) and self._above[end]:
                end += 1
            for number in range(begin, end):
                features = {ABOVE: self._above[number]} if self.groups else {}
                writer.append(self.examples[number], **features)
                if self._random.random() < 1 / self._every:
                    writer.seal(cursor=number + 1)
                    account.seal(self.name, number + 1)
                history.scheduler.wait(None, self._pause * self._random.expovariate(1))
            writer.finish()
            account.seal(self.name, writer.examples)
        account.finished.add(self.name)

    def _open(self) -> Writer:
        of_groups: Any = {"task": GROUPS, "features": add_parents({})} if self.groups else {}
        return Writer(self.place, **of_groups)

    def start(self, writers: int = 1) -> None:
        """Starts writers that want to write at the same time, one after another."""
        self._foreign = Foreign(self._history, self.place / self._random.choice(["", "shards"]))
        for number in range(writers):
            self._history.keep(f"writer {number} of {self.name}", self.write)

    def check(self) -> None:
        """Refuses a corpus that is not the beginning of the stream, or has something beside it."""
        self._foreign.check()
        with contextlib.suppress(Exists):  # what a loss of power brought back goes
            self._open().close()
        self.sealed = Manifest.of(self.place).parts.total("examples")
        due = self.account.acknowledged[self.name]
        self.account.require(
            due <= self.sealed <= len(self.examples),
            f"{self.name}: {self.sealed} examples are sealed, and {due} were acknowledged",
        )
        whole = Corpus.open(self.place)
        whole.verify()
        same = [
            np.array_equal(np.sort(one), np.sort(other))
            for one, other in zip(positions_of(whole), self.due, strict=True)
        ]
        wrong: list[Any] = [number for number, each in enumerate(same) if not each]
        self.account.require(not wrong, f"{self.name}: examples {wrong} are other ones")
        wrong = [n for n in contents(self.place) if re.match(r"\.(?!notes)|shards/(?!\.?notes)", n)]
        self.account.require(not wrong, f"{self.name}: {wrong} are left")

    @property
    def due(self) -> list[np.ndarray]:
        """The positions that are learnt of each example or group that is sealed in the end."""
        found: list[np.ndarray] = []
        for number, above in enumerate(self._above[: self.sealed]):
            before = self.examples[number - above][-1:] if above else []
            tokens = np.append(before, self.examples[number]).astype(np.int64)
            found.append(join(tokens[:-1], tokens[1:]))
            if above:
                found[-2:] = [np.concatenate(found[-2:])]
        return found


def positions_of(corpus: Any) -> list[np.ndarray]:
    """The positions that are learnt of each example of a corpus."""
    (side,), number = corpus.sides.values(), len(corpus)
    fields = side.read(np.arange(number), np.zeros(number, int), side.lengths)
    positions = join(fields["inputs"], fields["targets"])
    return np.split(positions, np.cumsum(side.lengths))[:number]


class Foreign:
    """A file of somebody else in a directory of the project."""

    def __init__(self, history: History, place: Any):
        self._history, self._path = history, place / "notes"
        history.keep("somebody", self._write)

    def _write(self) -> None:
        make_directory(self._path.parent)
        with atomic_write(self._path) as file:
            file.write(b"mine")

    def check(self) -> None:
        """Refuses a file that is gone or another one."""
        there = self._path.exists() and self._path.read_bytes() == b"mine"
        self._history.account.require(there, f"{self._path.name} of somebody else is gone")


class Run:
    """A run on corpora, once they are finished, on hosts whose number changes; it restores states.

    It may hold examples out, and change its plan when it begins and when it goes on.

    Args:
        history: in which it happens.
        name: of the reader.
        streams: the corpora, one or two.
        whole: the directory of another corpus, for a mixture of several; None: none.
    """

    def __init__(
        self, history: History, name: str, streams: Sequence[Any], whole: str | None = None
    ):
        chance = self._random = history.random
        self._history, self.name, self._streams, self._whole = history, name, streams, whole
        self._account = history.account
        self._cache = f"{history.world.folder}/w/cache"
        self._limits: dict[str, int] = {}  # of bytes in it, by corpus
        mixed = len(streams) > 1 or whole is not None
        self._shapes = BUCKETS[: 2 if mixed else 3]
        groups = any(getattr(each, "groups", False) for each in streams)
        self._choices = [each for each in OPTIONS if not (groups and "fill" in each.values())]
        options = {"window": chance.choice([10, 20, 40]), **chance.choice(self._choices)}
        # The first step and the options of each stage of the plan.
        self._stages = [(0, options | {"buckets": chance.choice(self._shapes)})]
        self._hold_out = chance.choice([0, 0, 0.4])
        self._held_out: dict[str, list[np.ndarray]] = {}  # by corpus
        names = [*(each.name for each in streams), "c"]
        self._weights = {n: chance.choice([1, 2, 3]) for n in names} if mixed else None
        self._epochs = 1 if mixed else chance.choice([1, 1, 1, 3])
        self._save = chance.choice([1, 2, 5])
        self._pause = chance.choice([0, 0.01, 0.2])
        self._saved: dict[int, dict[int, Any]] = {}  # of this life: by host, states by step
        self._state: Any = None

    def begin(self, life: int) -> list[Callable[[], Any]]:
        """What the hosts of a life do, which go on from the last state that all have saved."""
        if self._saved:
            self._state = self._last or self._state
            self._account.counts["resumes"] += self._state is not None
        if self._random.random() < 0.4 and len(self._stages) < 4:
            self._change()
        hosts = self._random.choice([1, 1, 1, 2, 4])
        self._saved = {host: {} for host in range(hosts)}
        return [functools.partial(self.read, host, hosts) for host in range(hosts)]

    def _change(self) -> None:
        """Changes the plan some steps after the last state."""
        chance = self._random
        reached = self._state["step"] if self._state else 0
        step = max(reached, self._stages[-1][0]) + chance.randint(0, 6)
        step += step % 2  # not within a block of tiers
        changes = {"align": 1, "packing": "best_fit", **chance.choice(self._choices)}
        changes |= {"seed": chance.randint(0, 9), "buckets": chance.choice(self._shapes)}
        if self._weights is not None and chance.random() < 0.5:
            changes = {"weights": {n: chance.choice([1, 2, 3]) for n in self._weights}}
        self._stages.append((step, changes))
        self._account.forget(self.name, step)
        self._account.counts["changes of plans"] += 1

    @property
    def _last(self) -> Any:
        """The last state of this life that all hosts have saved; None: there is none."""
        common = set.intersection(*(set(each) for each in self._saved.values()))
        return self._saved[0][max(common)] if common else None

    def open(self) -> dict[str, Any]:
        """The corpora, once they are finished."""
        corpora: dict[str, Any] = {}
        for each in self._streams:
            corpora[each.name] = self._split(each.name, self._open_whole(each.name, each.place))
        if self._whole is not None:
            corpora["c"] = self._open_whole("c", self._whole)
        return corpora

    def _open_whole(self, name: str, place: Any) -> Corpus:
        """A corpus, once it is finished; in a bucket, through a small cache."""
        self._history.scheduler.wait(lambda: name in self._account.finished)
        if not self._history.in_bucket:
            return Corpus.open(place)
        objects = self._history.world.storage.objects.items()
        sizes = [len(each[0]) for (_, key), each in objects if key.startswith(f"{name}/part-")]
        self._limits[name] = limit = 2 * max(sizes) + 100
        return Corpus.open(place, cache=self._cache, cache_bytes=limit)

    def _split(self, name: str, corpus: Any) -> Any:
        """The corpus without the examples that are held out, which are always the same."""
        if not self._hold_out or len(corpus) < 3:  # of so few, none might be held out
            return corpus
        corpus, held_out = corpus.split(self._hold_out)
        found = positions_of(held_out)
        for one, other in zip(found, self._held_out.setdefault(name, found), strict=True):
            self._account.require(np.array_equal(one, other), f"{name}: other examples held out")
        return corpus

    def _plan(self, **hosts: int) -> Any:
        corpora = self.open()
        (corpus,) = corpora.values() if self._weights is None else [Corpora(corpora)]
        plan = Plan(corpus, weights=self._weights, **self._stages[0][1])
        for step, changes in self._stages[1:]:
            plan = plan.after(step, **changes)
        return Batches(corpus, plan, **hosts).repeat(self._epochs).with_plans()

    def read(self, host: int = 0, hosts: int = 1, *, live: bool = True) -> None:
        """Reads all batches from the state on."""
        batches = self._plan(process_index=host, process_count=hosts)
        step = 0 if not live or self._state is None else batches.origin.resume(self._state)
        while step < len(batches):
            planned, batch = batches[step]
            begun = [each for start, each in self._stages if start <= step]
            shapes = [each["buckets"] for each in begun if "buckets" in each][-1]
            what = f"{self.name}: step {step} has {planned.bucket}"
            self._account.require(planned.bucket in shapes, what)
            first = host * planned.bucket.rows // hosts
            step += 1
            state = json.loads(json.dumps(batches.origin.state(step)))
            self._account.see(self.name, step - 1, planned, first, batch, state)
            really(self._see_cache)
            if live and step % self._save == 0:
                self._history.scheduler.point("save", f"{step}")
                self._saved[host][step] = state
            if live:
                self._history.scheduler.wait(None, self._pause * self._random.expovariate(1))
        self._account.end(self.name, step)

    def _see_cache(self) -> None:
        """Refuses a cache that is larger than its limit."""
        if limit := sum(self._limits.values()):
            paths = [*pathlib.Path(self._cache).rglob("*part-*")]
            size = sum(os.lstat(path).st_size for path in paths if os.path.lexists(path))
            self._account.require(size <= limit, f"a cache has {size} > {limit} bytes")

    def start(self) -> None:
        """Starts it."""
        self._history.keep_group(self.name, self.begin, kinds=KINDS_OF_READERS)

    def check(self) -> None:
        """Compares with one who reads it all after the end."""
        self.read(live=False)
        due = [each for stream in self._streams for each in stream.due]
        held_out = [each for name in self._held_out for each in self._held_out[name]]
        limit = len(self._streams) * FIRST_ID
        cut = any(each.get("packing") == "fill" for _, each in self._stages)
        self._account.require_each_once(self.name, due, held_out, limit, cut=cut)


def shrink() -> None:
    """Makes parts small, in all processes."""
    ragged.TOKENS_PER_PART, source.LEAST, source.BLOCK = 60, 200, 30
    if not JOBS:
        prepare_references()


NUMBER = Feature("example", dtype=np.int32)


def streams(history: History, root: str) -> list[Callable[[], Any]]:
    """Writers of one corpus or two, runs on them, and who adds a feature; returns the checks."""
    chance = history.random
    names = chance.choice(["a", "a", "a", "ab"])
    groups = len(names) == 1 and chance.random() < 0.3
    every = [Stream(history, name, f"{root}/{name}", groups) for name in names]
    whole = None
    if len(names) > 1:
        whole = f"{root}/c"
        sizes = [[*range(2 * FIRST_ID + 40 * n, 2 * FIRST_ID + 40 * n + 9)] for n in range(5)]

        def make() -> None:
            Corpus.from_arrays(sizes, whole)
            history.account.finished.add("c")

        history.keep("whole", make)
    for each in every:
        each.start(chance.choice([1, 1, 2]))
    runs = [Run(history, f"run {n}", every, whole) for n in range(chance.choice([0, 1, 1, 2]))]
    for run in runs:
        run.start()
    first = every[0]

    def add() -> None:
        history.scheduler.wait(lambda: first.name in history.account.finished)
        corpus = Corpus.open(first.place)
        corpus.with_features({"number": range(len(corpus))}, features={"number": NUMBER})

    def check() -> None:
        add()
        corpus = Corpus.open(first.place, features=["number"])
        numbers = np.arange(len(corpus))
        found = corpus.read_examples(numbers, ["number"])["number"].ravel()
        history.account.require(np.array_equal(found, numbers), f"the feature is {found}")

    adds = chance.choice([0, 0, 1, 2])
    for number in range(adds):
        history.keep(f"add {number}", add)
    checks = [*(each.check for each in every), *(run.check for run in runs)]
    return [*checks, check] if adds else checks


class Documents:
    """Records in memory, of which some may fail: a source."""

    def __init__(self, number: int, failing: bool):
        chance = random.Random(number)
        sizes = [chance.randint(1, 60) for _ in range(10 + 8 * number)]
        self._texts: list[Any] = [chance.choice("abcdef") * size for size in sizes]
        if failing:
            self._texts[number] = None
        self._name, self.edits = f"documents {number} {failing}", 0

    @property
    def fingerprint(self) -> str:
        """Changes when the source is edited."""
        return f"{self._name}, edit {self.edits}"

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return {"text": self._texts[index]}


class Repeating:
    """An engine that runs items in any order, in two threads, and some of them twice."""

    def __init__(self, history: History):
        self._history = history

    def run(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Generator[Any]:
        chance = self._history.random
        waiting = [*items, *(item for item in items if chance.random() < 0.3)]
        chance.shuffle(waiting)
        done = list[Any]()

        def work() -> None:
            while waiting:
                done.append(function(waiting.pop()))

        run_together([work, work])
        yield from done


class Preparation:
    """A corpus that processes prepare together, some of them shares of it.

    A run reads it as it reads a `Stream`; its tokens come more than once.
    """

    name = "a"

    def __init__(self, history: History, place: str, edited: bool):
        chance = history.random
        self._history, self.place, self._edited = history, as_path(place), edited
        self._job = chance.choice(JOBS)
        self._source: Any = self._job.source
        self._source.edits = 0
        self._shares, self._ended = chance.choice([0, 1, 2, 3]), False

    @property
    def _engine(self) -> Any:
        """This process alone, or an engine that repeats items."""
        return Repeating(self._history) if self._history.random.random() < 0.4 else Processes(1)

    def prepare(self) -> None:
        """Prepares all of it."""
        with self._unless_edited():
            prepare_job(self._job, self.place, engine=self._engine, progress=False)
            self._ended = True
            self._history.account.finished.add(self.name)
            self._source.edits = int(self._edited)  # at the latest, while shares still run

    def share(self, number: int) -> None:
        """Prepares a share."""
        share = number, self._shares
        with self._unless_edited():
            prepare_share(self._job, self.place, share, engine=self._engine, progress=False)

    @contextlib.contextmanager
    def _unless_edited(self) -> Iterator[None]:
        try:
            yield
        except UserError:  # others may discard what this one has begun
            if not self._source.edits:
                raise

    def _edit(self) -> None:
        self._source.edits = 1

    def start(self) -> None:
        """Starts those who prepare, and edits the source meanwhile."""
        if self._edited:
            self._history.scheduler.at(self._history.random.expovariate(2), self._edit)
        for number in range(self._history.random.choice([1, 1, 2])):
            self._history.keep(f"prepare {number}", self.prepare)
        for number in range(self._shares):
            self._history.keep(f"share {number}", functools.partial(self.share, number))

    @property
    def due(self) -> list[np.ndarray]:
        """The positions of each example."""
        return positions_of(Corpus.open(self.place))

    def check(self) -> None:
        """Refuses files that differ from those of a preparation without any fault.

        If the source was edited before the corpus was finished, there is none.
        """
        self.prepare()  # what a loss of power brought back goes
        found, due = contents(self.place), REFERENCES[JOBS.index(self._job)]
        for name in {*found, *due} if self._ended else ():
            same = found.get(name) == due.get(name)
            self._history.account.require(same, f"{name} differs from the reference, or is left")


def contents(folder: Any) -> dict[str, bytes]:
    """The bytes of all files in a folder, but for locks."""
    found: dict[str, bytes] = {}
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            found |= {f"{path.name}/{name}": each for name, each in contents(path).items()}
        elif path.name != ".lock":
            found[path.name] = path.read_bytes()
    return found


JOBS: list[Job] = []
REFERENCES: list[dict[str, bytes]] = []


def prepare_references() -> None:
    """Prepares the corpora that others are compared with, before any simulation."""
    for number, failing in enumerate([False, True, False]):
        how: Any = {"on_error": "skip" if failing else "raise"}
        job = Job(Documents(number, failing), Bytes(), "text", None, None, CAUSAL, **how)
        with tempfile.TemporaryDirectory() as folder:
            prepare_job(job, f"{folder}/c", num_workers=0, progress=False)
            REFERENCES.append(contents(as_path(f"{folder}/c")))
        JOBS.append(job)


def preparations(history: History, root: str) -> list[Callable[[], Any]]:
    """A corpus that is prepared by several, and runs on it; returns the checks."""
    number = history.random.choice([0, 1])
    made = Preparation(history, f"{root}/a", not number and history.random.random() < 0.5)
    made.start()
    runs = [Run(history, f"run {n}", [made]) for n in range(number)]
    for run in runs:
        run.start()
    return [made.check, *(run.check for run in runs)]


class Holder:
    """Takes the lock of a directory again and again, and writes a file while it holds it."""

    def __init__(self, history: History, place: str):
        self._history, self._place = history, as_path(place)

    def work(self) -> None:
        """Holds the lock some times."""
        history, name = self._history, "the lock"
        for _ in range(3):
            with contextlib.suppress(InvalidState), directory_lock(self._place, "working"):
                token = f"{history.random.getrandbits(60):015x}"
                if not history.in_bucket:  # there, a stopped process may believe that it has it
                    history.account.enter(name)
                for _ in range(history.random.randint(1, 4)):
                    with atomic_write(self._place / "file") as file:
                        file.write(token.encode())
                    history.scheduler.wait(None, history.random.expovariate(1 / history.hold))
                if not history.in_bucket:
                    history.account.leave(name)

    def check(self) -> None:
        """Refuses a write of a holder that came after one of the next holder."""
        seen = list[bytes]()
        for token in self._history.world.storage.tokens.get("locked/file", []):
            late = token in seen and seen[-1] != token
            self._history.account.require(not late, "two hold a lock in a bucket")
            seen.append(token)


def locks(history: History, root: str) -> list[Callable[[], Any]]:
    """Processes that want one lock, on one machine or on several; returns the checks."""
    holder = Holder(history, f"{root}/locked")
    history.hold = history.random.choice([0.01, 10, 40]) if history.in_bucket else 0.02
    for number in range(history.random.choice([2, 3, 4])):
        machine = f"machine {history.random.choice([0, number])}"
        history.keep(f"holder {number}", holder.work, machine=machine)
    if history.in_bucket:
        for _ in range(history.random.choice([0, 1, 3])):
            history.stall(40.0)
    return [holder.check]


class File:
    """A file that several processes write, whole each time, while others read it.

    Args:
        history: in which it happens.
        place: its directory, in which a file of somebody else is, too.
        once: whether it is written once.
    """

    def __init__(self, history: History, place: str, once: bool):
        self._history, self._place, self._once = history, as_path(place), once
        self._path, self._last = self._place / "file", list[bytes]()

    def write(self) -> None:
        """Writes it."""
        history = self._history
        make_directory(self._place)
        token = f"{history.random.getrandbits(60):015x}".encode()
        content = (token + b" ") * history.random.choice([1, 10, 1000])
        for broken in [True, False] if self._once else [True, False, False]:
            with (
                contextlib.suppress(FileExistsError, ZeroDivisionError),
                atomic_write(self._path, once=self._once) as file,
            ):
                file.write(content)
                if broken:
                    file.write(b"half")
                    raise ZeroDivisionError
            if not broken and self._path.read_bytes() == content:
                self._last = [*self._last, content] if self._once else [content]
            history.scheduler.wait(None, 0.01)

    def read(self) -> None:
        """Reads it some times."""
        for _ in range(20):
            with contextlib.suppress(FileNotFoundError):
                self._require_whole(self._path.read_bytes())
            self._history.scheduler.wait(None, 0.01)

    def _require_whole(self, content: bytes) -> None:
        words = content.split()
        whole = len({*words}) == 1 and len(words) in (1, 10, 1000) and content[-1:] == b" "
        self._history.account.require(whole, f"a file is {content[:40]!r}, not whole")

    def check(self) -> None:
        """Refuses a file that is not whole, or another one than was acknowledged."""
        content = self._path.read_bytes()
        self._require_whole(content)
        if self._once:
            same = not self._last or {*self._last} == {content}
            self._history.account.require(same, "a file that is written once has changed")


def files(history: History, root: str) -> list[Callable[[], Any]]:
    """Processes that write one file; returns the checks."""
    one = File(history, f"{root}/files", history.random.random() < 0.3)
    foreign = Foreign(history, as_path(f"{root}/files"))
    for number in range(history.random.choice([2, 3])):
        history.keep(f"writer {number}", one.write)
    history.keep("reader", one.read)
    return [one.check, foreign.check]


SCENARIOS: dict[str, Callable[[History, str], list[Callable[[], Any]]]] = {
    "streams": streams,
    "preparations": preparations,
    "locks": locks,
    "files": files,
}
