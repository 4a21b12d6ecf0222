"""Fork: a forked child replaces the locks, threads and open files that it inherits.

A fork copies the memory of all threads, but only one of the threads. A lock that another thread
held stays locked in the child, work that another thread had begun is never finished, and the
position in an open file is shared with the parent. So objects that have such things make new ones.
"""

import functools
import os
import sys
import threading
import weakref
from typing import Any

_objects: "weakref.WeakSet[Handles]" = weakref.WeakSet()

# In a child, the handles of its parent. Deleting them would wait for threads that do not exist.
_inherited: list[dict[str, Any]] = []


def _restart_all() -> None:
    for thing in list(_objects):
        _inherited.append(dict(vars(thing)))
        thing.restart()
    if sys.version_info < (3, 12):
        _unlock_properties()


def _unlock_properties() -> None:
    """Gives cached properties new locks: in Python 3.11, all objects of a class share one."""
    package = __name__.partition(".")[0]
    modules = [module for name, module in sys.modules.items() if name.startswith(f"{package}.")]
    for member in [member for module in modules for member in vars(module).values()]:
        for value in vars(member).values() if isinstance(member, type) else ():
            if isinstance(value, functools.cached_property):
                value.lock = threading.RLock()  # type: ignore[attr-defined]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restart_all)


class Handles:
    """The base of objects with handles that a forked child or a pickled copy must make again.

    These are a lock, and the attributes that `handles` names.
    """

    handles: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.restart()
        _objects.add(self)

    def restart(self) -> None:
        """Makes new handles, and never touches the old ones."""
        for name in self.handles:
            self.__dict__.pop(name, None)
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        excluded = {*self.handles, "_lock"}
        return {name: value for name, value in self.__dict__.items() if name not in excluded}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        Handles.__init__(self)
