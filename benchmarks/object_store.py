"""A server of objects for reading, S3-compatible, with the latency and bandwidth of a far one.

python -m benchmarks.object_store FOLDER PORT MILLISECONDS MEGABYTES_PER_SECOND

The folders in FOLDER are buckets. `/statistics` counts requests and bytes.
"""

import json
import pathlib
import socketserver
import sys
import urllib.parse
import wsgiref.simple_server
from collections.abc import Callable, Iterator
from xml.sax.saxutils import escape

from snailmail.latency import Fixed
from snailmail.s3 import LatencyMiddleware

CHUNK = 1 << 18


class Server(socketserver.ThreadingMixIn, wsgiref.simple_server.WSGIServer):
    """A thread for each request."""

    daemon_threads, request_queue_size = True, 128


class Silent(wsgiref.simple_server.WSGIRequestHandler):
    """Logs nothing."""

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def main(folder: str, port: int, milliseconds: float, megabytes: float) -> None:
    """Serves until it is killed."""
    root = pathlib.Path(folder)
    far = LatencyMiddleware(
        lambda environ, start: _answer(root, environ, start),
        latency=Fixed(milliseconds),
        bandwidth_mbs=megabytes or None,
        max_records=1,
    )

    def app(environ: dict, start: Callable) -> object:
        if environ["PATH_INFO"] != "/statistics":
            return far(environ, start)
        start("200 OK", [("Content-Type", "application/json")])
        return [json.dumps({"requests": far.n_requests, "bytes": far.bytes_down}).encode()]

    wsgiref.simple_server.make_server("127.0.0.1", port, app, Server, Silent).serve_forever()


def _answer(root: pathlib.Path, environ: dict, start: Callable) -> Iterator[bytes] | list[bytes]:
    path = root / environ["PATH_INFO"].strip("/")
    query = dict(urllib.parse.parse_qsl(environ["QUERY_STRING"]))
    if "list-type" in query:
        listing = _list(path, query.get("prefix", "")).encode()
        start(
            "200 OK", [("Content-Type", "application/xml"), ("Content-Length", str(len(listing)))]
        )
        return [listing]
    if not path.is_file():
        start("404 Not Found", [("Content-Length", "0")])
        return []
    size = path.stat().st_size
    begin, end, status = 0, size, "200 OK"
    if asked := environ.get("HTTP_RANGE"):
        first, last = asked.removeprefix("bytes=").split("-")
        begin, end, status = int(first), min(int(last) + 1, size), "206 Partial Content"
    headers = [
        ("Content-Length", str(end - begin)),
        ("Content-Type", "application/octet-stream"),
        ("Content-Range", f"bytes {begin}-{end - 1}/{size}"),
        ("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT"),
        ("ETag", f'"{size}"'),
    ]
    start(status, headers)
    return _read(path, begin, end) if environ["REQUEST_METHOD"] == "GET" else []


def _read(path: pathlib.Path, begin: int, end: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(begin)
        while begin < end:
            content = file.read(min(CHUNK, end - begin))
            begin += len(content)
            yield content


def _list(bucket: pathlib.Path, prefix: str) -> str:
    entries = "".join(
        f"<Contents><Key>{escape(str(path.relative_to(bucket)))}</Key><Size>{path.stat().st_size}"
        '</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>"0"</ETag></Contents>'
        for path in sorted((bucket / prefix).glob("*"))
        if path.is_file()
    )
    return (
        f"<ListBucketResult><Prefix>{escape(prefix)}</Prefix><IsTruncated>false</IsTruncated>"
        f"{entries}</ListBucketResult>"
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
