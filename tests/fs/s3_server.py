"""localbucket as object stores are: a request sees one version of an object, and `If-Match` counts.

    python tests/fs/s3_server.py PORT FOLDER

localbucket itself reads an object and its entity tag in two steps, so that an answer may have the
tag of another version, and it overwrites whatever `If-Match` names.
"""

import http.server
import io
import pathlib
import sys
import threading
from http import HTTPStatus

import localbucket

one_at_a_time = threading.Lock()


class Handler(localbucket.S3Handler):
    disable_nagle_algorithm = True

    def _dispatch(self, action):
        # A client that is stopped while it sends or reads keeps no other one waiting.
        body, connection = self._read_body(), self.wfile
        self._read_body, self.wfile = lambda: body, io.BytesIO()
        with one_at_a_time:
            super()._dispatch(action)
        answer, self.wfile = self.wfile, connection
        connection.write(answer.getvalue())
        del self._read_body

    def _write_object(self, bucket, key, write):
        if due := self.headers.get("If-Match"):
            target = self._object_path(bucket, key)
            if not target.is_file():
                raise localbucket.S3Error(HTTPStatus.NOT_FOUND, "NoSuchKey", "There is none.")
            if due.strip('"') != localbucket.object_etag(target):
                raise self._precondition_failed_error()
        return super()._write_object(bucket, key, write)

    def log_message(self, *_):
        """Says nothing."""


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 64

    def handle_error(self, request, client_address):
        """Says nothing: clients are killed."""


if __name__ == "__main__":
    Handler.data_root = pathlib.Path(sys.argv[2]).resolve()
    Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
