"""The scheduler: simulated processes and their threads, exactly one of which runs at a time.

Each simulated thread is a thread of Python that waits at its gate. It hands over at every call to
the world (`point`) and wherever it would block (`wait`), to the thread whose virtual time comes
first. One random generator decides all times, so a seed decides every order.
"""

import collections
import contextlib
import heapq
import itertools
import random
import threading
from collections.abc import Callable
from typing import Any

NEVER = float("inf")
POINTS = 200_000  # of a history, after which it counts as endless


class Killed(BaseException):
    """Ends the threads of a process that was killed; no call of theirs reaches the world."""


class Wrong(Exception):
    """An invariant does not hold."""


class Process:
    """A simulated process.

    Attributes:
        alive: whether it was neither killed nor has ended.
        killed: whether it was killed.
        error: what ended it; None: it returned, or still runs.
        machine: processes of one machine see that another one is gone.
        state: values of module globals while other processes run.
        stalled: the virtual time until which it is stopped.
        calls: how many calls to the world it made, by kind; under "", all.
        kill_at: the kind and the number of the call at which it is killed.
        stall_at: the kind and the number of the call at which it is stopped for a minute.
    """

    def __init__(self, name: str, pid: int, machine: str):
        self.name, self.pid, self.machine = name, pid, machine
        self.alive, self.killed, self.stalled = True, False, 0.0
        self.error: BaseException | None = None
        self.state: dict[Any, Any] = {}
        self.calls: collections.Counter[str] = collections.Counter()
        self.kill_at: tuple[str, int] | None = None
        self.stall_at = "", 0
        self.pace = 1.0  # seconds of a call, relative to others


class Task:
    """A thread of a simulated process."""

    def __init__(self, process: Process, name: str, work: Callable[[], Any]):
        self.process, self.name, self.work = process, name, work
        self.wake, self.done, self.begun = 0.0, False, False
        self.ready: Callable[[], Any] | None = None
        self.gate = threading.Lock()
        self.gate.acquire()


