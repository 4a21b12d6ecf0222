"""The seam: the calls by which the project reaches the world, wrapped.

`install` wraps them before `pipeline` is imported. Outside of a simulation they are what they were.
"""

import builtins
import contextlib
import errno
import fcntl
import functools
import gc
import importlib
import io
import logging
import os
import random
import shutil
import sys
import tempfile
import threading
import time
import types
import uuid
from collections.abc import Callable
from concurrent import futures
from typing import Any

from tests.simulation import threads
from tests.simulation.local_disk import Disk
from tests.simulation.scheduler import Killed, Process, Scheduler
from tests.simulation.storage import Bucket, Storage, open_reader

# Globals of modules that each process has for itself.
STATE = [
    ("pipeline.fs.lease", "_held"),
    ("pipeline.fs.objects", "guards"),
]
# Kinds of calls to files, by which Python tells of those that are not wrapped.
AUDITED = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.listdir"}
AUDITED |= {"os.scandir", "os.truncate", "shutil.rmtree", "shutil.copyfile"}


# The calls that others stand in for, by name.
REAL: dict[str, Any] = {"open": open}


class World:
    """A scheduler, a disk and a storage, in which one history happens."""

    active: "World | None" = None

    def __init__(self, seed: str):
        self.scheduler = Scheduler(seed)
        self.random = self.scheduler.random
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.folder = tempfile.mkdtemp(prefix="simulation-", dir=memory)
        os.mkdir(f"{self.folder}/w")
        self.disk = Disk(f"{self.folder}/w", self.random)
        self.storage = Storage(self.scheduler)
        self.scheduler.swap, self.scheduler.on_kill = _swap, [self._unlock]

    def __enter__(self) -> "World":
        World.active, Scheduler.active = self, self.scheduler
        random.seed(0)
        gc.disable()
        gc.freeze()  # all that there is, so that collecting what a history leaves takes no time
        return self

    def __exit__(self, *_: object) -> None:
        World.active = Scheduler.active = None
        gc.enable()
        gc.collect()
        for number in self.disk.descriptors:  # of processes that were killed before they had a file
            with contextlib.suppress(OSError):
                REAL["os.close"](number)
        shutil.rmtree(self.folder)

    def _unlock(self, process: Process) -> None:
        for file in self.disk.descriptors.values():
            if file.locked and file.locked[1] is process:
                file.locked = None


def _swap(before: Process | None, after: Process | None) -> None:
    """Gives the globals of modules the values that they have in another process."""
    for module, name in STATE:
        there = vars(sys.modules[module])
        if before is not None:
            before.state[module, name] = there[name]
        new: Any = type(there[name])()
        there[name] = new if after is None else after.state.get((module, name), new)


def _world(path: Any = None) -> World | None:
    """The world, if a simulated thread runs, and if it has the path, if one is given."""
    world = World.active
    if world is None or world.scheduler.current is None or _inside[0]:
        return None
    return world if path is None or world.disk.has(path) else None


_inside = [0]


