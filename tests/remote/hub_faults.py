"""What goes wrong on purpose at the hub of the tests, and what was asked of it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

__all__ = ["Fault", "Ledger", "Request"]


@dataclass(slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong; the first of a hub's faults that fits a request takes place.

    Attributes:
        route: Which requests; see ``Hub``.
        method: Only these ("HEAD", "GET", "POST", "PUT"), None for all.
        path: Only where the request's path contains this.
        times: How often it takes place.
        skip: How many fitting requests go well before.
        status: Answer with this status and nothing else.
        retry_after_s: What the answer's ``Retry-After`` says.
        error_code: What the answer's ``X-Error-Code`` says, as "GatedRepo".
        drop_after_bytes: Cut the connection after so many bytes of the content, whichever way it goes.
        lose_answer: Do what was asked, then cut the connection.
        delay_s: Wait before the answer.
        corrupt: Answer with a content whose first byte is another.
    """

    route: str
    method: str | None = None
    path: str = ""
    times: int = 1
    skip: int = 0
    status: int | None = None
    retry_after_s: int | None = None
    error_code: str | None = None
    drop_after_bytes: int | None = None
    lose_answer: bool = False
    delay_s: float = 0.0
    corrupt: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request that was answered, or cut off.

    Attributes:
        route: Which part of the hub it was for; see ``Hub``.
        path: With its query.
        status: Of the answer; 0 where the connection was cut.
        sent_bytes: Content that went to the client, without headers.
        received_bytes: Content that came from it.
        authorized: Whether it had a token with it.
        range: Its ``Range`` header.
        headers: All of them, names in lower case.
    """

    route: str
    method: str
    path: str
    status: int
    sent_bytes: int
    received_bytes: int
    authorized: bool
    range: str | None
    headers: dict[str, str]


@dataclass(slots=True)
class Ledger:
    """All requests, and the faults to come."""

    requests: list[Request] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, request: Request) -> None:
        with self._lock:
            self.requests.append(request)

    def take(self, route: str, method: str, path: str) -> Fault | None:
        """Return the fault that this request has, and count it."""
        with self._lock:
            for fault in self.faults:
                fits = fault.route == route and fault.method in (None, method) and fault.path in path
                if not fits or fault.times <= 0:
                    continue
                if fault.skip > 0:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                return fault
        return None