class Scheduler:
    """Runs processes under one seed; `active` is the one of the history that happens now.

    Args:
        seed: decides all that is random.

    Attributes:
        now: virtual seconds since the beginning.
        current: the thread that runs; None: the caller of `run`.
        trace: each call to the world and each event: seconds, thread, what.
        swap: called with the process that ran and the one that runs next.
        on_kill: called with a process that dies.
    """

    active: "Scheduler | None" = None

    def __init__(self, seed: str):
        self.random = random.Random(seed)
        self.now = 0.0
        self.current: Task | None = None
        self.trace: list[tuple[float, str, str]] = []
        self.swap: Callable[[Process | None, Process | None], None] = lambda *_: None
        self.on_kill: list[Callable[[Process], None]] = []
        self.wrong: list[str] = []
        self.world = Process("world", 1, "world")  # operators and the network; never killed
        self.processes: list[Process] = []
        self._tasks: list[Task] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count(100)
        self._main = threading.Lock()
        self._main.acquire()
        self._last: Process | None = None

    # ---- processes and threads

    def spawn(self, name: str, work: Callable[[], Any], machine: str = "machine 0") -> Process:
        """Starts a process, which ends with `work`."""
        process = Process(name, next(self._numbers), machine)
        process.pace = self.random.choice([0.3, 1, 1, 3])
        self.processes.append(process)

        def main() -> None:
            try:
                work()
            except Killed:
                raise
            except BaseException as error:
                process.error = error
            self.note(f"ends{f' with {process.error!r:.160}' if process.error else ''}")
            self._bury(process)

        self.start(process, name, main)
        return process

    def start(self, process: Process, name: str, work: Callable[[], Any]) -> Task:
        """Starts a thread of a process."""
        task = Task(process, name, work)
        task.wake = self.now
        self._tasks.append(task)
        return task

    def kill(self, process: Process, why: str = "is killed") -> None:
        """Ends a process; if it runs, by raising `Killed`."""
        if process.alive:
            self.note(why, process.name)
            process.killed = True
            self._bury(process)
        if self.current is not None and self.current.process is process:
            raise Killed

    def _bury(self, process: Process) -> None:
        process.alive = False
        for tell in self.on_kill:
            tell(process)

    def at(self, seconds: float, act: Callable[[], None]) -> None:
        """Calls a function after so many virtual seconds; it must not block."""
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), act))

    def run(self) -> None:
        """Lets all threads run to their ends.

        Raises:
            Wrong: an invariant did not hold, or a thread would wait forever.
        """
        self.hand_over()
        self._main.acquire()
        if self.wrong:
            raise Wrong(self.wrong[0])

    def _run(self, task: Task) -> None:
        """What a thread of Python does."""
        with contextlib.suppress(Killed):
            try:
                if task.process.alive:
                    task.work()
            except Killed:
                raise
            except BaseException as error:
                self.fail(f"a thread of {task.name} ended with {error!r}")
        task.done = True
        self._tasks.remove(task)
        self.hand_over()

    def fail(self, what: str) -> None:
        """Notes what is wrong, and ends all."""
        self.wrong.append(what)
        self.note(f"WRONG: {what}")
        self.world.alive = False
        for task in self._tasks:
            task.process.alive = False

    @property
    def me(self) -> Task:
        """The thread that runs."""
        assert self.current is not None
        return self.current

    # ---- handing over

    def note(self, what: str, name: str | None = None) -> None:
        """Adds a line to the trace."""
        if name is None:
            name = self.current.name if self.current else "world"
        self.trace.append((self.now, name, what))

    def wait(self, ready: Callable[[], Any] | None, seconds: float | None = None) -> bool:
        """Lets others run until `ready()`, or for so many seconds; returns whether it is ready."""
        me = self.me
        if not me.process.alive:
            raise Killed
        me.ready, me.wake = ready, NEVER if seconds is None else self.now + seconds
        following = self._choose()
        if following is not me:
            self._open(following)
            me.gate.acquire()
        if not me.process.alive:
            raise Killed
        return ready is None or bool(ready())

    def point(self, kind: str, about: str = "", seconds: float = 0.001) -> None:
        """A call to the world of the running thread: others may run first, or it is killed."""
        me = self.me
        process = me.process
        if not process.alive:
            raise Killed
        self.trace.append((self.now, me.name, f"{kind} {about}"))
        if len(self.trace) > POINTS:
            self.fail("the history does not end")
        process.calls[""] += 1
        process.calls[kind] += 1
        if (due := process.kill_at) is not None and process.calls[due[0]] >= due[1]:
            self.kill(process, f"is killed at {kind} {about}")
        if (kind, process.calls[kind]) == process.stall_at:
            process.stalled = self.now + 60
            self.note(f"stops until {process.stalled:.3f} s", process.name)
        self.wait(None, seconds * process.pace * (0.05 + self.random.expovariate(1)))

    def hand_over(self) -> None:
        """Lets the next thread run, and returns."""
        self._open(self._choose())

    def _open(self, task: Task | None) -> None:
        """Opens the gate of a thread; None: that of the caller of `run`."""
        process = task.process if task else None
        if process is not self._last:
            self.swap(self._last, process)
            self._last = process
        self.current = task
        if task is None:
            self._main.release()
        elif task.begun:
            task.gate.release()
        else:
            task.begun = True
            threading.Thread(target=self._run, args=[task], daemon=True).start()

    def _choose(self) -> Task | None:
        """The thread that runs next; time moves on to when it does."""
        while self._tasks:
            first, best, now = NEVER, list[Task](), self.now
            for task in self._tasks:
                process, ready = task.process, task.ready
                if not process.alive:
                    return task  # which ends
                at = now if ready is not None and ready() else task.wake
                if at < NEVER:
                    at = now if at < now else at
                    at = process.stalled if at < process.stalled else at
                if at < first:
                    first, best = at, [task]
                elif at == first:
                    best.append(task)
            if self._events and self._events[0][0] <= first:
                self.now, _, act = heapq.heappop(self._events)
                act()
                continue
            if first == NEVER:
                names = ", ".join(task.name for task in self._tasks)
                self.fail(f"{names} would wait forever")
                continue
            self.now = first
            return best[0] if len(best) == 1 else self.random.choice(best)
        return None


def describe(trace: list[tuple[float, str, str]]) -> str:
    """The story of a history, a line for each call."""
    return "\n".join(f"{seconds:9.3f} s  {name:<24} {what}" for seconds, name, what in trace)