def really(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Calls what is wrapped."""
    _inside[0] += 1
    try:
        return call(*arguments, **options)
    finally:
        _inside[0] -= 1


def _audit(event: str, arguments: tuple) -> None:
    if event in AUDITED and not _inside[0] and (world := _world()) is not None:
        for path in arguments[:2]:
            if isinstance(path, str | os.PathLike) and world.disk.has(path):
                world.scheduler.fail(f"{event} of {path} is not wrapped")


# ---- files


MODES = {"w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, "r+": os.O_RDWR | os.O_CLOEXEC}


class FileIO(io.FileIO):
    """A file; a write by a killed process goes nowhere, or is torn."""

    _owner: Process | None = None

    def __init__(self, file: Any, mode: str = "r", closefd: bool = True, opener: Any = None):
        if (world := _world(file)) is not None:
            self._owner = world.scheduler.me.process
            if not isinstance(file, int):
                file = os.open(file, MODES[mode.replace("b", "")], 0o666)
        super().__init__(file, mode, closefd, opener)

    def write(self, data: Any) -> int:
        if self._owner is None:
            return super().write(data)
        world, content = _world(), bytes(data)
        if world is None or not self._owner.alive:
            raise Killed
        number = super().fileno()
        try:
            world.scheduler.point("write", world.disk.name(number))
        except Killed:
            world.disk.write(number)
            super().write(content[: world.random.randint(0, len(content))])
            raise
        world.disk.refuse_if_full(None)
        world.disk.write(number)
        return super().write(content)

    def truncate(self, size: int | None = None) -> int:
        if self._owner is not None and (world := _world()) is not None:
            world.scheduler.point("truncate", world.disk.name(super().fileno()))
            world.disk.write(super().fileno())
        return super().truncate(size)

    def close(self) -> None:
        if self._owner is not None and not self.closed:
            _forget(super().fileno())
        super().close()


def _forget(number: int) -> None:
    """Notes that a descriptor closes, which ends its lock."""
    if World.active is not None:
        file = World.active.disk.descriptors.pop(number, None)
        if file is not None and file.locked is not None and file.locked[0] == number:
            file.locked = None


def _open_file(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
    """What stands in for `open`."""
    file = file if isinstance(file, int) else os.fspath(file)
    if (world := _world(file)) is None:
        return really(REAL["open"], file, mode, *arguments, **options)
    if not {*mode} & {*"wax+"}:
        world.scheduler.point("read", world.disk.name(file))
        return really(REAL["open"], file, mode, *arguments, **options)
    raw = FileIO(file, mode.replace("b", "").replace("t", ""))
    content = io.BufferedWriter(raw)
    return content if "b" in mode else io.TextIOWrapper(content, options.get("encoding"))


def _close(number: int) -> None:
    _forget(number)
    REAL["os.close"](number)


def _flock(file: Any, how: int) -> None:
    number = file if isinstance(file, int) else file.fileno()
    if (world := _world(number)) is None:
        REAL["fcntl.flock"](number, how)
        return
    world.scheduler.point("lock", world.disk.name(number))
    mine = world.disk.descriptors[number]
    while mine.locked is not None and mine.locked[0] != number:
        if how & fcntl.LOCK_NB:
            raise BlockingIOError(errno.EAGAIN, "locked")
        world.scheduler.wait(lambda: mine.locked is None)
    if how & fcntl.LOCK_EX:  # others may share it, and exclude nobody
        mine.locked = number, world.scheduler.me.process


def _wrap(name: str, kind: str, act: Any = None, seconds: float = 0.001) -> Callable[..., Any]:
    """What stands in for a call whose first argument is a path, a file or a descriptor.

    `act` does it on a `Disk`; None: the call itself does.
    """

    def call(path: Any = ".", *arguments: Any, **options: Any) -> Any:
        if hasattr(path, "fileno"):
            path = path.fileno()
        elif not isinstance(path, int):
            path = os.fspath(path)
        if (world := _world(path)) is None:
            return really(REAL[name], path, *arguments, **options)
        some = [each if isinstance(each, int) else os.fspath(each) for each in (path, *arguments)]
        new = f" to {os.path.basename(some[1])}" if kind in ("rename", "link") else ""
        world.scheduler.point(kind, world.disk.name(path) + new, seconds)
        if act is None:
            return really(REAL[name], *some, **options)
        return really(act, world.disk, *some, **options)

    return call


# ---- processes, time and chance


def _getpid() -> int:
    return REAL["os.getpid"]() if (world := _world()) is None else world.scheduler.me.process.pid


def _kill(pid: int, signal: int) -> None:
    if (world := _world()) is None:
        REAL["os.kill"](pid, signal)
    elif not any(each.pid == pid and each.alive for each in world.scheduler.processes):
        raise ProcessLookupError


def _uuid4() -> uuid.UUID:
    if (world := _world()) is None:
        return REAL["uuid.uuid4"]()
    return uuid.UUID(int=world.random.getrandbits(128))


def _place() -> str:
    world = _world()
    assert world is not None
    return world.scheduler.me.process.machine


def _open_bucket(path: Any) -> tuple[Bucket, str]:
    from pipeline.fs import objects

    world = _world()
    assert world is not None
    bucket, key = objects.split(path)
    return Bucket(world.storage, bucket), key


def _now(*_: int) -> float:
    return time.monotonic() if (world := _world()) is None else world.scheduler.now


def _sleep(seconds: float) -> None:
    if (world := _world()) is None:
        time.sleep(seconds)
    else:
        world.scheduler.wait(None, seconds)


# In place of the module `time`.
TIME = types.SimpleNamespace(**vars(time))
TIME.monotonic = TIME.perf_counter = TIME.time = TIME.clock_gettime = _now
TIME.sleep = _sleep


class _CachedProperty:
    """`functools.cached_property` without a lock, as Python has it from 3.12 on."""

    def __init__(self, make: Callable[[Any], Any]):
        self.func, self.__doc__ = make, make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, thing: Any, owner: type | None = None) -> Any:
        if thing is None:
            return self
        if self.name not in vars(thing):
            vars(thing)[self.name] = self.func(thing)
        return vars(thing)[self.name]


# What stands in for each call.
WRAPPED: dict[str, Any] = {
    "builtins.open": _open_file,
    "io.open": _open_file,
    "io.FileIO": FileIO,
    "os.close": _close,
    "fcntl.flock": _flock,
    "os.open": _wrap("os.open", "open", Disk.open),
    "os.fsync": _wrap("os.fsync", "sync", Disk.sync, 0.01),
    "os.replace": _wrap("os.replace", "rename", Disk.rename),
    "os.link": _wrap("os.link", "link", Disk.link),
    "os.remove": _wrap("os.remove", "unlink", Disk.remove),
    "os.unlink": _wrap("os.unlink", "unlink", Disk.remove),
    "os.mkdir": _wrap("os.mkdir", "mkdir", Disk.add_folder),
    "os.rmdir": _wrap("os.rmdir", "rmdir", Disk.remove_folder),
    "os.listdir": _wrap("os.listdir", "list", Disk.names),
    "os.scandir": _wrap("os.scandir", "list", Disk.scan),
    "os.stat": _wrap("os.stat", "stat", seconds=0.0003),
    "pyarrow.memory_map": _wrap("pyarrow.memory_map", "map"),
    "os.getpid": _getpid,
    "os.kill": _kill,
    "uuid.uuid4": _uuid4,
    "functools.cached_property": _CachedProperty,
}


def install() -> None:
    """Wraps the calls, and imports the project, whose threads, locks and clocks are then others."""
    assert "pipeline" not in sys.modules, "pipeline is imported already"
    import grain  # noqa: F401  # with JAX, before its calls are others
    import obstore
    import pyarrow

    modules = {"builtins": builtins, "io": io, "os": os, "fcntl": fcntl, "uuid": uuid}
    modules |= {"pyarrow": pyarrow, "functools": functools}
    for name, stand_in in WRAPPED.items():
        module, _, short = name.partition(".")
        if hasattr(modules[module], short):
            REAL[name] = getattr(modules[module], short)
            setattr(modules[module], short, stand_in)
    for name in ("pipeline", "pipeline.corpus.preparing.preparation", "pipeline.loading.batches"):
        importlib.import_module(name)
    from pipeline.fs import lease, objects

    stand_ins = {"threading": (threading, threads.MODULE), "time": (time, TIME)}
    classes = {"Future": threads.Future, "ThreadPoolExecutor": threads.Pool}
    stand_ins |= {name: (getattr(futures, name), each) for name, each in classes.items()}
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] == "pipeline":
            for short, (real, stand_in) in stand_ins.items():
                if vars(module).get(short) is real:
                    setattr(module, short, stand_in)
    objects._open, lease._place = _open_bucket, _place
    obstore.open_reader = open_reader
    logging.disable(logging.CRITICAL)
    sys.addaudithook(_audit)
