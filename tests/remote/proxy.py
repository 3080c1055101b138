"""A proxy in front of any HTTP server that counts what passes, and fails as networks and stores do.

Faults are given before the requests come: each has a condition and a number of times that it happens. The proxy listens
on the loopback device and never connects elsewhere. Addresses in answers are left alone: a server that names itself in
absolute URLs has to be told the proxy's address.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

__all__ = [
    "SLOW_DOWN", "Delay", "Drop", "Fault", "Flip", "NoRanges", "Proxy", "Request", "Reset", "Slow", "Status",
    "TooShort", "proxied", "reads",
]  # fmt: skip

_UPSTREAM_S = 60
_SETTLE_S = 2
_PIECE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Answer with this status instead of passing the request on."""

    code: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


SLOW_DOWN = Status(
    code=503,
    body=b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>SlowDown</Code>'
    b"<Message>Please reduce your request rate.</Message><RequestId>1</RequestId></Error>",
    headers={"Content-Type": "application/xml"},
)
"""What Amazon answers to too many requests."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Close the connection after so many bytes of the answer's body; the head has announced all of it."""

    after_bytes: int


@dataclass(frozen=True, slots=True)
class Reset:
    """Reset the connection instead of answering."""


@dataclass(frozen=True, slots=True)
class Delay:
    """Wait before the answer."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Slow:
    """Send the answer's body at this rate."""

    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Flip:
    """Flip a bit of one byte of the answer's body; the last byte where the body is shorter."""

    position: int


@dataclass(frozen=True, slots=True)
class TooShort:
    """Announce and send so many bytes less than there are, in good order."""

    by_bytes: int


@dataclass(frozen=True, slots=True)
class NoRanges:
    """Pass the request on without its range: the answer is 200 and the whole object, as servers may do."""


Fault = Status | Drop | Reset | Delay | Slow | Flip | TooShort | NoRanges


@dataclass(frozen=True, slots=True)
class Request:
    """One request that came, and what was answered.

    Attributes:
        method: The verb.
        target: Path and query, quoted.
        headers: By lower-case name.
        body_bytes: Size of the body that came with it.
        status: Of the answer; 0 for none.
        sent_bytes: How much of the answer's body was sent.
        began: By the monotonic clock, in seconds.
        fault: What was done to it.
    """

    method: str
    target: str
    headers: Mapping[str, str]
    body_bytes: int
    status: int
    sent_bytes: int
    began: float
    fault: Fault | None

    @property
    def span(self) -> tuple[int, int] | None:
        """The range that was asked for, half open; None for none, or one that is not closed."""
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        return (int(found[1]), int(found[2]) + 1) if found else None


def reads(request: Request) -> bool:
    """Tell whether a request reads an object: GET, and neither a listing nor a question about the bucket."""
    return request.method == "GET" and "list-type" not in request.target and request.target.count("/") > 1


@dataclass(slots=True)
class _Rule:
    fault: Fault
    when: Callable[[Request], bool]
    after: int
    times: float


class Proxy:
    """A running proxy.

    Args:
        host: Of the server behind it.
        port: Of the server behind it.
    """

    def __init__(self, host: str, port: int) -> None:
        self.upstream = (host, port)
        self._requests: list[Request] = []
        self._rules: list[_Rule] = []
        self._lock = threading.Lock()
        self._settled = threading.Condition(self._lock)
        self._num_open = 0
        self._server = _Server(self)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="proxy", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    @property
    def requests(self) -> list[Request]:
        """All that came since the last ``clear``, in the order in which they were answered.

        A client may have an answer before the proxy has counted it, so this waits, but never long.
        """
        with self._settled:
            self._settled.wait_for(lambda: not self._num_open, timeout=_SETTLE_S)
            return list(self._requests)

    def fail(
        self, fault: Fault, *, when: Callable[[Request], bool] = reads, after: int = 0, times: float = float("inf")
    ) -> None:
        """Let requests fail from now on.

        Args:
            fault: How.
            when: Which requests.
            after: How many of these pass before the first failure.
            times: How many fail.
        """
        with self._lock:
            self._rules.append(_Rule(fault, when, after, times))

    def heal(self) -> None:
        """Let no further request fail."""
        with self._lock:
            self._rules.clear()

    def clear(self) -> None:
        """Forget faults and counts."""
        self.heal()
        with self._lock:
            self._requests.clear()

    @property
    def sent_bytes(self) -> int:
        """Bytes of all answers' bodies."""
        return sum(request.sent_bytes for request in self.requests)

    def object_reads(self) -> list[Request]:
        """Return the requests that read objects."""
        return [request for request in self.requests if reads(request)]

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=10)

    def begin(self, request: Request) -> Fault | None:
        """Return what is to be done to a request that has come."""
        with self._lock:
            self._num_open += 1
            for rule in self._rules:
                if not rule.when(request):
                    continue
                if rule.after:
                    rule.after -= 1
                elif rule.times:
                    rule.times -= 1
                    return rule.fault
        return None

    def end(self, request: Request) -> None:
        with self._settled:
            self._num_open -= 1
            self._requests.append(request)
            self._settled.notify_all()


