"""Objects of object storage (`s3://`, `gs://`, `az://`): whole, and by ranges of their bytes.

A path names a bucket and a key, as `s3://mine/corpus/lengths.npy`. Reading and writing:

    get(path)                            the bytes of an object
    get_ranges(path, begins, ends)       ranges of its bytes; neighbours as one request
    download(path, file)                 an object into a local file
    put(path, content)                   writes an object, whole or not at all
    put(path, content, if_absent=True)   the same, unless there is one; says which it was

and `head`, `children`, `keys`, `copy` and `delete`. `ObjectPath` is a path that has the methods of
`etils.epath`, `Mirror` a local directory whose folders are kept there, and `hold_lease` a
lock.

Large objects are read and written in pieces, many at once. A request that fails for a reason that
may pass (a status of 5xx or 429, a connection that is cut or says nothing for 30 seconds) is made
again, 12 times within about a minute and a half; the log says so, every ten seconds at most. Other
errors are sentences:

    FileNotFoundError   there is no such object
    PermissionError     there are no credentials, or they do not suffice
    OSError             there is no such bucket, or the storage cannot be reached
    ImportError         the extra `cloud` is not installed

Credentials come from where each cloud's own programs look for them; see docs/scale.md.
"""

from pipeline.fs.lease import hold_lease
from pipeline.fs.mirror import WHOLE, Mirror
from pipeline.fs.object_path import ObjectPath, register
from pipeline.fs.requests import SCHEMES
from pipeline.fs.transfers import (
    Head,
    children,
    copy,
    delete,
    download,
    get,
    get_ranges,
    head,
    keys,
    put,
)

__all__ = [
    "SCHEMES",
    "WHOLE",
    "Head",
    "Mirror",
    "ObjectPath",
    "children",
    "copy",
    "delete",
    "download",
    "get",
    "get_ranges",
    "head",
    "hold_lease",
    "keys",
    "put",
    "register",
]
