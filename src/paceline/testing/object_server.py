"""An object store in memory that speaks S3, and a proxy before any store that delays answers and spoils them."""

import hashlib
import http.client
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from xml.sax.saxutils import escape

Fault = Literal["", "drop", "503", "403", "truncate", "stall", "short", "flip"]
_DATE = "Mon, 06 Jan 2025 00:00:00 GMT"


class _Server(ThreadingHTTPServer):
    """A web server of threads, whose clients may leave at any time."""

    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """Pass over clients that have left."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def log_message(self, format: str, *arguments: object) -> None:
        """Write no log."""

    def read_body(self) -> bytes:
        """Return the request's body."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "aws-chunked" not in self.headers.get("Content-Encoding", ""):
            return body
        parts, rest = [], body
        while rest:
            head, _, rest = rest.partition(b"\r\n")
            size = int(head.split(b";")[0], 16)
            parts.append(rest[:size])
            rest = rest[size + 2 :] if size else b""
        return b"".join(parts)

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        """Send an answer."""
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "Last-Modified": _DATE, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def _running(handler: type[_Handler], host: str) -> Iterator[_Server]:
    server = _Server((host, 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass
class ObjectServer:
    """Buckets in memory: the part of S3 that reads, lists, writes and removes objects. Nobody's rights are checked.

    Args:
        objects: Contents by ``bucket/key``.
        host: Address to listen on.
    """

    objects: dict[str, bytes] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = 0
    num_reads: int = 0
    """Number of answered reads."""
    read_bytes: int = 0
    """Bytes that they held."""

    @property
    def endpoint(self) -> str:
        """URL of the server."""
        return f"http://{self.host}:{self.port}"

    @contextmanager
    def running(self) -> Iterator["ObjectServer"]:
        """Serve inside."""
        uploads: dict[str, dict[int, bytes]] = {}
        lock = threading.Lock()
        store = self

        class Handler(_Handler):
            def split(self) -> tuple[str, dict[str, str]]:
                path, _, query = self.path.partition("?")
                fields = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
                return urllib.parse.unquote(path).strip("/"), fields

            def do_GET(self) -> None:
                name, query = self.split()
                if "list-type" in query:
                    self.answer(200, _list(store.objects, name, query.get("prefix", "")), Content_Type="text/xml")
                elif name not in store.objects:
                    self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
                else:
                    self.give(store.objects[name])

            do_HEAD = do_GET

            def give(self, content: bytes) -> None:
                etag = _etag(content)
                if self.headers.get("If-Match", etag) != etag:
                    self.answer(412)
                    return
                status, body, extra = _cut(content, self.headers.get("Range", ""))
                if self.command == "GET":
                    with lock:
                        store.num_reads += 1
                        store.read_bytes += len(body)
                self.answer(status, body, ETag=etag, Accept_Ranges="bytes", **extra)

            def do_PUT(self) -> None:
                name, query = self.split()
                body = self.read_body()
                if "uploadId" in query:
                    uploads[query["uploadId"]][int(query["partNumber"])] = body
                else:
                    store.objects[name] = body
                self.answer(200, ETag=_etag(body))

            def do_POST(self) -> None:
                name, query = self.split()
                body = self.read_body()
                if "delete" in query:
                    keys = re.findall("<Key>(.*?)</Key>", body.decode())
                    for key in keys:
                        store.objects.pop(f"{name}/{key}", None)
                    told = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
                    self.answer(200, f"<DeleteResult>{told}</DeleteResult>".encode(), Content_Type="text/xml")
                elif "uploads" in query:
                    number = str(len(uploads))
                    uploads[number] = {}
                    told = (
                        f"<InitiateMultipartUploadResult><UploadId>{number}</UploadId></InitiateMultipartUploadResult>"
                    )
                    self.answer(200, told.encode())
                else:
                    parts = uploads.pop(query["uploadId"])
                    store.objects[name] = b"".join(parts[number] for number in sorted(parts))
                    etag = escape(_etag(store.objects[name]))
                    told = f"<CompleteMultipartUploadResult><ETag>{etag}</ETag></CompleteMultipartUploadResult>"
                    self.answer(200, told.encode())

            def do_DELETE(self) -> None:
                store.objects.pop(self.split()[0], None)
                self.answer(204)

        with _running(Handler, self.host) as server:
            self.port = server.server_port
            yield self


def _cut(content: bytes, asked: str) -> tuple[int, bytes, dict[str, str]]:
    """Return status, body and headers of an answer with a range of an object, or all of it."""
    found = re.fullmatch(r"bytes=(\d+)-(\d*)", asked)
    if found is None:
        return 200, content, {}
    start, stop = int(found[1]), int(found[2] or len(content) - 1) + 1
    body = content[start:stop]
    if not body:
        return 416, b"", {}
    return 206, body, {"Content_Range": f"bytes {start}-{start + len(body) - 1}/{len(content)}"}


def _etag(content: bytes) -> str:
    return f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'


def _list(objects: dict[str, bytes], bucket: str, prefix: str) -> bytes:
    items = [
        f"<Contents><Key>{escape(name.removeprefix(f'{bucket}/'))}</Key><Size>{len(content)}</Size>"
        f"<LastModified>2025-01-06T00:00:00.000Z</LastModified><ETag>{escape(_etag(content))}</ETag></Contents>"
        for name, content in sorted(objects.items())
        if name.startswith(f"{bucket}/{prefix}")
    ]
    return f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(items)}</ListBucketResult>".encode()


@dataclass
class FaultProxy:
    """A proxy before a store, which delays each answer and spoils some.

    Args:
        endpoint: URL of the store.
        fault: Function (method, path) -> `Fault` that chooses what happens to a request; an empty one is none.
        delay_s: Time by which each answer is delayed.
        stall_s: Time for which a ``stall`` is silent in the middle of a body.
        host: Address to listen on.
    """

    endpoint: str
    fault: Callable[[str, str], Fault] = lambda method, path: ""
    delay_s: float = 0.0
    stall_s: float = 5.0
    host: str = "127.0.0.1"
    port: int = 0
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and range of each request that was passed on or spoilt."""

    @property
    def url(self) -> str:
        """URL of the proxy."""
        return f"http://{self.host}:{self.port}"

    @contextmanager
    def running(self) -> Iterator["FaultProxy"]:
        """Serve inside."""
        proxy = self
        target = urllib.parse.urlsplit(self.endpoint).netloc

        class Handler(_Handler):
            def setup(self) -> None:
                super().setup()
                self.upstream = http.client.HTTPConnection(target)

            def finish(self) -> None:
                super().finish()
                self.upstream.close()

            def pass_on(self) -> None:
                chosen = proxy.fault(self.command, self.path)
                proxy.requests.append((self.command, self.path, self.headers.get("Range", "")))
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if chosen == "drop":
                    self.close_connection = True
                    return
                time.sleep(proxy.delay_s)
                if chosen in ("503", "403"):
                    self.answer(int(chosen))
                    return
                self.relay(*self.ask(body), chosen)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = pass_on

            def ask(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
                headers = {name: value for name, value in self.headers.items() if name != "Connection"}
                self.upstream.request(self.command, self.path, body, headers)
                found = self.upstream.getresponse()
                return found.status, dict(found.getheaders()), found.read()

            def relay(self, status: int, headers: dict[str, str], body: bytes, chosen: Fault) -> None:
                if chosen == "flip" and body:
                    body = bytes([body[0] ^ 1]) + body[1:]
                if chosen == "short" and "Content-Range" in headers and len(body) > 1:
                    body = body[: len(body) // 2]
                    start, size = re.findall(r"\d+", headers["Content-Range"])[::2]
                    headers["Content-Range"] = f"bytes {start}-{int(start) + len(body) - 1}/{size}"
                length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(body))
                self.send_response_only(status)
                for name, value in headers.items():
                    if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                        self.send_header(name, value)
                self.send_header("Content-Length", length)
                self.end_headers()
                if self.command == "HEAD":
                    return
                if chosen in ("truncate", "stall"):
                    self.wfile.write(body[: len(body) // 2])
                    self.wfile.flush()
                    time.sleep(proxy.stall_s if chosen == "stall" else 0)
                    self.close_connection = True
                    return
                self.wfile.write(body)

        with _running(Handler, self.host) as server:
            self.port = server.server_port
            yield self
