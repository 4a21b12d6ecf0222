"""One history: what happens in a world under one seed, and what must hold then."""

import functools
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from tests.simulation.account import Account
from tests.simulation.scheduler import Killed, Process, Wrong
from tests.simulation.seam import World, really

KINDS = "", "", "", "rename", "unlink", "link", "sync", "open", "write", "lock", "mkdir"
KINDS_OF_BUCKETS = "", "", "", "put", "put", "delete", "list", "get", "lock"
STALLS = "lock", "read", "get", "list"  # calls at which it is harmless to be late
LIVES = 6  # of an actor that is killed, at most
LIMIT = 20_000.0  # virtual seconds until all must have ended


class History:
    """A world with actors that are killed and start again.

    Attributes:
        account: what they saw.
        in_bucket: whether all is in a bucket, where kills hit requests.
        hold: seconds for which a lock is held.
    """

    def __init__(self, world: World):
        self.world, self.random = world, world.random
        self.scheduler, self.disk = world.scheduler, world.disk
        self.account = Account(world.scheduler)
        self._running: list[Process] = []
        self._left = 0
        self.in_bucket, self.scenario, self.hold = False, "", 0.0

    def operate(self, name: str, work: Callable[[], Any]) -> None:
        """Lets a thread of the world do something, such as starting processes."""

        def count() -> None:
            try:
                work()
            finally:
                self._left -= 1

        self._left += 1
        self.scheduler.start(self.scheduler.world, name, count)

    def keep(self, name: str, work: Callable[[], Any], *, machine: str = "machine 0") -> None:
        """Starts a process, and another one whenever it was killed, until one does its work."""
        self.keep_group(name, lambda life: [work], machine=machine)

    def keep_group(
        self,
        name: str,
        begin: Callable[[int], list[Callable[[], Any]]],
        *,
        machine: str = "machine 0",
        kinds: Sequence[str] = KINDS,
    ) -> None:
        """Starts processes that end together, as those of the hosts of a run; see `keep`."""
        lives = self.random.choice([0, 1, 1, 2, 3, LIVES])

        def operate() -> None:
            life = 0
            while True:
                works = begin(life)
                names = [f"{name}.{life}" + f":{n}" * (len(works) > 1) for n in range(len(works))]
                processes = [
                    self.scheduler.spawn(each, self._guarded(each, one), machine)
                    for each, one in zip(names, works, strict=True)
                ]
                self._running += processes
                if self.random.random() < 0.3:
                    number = int(100 ** self.random.random())
                    self.random.choice(processes).stall_at = self.random.choice(STALLS), number
                if life < lives:
                    self.random.choice(processes).kill_at = self._draw_kill(kinds)
                self.scheduler.wait(functools.partial(self._over, processes))
                killed = [each for each in processes if self._failed(each)]
                for each in processes:
                    if each.alive:
                        self.scheduler.kill(each, "is killed with its group")
                    self._running.remove(each)
                if not killed:
                    return
                self.account.counts["kills"] += 1
                life += 1
                self.scheduler.wait(None, self.random.expovariate(20))

        self.operate(f"operator of {name}", operate)

    def _over(self, processes: list[Process]) -> bool:
        """Whether all have ended, or one has in another way than by doing its work."""
        ended = [each for each in processes if not each.alive]
        return len(ended) == len(processes) or any(map(self._failed, ended))

    def _failed(self, process: Process) -> bool:
        return not process.alive and (process.error is not None or process.killed)

    def _guarded(self, name: str, work: Callable[[], Any]) -> Callable[[], Any]:
        """Work whose errors are wrong, but for those of a fault of this moment."""

        def guarded() -> None:
            try:
                work()
            except (Killed, Wrong):
                raise
            except BaseException as error:
                if not self.scheduler.me.process.alive:
                    raise Killed from None  # which a loop told in its own words
                fault = "connection reset by the simulation" in f"{error}"
                fault |= self.disk.was_full and "make room" in f"{error}"
                fault |= self.in_bucket and "lost the lock" in f"{error}"
                if fault:
                    raise
                self._fail(name, error)

        return guarded

    def _fail(self, name: str, error: BaseException) -> None:
        said = "".join(traceback.format_exception(error)[-12:])
        self.scheduler.fail(f"{name} ended with {error!r:.300}\n{said}")
        raise Killed

    def _draw_kill(self, kinds: Sequence[str]) -> tuple[str, int]:
        saves = [each for each in kinds if each == "save"]
        kind = self.random.choice([*(KINDS_OF_BUCKETS if self.in_bucket else kinds), *saves])
        most = 600 if kind in ("", "stat", "read", "map", "get") else 8 if kind == "save" else 15
        return kind, int(most ** self.random.random())

    # ---- faults of the world

    def lose_power(self, seconds: float) -> None:
        """Kills all processes at some time, and loses what is not on the disk itself."""

        def operate() -> None:
            self.scheduler.wait(None, seconds)
            self.scheduler.note("POWER IS LOST")
            self.account.counts["power losses"] += 1
            for process in [*self._running]:
                self.scheduler.kill(process, "loses power")
            for line in really(self.disk.lose_power):
                self.scheduler.note(line)

        self.operate("power", operate)

    def fill_disk(self, begin: float, seconds: float) -> None:
        """Lets the disk be full for some time."""

        def operate() -> None:
            self.scheduler.wait(None, begin)
            self.disk.full = self.disk.was_full = True
            self.account.counts["full disks"] += 1
            self.scheduler.note("THE DISK IS FULL")
            self.scheduler.wait(None, seconds)
            self.disk.full = False
            self.scheduler.note("the disk has room again")

        self.operate("disk", operate)

    def stall(self, seconds: float) -> None:
        """Stops a process for some time, at some time."""

        def operate() -> None:
            self.scheduler.wait(None, self.random.expovariate(1 / seconds))
            if self._running:
                process = self.random.choice(self._running)
                process.stalled = self.scheduler.now + self.random.expovariate(1 / seconds)
                self.scheduler.note(f"stops until {process.stalled:.3f} s", process.name)

        self.operate("stall", operate)

    def run(self, checks: list[Callable[[], Any]]) -> None:
        """Lets it happen, and then checks.

        Raises:
            Wrong: something is not as it must be.
        """

        def check() -> None:
            self.scheduler.wait(lambda: self._left == 0, LIMIT)
            self.account.require(self._left == 0, "not all actors end")
            for number, each in enumerate(checks):
                done: list[Any] = []
                while not done:  # a check that met a fault of this moment is made again
                    work = self._guarded("check", lambda each=each, done=done: done.append(each()))
                    process = self.scheduler.spawn(f"check {number}", work)
                    self.scheduler.wait(lambda process=process: not process.alive)

        self.scheduler.start(self.scheduler.world, "check", check)
        self.scheduler.run()
