"""Files that are whole or absent, locks, object storage, and handles after a fork.

`as_path` turns a user's text into a path, local or of a bucket, and `atomic_write` writes a file
whole or not at all. `directory_lock` lets one process work in a directory while others wait; in a
bucket it is a lease (`fs.lease`). `fs.objects` reads and writes objects. Objects with locks,
threads or open files name the attributes that a forked child must make again (`fs.fork`). A cloud's
library is imported when a path needs it.
"""

from pipeline.fs.atomic import (
    as_path,
    atomic_write,
    directory_lock,
    is_local,
    name_full_disk,
    open_locked,
)
from pipeline.fs.objects import ObjectPath

__all__ = [
    "ObjectPath",
    "as_path",
    "atomic_write",
    "directory_lock",
    "is_local",
    "name_full_disk",
    "open_locked",
]
