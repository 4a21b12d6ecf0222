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
import uuid
from collections.abc import Callable
from concurrent import futures
from typing import Any

from tests.simulation import threads
from tests.simulation.local_disk import Disk, File, is_folder
from tests.simulation.scheduler import Killed, Process, Scheduler
from tests.simulation.storage import Bucket, Storage, open_reader

# Globals of modules that each process has for itself.
STATE = {
    "pipeline.corpus.log": ["_failures"],
    "pipeline.fs.lease": ["_held"],
    "pipeline.fs.objects": ["guards"],
    "pipeline.fs.fork": ["_inherited"],
}
# Kinds of calls to files, by which Python tells of those that are not wrapped.
AUDITED = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.listdir"}
AUDITED |= {"os.scandir", "os.truncate", "shutil.rmtree", "shutil.copyfile"}


# What stands in for each call, and the call itself.
WRAPPED: dict[str, Any] = {}
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
    for module, names in STATE.items():
        for name in names:
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


class FileIO(io.FileIO):
    """A file; a write by a killed process goes nowhere, or is torn."""

    _owner: Process | None = None

    def __init__(self, file: Any, mode: str = "r", closefd: bool = True, opener: Any = None):
        if (world := _world(file)) is None:
            super().__init__(file, mode, closefd, opener)
            return
        new = not isinstance(file, int) and not os.path.lexists(file)
        if not isinstance(file, int):
            world.scheduler.point("create" if new else "open", world.disk.name(file))
            if "r" not in mode:
                world.disk.refuse_if_full(file)
            new = not os.path.lexists(file)
        really(super().__init__, file, mode, closefd, opener)
        if not isinstance(file, int):
            _register(world, super().fileno(), os.fspath(file), new)
            if "w" in mode:
                world.disk.write(super().fileno())
        self._owner = world.scheduler.me.process

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


def _register(world: World, number: int, path: str, new: bool) -> None:
    if new:
        world.disk.create(path)
    found = File(path) if is_folder(path) else world.disk.find(path)
    world.disk.descriptors[number] = found


def _forget(number: int) -> None:
    """Notes that a descriptor closes, which ends its lock."""
    if World.active is not None:
        file = World.active.disk.descriptors.pop(number, None)
        if file is not None and file.locked is not None and file.locked[0] == number:
            file.locked = None


