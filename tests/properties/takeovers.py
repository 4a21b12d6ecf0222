"""Takeovers: processes take the lock of a directory in a bucket from holders that are disturbed.

Each notes from when to when it believed to hold the lock, by the clock of this machine: the first
and the last moment at which it was about to write and was not refused.
"""

import contextlib
import functools
import logging
import mmap
import os
import pathlib
import random
import signal
import tempfile
import time
import uuid

import numpy as np

from tests.fs import object_servers
from tests.processes import fork
from tests.properties.kills import serve_bucket

WORKERS = 4
BEAT, SILENCE = 0.25, 1.0  # seconds, in place of those of `pipeline.fs.lease`
TAKES = 10_000  # that one worker notes at most
STUCK = 60.0  # seconds without a new holder, after which the trial ends


class Notes:
    """What the workers note, in memory that they share.

    Attributes:
        spans: from when to when, of each take of each worker, in seconds.
        takes: how many takes each worker noted.
        taken_over: how many of them were from a holder that was gone or silent.
        late: how often a holder found another content than what it had just written.
    """

    def __init__(self):
        self.spans = self._shared(WORKERS, TAKES, 2)
        self.takes, self.taken_over, self.late = (self._shared(WORKERS) for _ in range(3))

    @staticmethod
    def _shared(*shape: int) -> np.ndarray:
        return np.frombuffer(mmap.mmap(-1, 8 * int(np.prod(shape)))).reshape(shape)

    def all_spans(self) -> np.ndarray:
        """Those of all workers, by their beginnings."""
        spans = [self.spans[worker, : int(n)] for worker, n in enumerate(self.takes)]
        together = np.concatenate(spans)
        return together[np.argsort(together[:, 0])]


def take_over(number: int, seed: int) -> str:
    """Lets workers take a lock from each other until so many takeovers are noted; says what it saw.

    A takeover is a take from a holder that had been killed or stopped, or could not renew in time.
    Two holders are told where a process took the lock while another believed to hold it, with the
    seconds by which that one believed it too long. A write came late that a holder found in place
    of its own: no write begins without the lock, so it was on its way when its process was killed
    or stopped. Last comes what workers said that ended by themselves.
    """
    notes, chance = Notes(), random.Random(seed)
    kills = stops = 0
    ended: list[str] = []
    with tempfile.TemporaryDirectory() as directory, serve_bucket(pathlib.Path(directory)):
        folder = pathlib.Path(directory)
        asleep: dict[int, float] = {}  # stopped workers, and when they go on
        pids: dict[int, int] = {}

        def start(worker: int) -> None:
            # Of those on one machine, the others see at once that they are gone.
            place = f"machine {worker}" if chance.random() < 0.5 else None
            task = functools.partial(work, worker, notes, chance.randrange(1 << 30), place)
            pids[worker] = fork(task, folder / f"{worker}.log")

        def end(worker: int) -> None:
            os.kill(pids[worker], signal.SIGKILL)
            os.waitpid(pids.pop(worker), 0)
            asleep.pop(worker, None)

        try:
            for worker in range(WORKERS):
                start(worker)
            while notes.taken_over.sum() < number and not ended:
                takes, patience = notes.takes.sum(), time.monotonic() + STUCK
                while notes.takes.sum() == takes and not ended:
                    time.sleep(0.01)
                    for worker in [each for each, at in asleep.items() if time.monotonic() > at]:
                        os.kill(pids[worker], signal.SIGCONT)
                        del asleep[worker]
                    for worker, pid in [*pids.items()]:
                        if os.waitpid(pid, os.WNOHANG)[0]:
                            del pids[worker]
                            ended.append((folder / f"{worker}.log").read_text()[-3000:])
                    if time.monotonic() > patience:
                        ended.append(f"nobody took the lock for {STUCK:g} s")
                time.sleep(chance.uniform(0, 0.4))
                last = [notes.spans[each, int(n) - 1, 0] for each, n in enumerate(notes.takes)]
                holder = int(np.argmax(last))
                worker = holder if chance.random() < 0.8 else chance.randrange(WORKERS)
                if chance.random() < 0.5:
                    end(worker)
                    start(worker)
                    kills += 1
                elif worker not in asleep:
                    os.kill(pids[worker], signal.SIGSTOP)
                    asleep[worker] = time.monotonic() + chance.uniform(0.5, 3) * SILENCE
                    stops += 1
        finally:
            for worker in [*pids]:
                end(worker)
    spans = notes.all_spans()
    gaps = spans[1:, 0] - np.maximum.accumulate(spans[:, 1])[:-1]
    together = [f"two for {-gap:.3f} s" for gap in gaps.tolist() if gap < 0]
    said = (
        f"{notes.taken_over.sum():,.0f} takeovers among {len(spans):,} takes; {kills:,} kills and "
        f"{stops:,} stops; {len(together)} moments with two holders; "
        f"{notes.late.sum():.0f} writes that came late; "
        f"at least {1000 * gaps.min(initial=np.inf):.1f} ms from one holder to the next"
    )
    return "\n".join([said, *together, *ended])


def work(worker: int, notes: Notes, seed: int, place: str | None) -> None:
    """Takes the lock again and again, and writes while it has it."""
    from pipeline.errors import InvalidState
    from pipeline.fs import as_path, directory_lock, lease, objects

    lease.BEAT, lease.SILENCE = BEAT, SILENCE
    if place:
        lease._place = lambda: place
    chance, require = random.Random(seed), lease._Lease.require
    seen: set[lease._Lease] = set()

    def note(held: lease._Lease) -> None:
        now = time.monotonic()
        require(held)
        if held in seen:
            notes.spans[worker, int(notes.takes[worker]) - 1, 1] = now
        else:
            seen.add(held)
            notes.spans[worker, int(notes.takes[worker])] = now
            notes.takes[worker] += 1

    class Count(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            notes.taken_over[worker] += "is gone or silent" in record.msg

    lease._Lease.require = note  # type: ignore[method-assign]
    logging.getLogger(lease.__name__).addHandler(Count())
    directory = as_path(f"s3://{object_servers.BUCKET}/locked")
    file, mine = directory / "file", uuid.uuid4().hex.encode()
    while True:
        with contextlib.suppress(InvalidState), directory_lock(directory, "working"):
            end = time.monotonic() + chance.uniform(0, 2)
            while time.monotonic() < end:
                objects.put(file, mine)
                if objects.get(file) != mine:
                    objects.put(file, mine)  # which is refused if the lock was lost meanwhile
                    notes.late[worker] += 1
                time.sleep(0.005)
