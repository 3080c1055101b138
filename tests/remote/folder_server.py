"""S3's reading side over a folder on disk, so that checkpoints of gigabytes cost a test nothing: files may be sparse.

It knows listing and reading by ranges, all that s3fs asks when it reads; moto's server is the judge of everything else.
"""

from __future__ import annotations

import contextlib
import os
import re
import socketserver
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.remote.s3_server import S3Server

__all__ = ["serving_folder"]

_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
_PIECE_BYTES = 1 << 20


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 120
    root: Path

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class's name
        pass

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        if key:
            self._send_object(self.root / bucket / key)
        else:
            self._list(bucket, {name: values[0] for name, values in parse_qs(url.query).items()})

    do_HEAD = do_GET

    def _send_object(self, path: Path) -> None:
        if not path.is_file():
            self._send(404, b"<Error><Code>NoSuchKey</Code><Message>no</Message></Error>")
            return
        size = path.stat().st_size
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start, stop = (int(span[1]), min(int(span[2] or size) + 1, size)) if span else (0, size)
        self.send_response(206 if span else 200)
        if span:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.send_header("Content-Length", str(stop - start))
        self.send_header("ETag", '"0"')
        self.send_header("Last-Modified", "Mon, 05 Jan 2026 10:00:00 GMT")
        self.end_headers()
        if self.command == "HEAD":
            return
        with path.open("rb") as file:
            file.seek(start)
            while start < stop:
                piece = file.read(min(_PIECE_BYTES, stop - start))
                self.wfile.write(piece)
                start += len(piece)

    def _list(self, bucket: str, query: dict[str, str]) -> None:
        prefix, top = query.get("prefix", ""), self.root / bucket
        by_folder = query.get("delimiter") == "/"
        items, folders = [], set()
        for path in sorted(top.rglob("*")):
            key = path.relative_to(top).as_posix()
            if not path.is_file() or not key.startswith(prefix):
                continue
            if by_folder and "/" in key[len(prefix) :]:
                folders.add(prefix + key[len(prefix) :].partition("/")[0] + "/")
                continue
            items.append(
                f"<Contents><Key>{escape(quote(key))}</Key><LastModified>2026-01-05T10:00:00.000Z</LastModified>"
                f"<ETag>0</ETag><Size>{path.stat().st_size}</Size></Contents>"
            )
        items += [
            f"<CommonPrefixes><Prefix>{escape(quote(name))}</Prefix></CommonPrefixes>" for name in sorted(folders)
        ]
        head = f'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="{_NAMESPACE}"><Name>{bucket}</Name>'
        tail = "<IsTruncated>false</IsTruncated><EncodingType>url</EncodingType></ListBucketResult>"
        self._send(200, f"{head}{''.join(items)}{tail}".encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients may hang up."""


@contextlib.contextmanager
def serving_folder(root: Path) -> Iterator[S3Server]:
    """Serve a folder, whose sub-folders are buckets."""
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"root": Path(os.path.realpath(root))}))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="folder server", daemon=True)
    thread.start()
    try:
        host, port = server.server_address[:2]
        yield S3Server(str(host), int(port))
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)