@contextlib.contextmanager
def proxied(host: str, port: int) -> Iterator[Proxy]:
    """Run a proxy in front of a server."""
    proxy = Proxy(host, port)
    try:
        yield proxy
    finally:
        proxy.stop()


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up are what this is about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = 120
    server: _Server

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class's name
        pass

    def _pass_on(self) -> None:
        began, body = time.monotonic(), self._body()
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, self.path, headers, len(body), 0, 0, began, None)
        fault = self.server.proxy.begin(request)
        status = sent_bytes = 0
        try:
            if isinstance(fault, Reset):
                self._reset()
                return
            if isinstance(fault, Status):
                status, head, content = fault.code, list(fault.headers.items()), fault.body
            else:
                status, head, content = self._ask(body, headers, fault)
            if self.command == "HEAD":
                self._head(status, head, None)
            else:
                sent_bytes = self._answer(status, head, content, fault)
        finally:
            self.server.proxy.end(
                Request(self.command, self.path, headers, len(body), status, sent_bytes, began, fault)
            )

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = do_OPTIONS = _pass_on

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", "").lower():
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        pieces = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline() not in (b"\r\n", b""):  # trailers
            pass
        return b"".join(pieces)

    def _ask(
        self, body: bytes, headers: Mapping[str, str], fault: Fault | None
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        """Return status, headers and body of the real answer."""
        left_out = {"connection", "expect", "transfer-encoding", "content-length"}
        if isinstance(fault, NoRanges):
            left_out.add("range")
        connection = http.client.HTTPConnection(*self.server.proxy.upstream, timeout=_UPSTREAM_S)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers.items():
                if name not in left_out:
                    connection.putheader(name, value)
            connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body or None)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def _head(self, status: int, head: list[tuple[str, str]], num_bytes: int | None) -> None:
        self.send_response_only(status)
        for name, value in head:
            if name.lower() in ("connection", "transfer-encoding", "keep-alive"):
                continue
            if num_bytes is None or name.lower() != "content-length":
                self.send_header(name, value)
        if num_bytes is not None:
            self.send_header("Content-Length", str(num_bytes))
        self.end_headers()

    def _answer(self, status: int, head: list[tuple[str, str]], content: bytes, fault: Fault | None) -> int:
        """Send an answer, or as much of it as the fault lets through; return how much of the body went out."""
        if isinstance(fault, Delay):
            time.sleep(fault.seconds)
        elif isinstance(fault, Flip) and content:
            position = min(fault.position, len(content) - 1)
            content = content[:position] + bytes([content[position] ^ 0x10]) + content[position + 1 :]
        elif isinstance(fault, TooShort):
            content = content[: max(len(content) - fault.by_bytes, 0)]
        self._head(status, head, None if status in (204, 304) else len(content))
        if isinstance(fault, Drop):
            self.wfile.write(content[: fault.after_bytes])
            self.wfile.flush()
            self.close_connection = True
            return min(fault.after_bytes, len(content))
        pace = fault.bytes_per_s if isinstance(fault, Slow) else None
        step = _PIECE_BYTES if pace is None else max(int(pace / 20), 1)
        for start in range(0, len(content), step):
            self.wfile.write(content[start : start + step])
            if pace is not None:
                time.sleep(step / pace)
        return len(content)

    def _reset(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(self.connection.detach())  # close() would wait for the files on it, whose end is an orderly one