def _open_file(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
    """What stands in for `open`."""
    if (world := _world(file)) is None:
        return really(REAL["open"], file, mode, *arguments, **options)
    if not {*mode} & {*"wax+"}:
        world.scheduler.point("read", world.disk.name(file))
        return really(REAL["open"], file, mode, *arguments, **options)
    raw = FileIO(file, mode.replace("b", "").replace("t", ""))
    content = io.BufferedWriter(raw)
    return content if "b" in mode else io.TextIOWrapper(content, options.get("encoding"))


def _os_open(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
    if (world := _world(path)) is None:
        return really(REAL["os.open"], path, flags, *arguments, **options)
    world.scheduler.point("open", world.disk.name(path))
    new = bool(flags & os.O_CREAT) and not os.path.lexists(path)
    if new:
        world.disk.refuse_if_full(path)
    number = really(REAL["os.open"], path, flags, *arguments, **options)
    _register(world, number, os.fspath(path), new)
    return number


def _close(number: int) -> None:
    _forget(number)
    REAL["os.close"](number)


def _wrap(name: str, kind: str, seconds: float = 0.001, *, writes: bool = False) -> Any:
    """Makes what stands in for a call whose first argument is a path, a file or a descriptor."""

    def decorate(act: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".", *arguments: Any, **options: Any) -> Any:
            if hasattr(path, "fileno"):
                path = path.fileno()
            if (world := _world(path)) is None:
                return really(REAL[name], path, *arguments, **options)
            new = f" to {os.path.basename(arguments[0])}" if kind in ("rename", "link") else ""
            world.scheduler.point(kind, world.disk.name(path) + new, seconds)
            if writes:
                world.disk.refuse_if_full(path)
            path = path if isinstance(path, int) else os.fspath(path)
            return act(world, path, *map(_as_text, arguments), **options)

        WRAPPED[name] = call
        return act

    return decorate


def _as_text(argument: Any) -> Any:
    return os.fspath(argument) if isinstance(argument, os.PathLike) else argument


@_wrap("os.fsync", "sync", 0.01, writes=True)
def _fsync(world: World, number: int) -> None:
    really(world.disk.sync, number)


@_wrap("fcntl.flock", "lock")
def _flock(world: World, number: int, how: int) -> None:
    mine = world.disk.descriptors[number]
    if how & fcntl.LOCK_UN:
        mine.locked = None
        return
    while mine.locked is not None and mine.locked[0] != number:
        if how & fcntl.LOCK_NB:
            raise BlockingIOError(errno.EAGAIN, "locked")
        world.scheduler.wait(lambda: mine.locked is None)
    mine.locked = number, world.scheduler.me.process


@_wrap("os.rename", "rename", writes=True)
@_wrap("os.replace", "rename", writes=True)
def _rename(world: World, path: str, new: str) -> None:
    really(world.disk.rename, path, new)
    really(REAL["os.replace"], path, new)


@_wrap("os.link", "link", writes=True)
def _link(world: World, path: str, new: str, **_: Any) -> None:
    really(REAL["os.link"], path, new)
    world.disk.link(path, new)


@_wrap("os.remove", "unlink")
@_wrap("os.unlink", "unlink")
def _unlink(world: World, path: str) -> None:
    if os.path.lexists(path) and not is_folder(path):
        really(world.disk.remove, path)
    really(REAL["os.unlink"], path)


@_wrap("os.mkdir", "mkdir", writes=True)
def _mkdir(world: World, path: str, *mode: int) -> None:
    really(REAL["os.mkdir"], path, *mode)
    world.disk.add_folder(path)


@_wrap("os.rmdir", "rmdir")
def _rmdir(world: World, path: str) -> None:
    really(REAL["os.rmdir"], path)
    world.disk.forget_folder(path)


@_wrap("os.stat", "stat", 0.0003)
def _stat(world: World, path: Any, **options: Any) -> Any:
    return REAL["os.stat"](path, **options)


@_wrap("os.listdir", "list")
def _listdir(world: World, path: str) -> list[str]:
    names = sorted(really(REAL["os.listdir"], path))
    world.random.shuffle(names)
    return names


class _Scan(list):
    """What `os.scandir` gives, in any order."""

    def __enter__(self) -> "_Scan":
        return self

    def __exit__(self, *_: object) -> None:
        pass


@_wrap("os.scandir", "list")
def _scandir(world: World, path: str) -> _Scan:
    with really(REAL["os.scandir"], path) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    world.random.shuffle(entries)
    return _Scan(entries)


@_wrap("os.posix_fallocate", "allocate", writes=True)
def _fallocate(world: World, number: int, offset: int, size: int) -> None:
    world.disk.write(number)
    REAL["os.posix_fallocate"](number, offset, size)


@_wrap("pyarrow.memory_map", "map")
def _map(world: World, path: str, *how: Any) -> Any:
    return REAL["pyarrow.memory_map"](path, *how)


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


class _Time:
    """What stands in for the module `time`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        return time.monotonic() if (world := _world()) is None else world.scheduler.now

    perf_counter = time = monotonic

    def clock_gettime(self, _: int) -> float:
        return self.monotonic()

    def sleep(self, seconds: float) -> None:
        if (world := _world()) is None:
            time.sleep(seconds)
        else:
            world.scheduler.wait(None, seconds)


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


WRAPPED |= {
    "builtins.open": _open_file,
    "io.open": _open_file,
    "io.FileIO": FileIO,
    "os.open": _os_open,
    "os.close": _close,
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
    for name in ("pipeline", "pipeline.corpus.preparation", "pipeline.loading.batches"):
        importlib.import_module(name)
    from pipeline.fs import lease, objects

    stand_ins = {"threading": (threading, threads.Module()), "time": (time, _Time())}
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
