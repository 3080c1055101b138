"""Read remote files by ranges: small pieces through pages, long runs through windows that are fetched ahead.

What is in memory at a time is bounded for all files of a mirror together, whatever the files' sizes.
"""

from __future__ import annotations

import bisect
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from fsdp_ckpt.errors import IncompleteCheckpoint, MalformedFile
from fsdp_ckpt.store.remote.attempts import attempt
from fsdp_ckpt.store.remote.mirrors import Traffic
from fsdp_ckpt.store.remote.urls import scheme_of
from fsdp_ckpt.store.syscalls import read_into, write_all

__all__ = ["Held", "RangeCache", "RemoteFile"]

_PAGE_BYTES = 32 << 10
_MAX_PAGES = 256
"""8 MiB: heads and directories of archives, which are read again and again."""
_WINDOW_BYTES = 2 << 20
_MAX_WINDOWS = 12
_AHEAD = 4
"""Windows that are asked for before they are wanted."""
_LONG_BYTES = 256 << 10
"""From this length on a read is part of a long run."""
_CONNECTIONS = 8
_GAP_BYTES = 64 << 10
"""Pieces that are nearer to each other than this are fetched together."""

_TRIES = 6
_HUB_TRIES = 2
"""huggingface_hub itself tries up to six times, with pauses of some 20 s together."""

Fetch = Callable[[str, int, int], bytes]
"""Returns bytes ``[start, stop)`` of a file."""


class RangeCache:
    """What was fetched last, of all files below one URL; for several threads.

    Args:
        fetch: Makes one request.
        url: For messages.
    """

    def __init__(self, fetch: Fetch, url: str) -> None:
        self._fetch = fetch
        self.url = url
        self.traffic = Traffic()
        self._tries = _HUB_TRIES if scheme_of(url) == "hf" else _TRIES
        self._pages: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._windows: OrderedDict[tuple[str, int], Future[bytes]] = OrderedDict()
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def request(self, path: str, start: int, stop: int) -> bytes:
        """Fetch a range, again where that may help.

        Raises:
            Unreachable: It cannot be had.
            IncompleteCheckpoint: The file has gone since it was listed.
            MalformedFile: The file has become shorter.
        """
        try:
            data = attempt(lambda: self._whole(path, start, stop), url=self.url, tries=self._tries)
        except FileNotFoundError as error:
            raise IncompleteCheckpoint(
                f"`{self.url}`: {path} was removed while it was being read", hint="run the same command again"
            ) from error
        with self._lock:
            self.traffic.requests += 1
            self.traffic.num_bytes += len(data)
        return data

    def _whole(self, path: str, start: int, stop: int) -> bytes:
        data = self._fetch(path, start, stop)
        if len(data) != stop - start:
            raise MalformedFile(f"{path}: {len(data)} bytes came from {start} on, {stop - start} were expected")
        return data

    def piece(self, path: str, size: int, start: int, num_bytes: int) -> bytes:
        """Return a small range, through pages."""
        stop = min(start + num_bytes, size)
        if stop <= start:
            return b""
        known = self._in_window(path, start, stop)
        if known is not None:
            return known
        first, last = start // _PAGE_BYTES, (stop - 1) // _PAGE_BYTES
        self.prefetch(path, size, [(start, stop)])
        with self._lock:
            pages = [self._pages.get((path, number)) for number in range(first, last + 1)]
        if any(page is None for page in pages):  # more than are kept
            return self.request(path, start, stop)
        joined = b"".join(page for page in pages if page is not None)
        return joined[start - first * _PAGE_BYTES : stop - first * _PAGE_BYTES]

    def _in_window(self, path: str, start: int, stop: int) -> bytes | None:
        """Return a range that lies in a window which is there already, as the next item's head often does."""
        number = start // _WINDOW_BYTES
        if number != (stop - 1) // _WINDOW_BYTES:
            return None
        with self._lock:
            window = self._windows.get((path, number))
        if window is None or not window.done() or window.exception() is not None:
            return None
        begin = start - number * _WINDOW_BYTES
        return window.result()[begin : begin + stop - start]

    def prefetch(self, path: str, size: int, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetch the pages behind some ranges that are not there yet, neighbours together, several at a time."""
        wanted: set[int] = set()
        for start, stop in ranges:
            if stop > start:
                wanted.update(range(start // _PAGE_BYTES, (min(stop, size) - 1) // _PAGE_BYTES + 1))
        with self._lock:
            missing = sorted(number for number in wanted if (path, number) not in self._pages)
            for number in wanted.difference(missing):
                self._pages.move_to_end((path, number))
        del missing[_MAX_PAGES:]  # more would not be kept
        runs: list[tuple[int, int]] = []
        for number in missing:
            is_near = runs and (number - runs[-1][1]) * _PAGE_BYTES <= _GAP_BYTES
            if is_near and (number + 1 - runs[-1][0]) * _PAGE_BYTES <= _WINDOW_BYTES:
                runs[-1] = (runs[-1][0], number + 1)
            else:
                runs.append((number, number + 1))
        if len(runs) == 1:
            self._fill(path, size, *runs[0])
        elif runs:
            for done in [self._submit(self._fill, path, size, *run) for run in runs]:
                done.result()

    def _fill(self, path: str, size: int, first: int, last: int) -> bytes:
        start, stop = first * _PAGE_BYTES, min(last * _PAGE_BYTES, size)
        data = self.request(path, start, stop)
        with self._lock:
            for number in range(first, last):
                begin = number * _PAGE_BYTES - start
                self._pages[path, number] = data[begin : begin + _PAGE_BYTES]
            while len(self._pages) > _MAX_PAGES:
                self._pages.popitem(last=False)
        return b""

    def run_into(self, path: str, size: int, view: memoryview, position: int) -> int:
        """Fill a view from a long run, and begin to fetch what follows it."""
        stop = min(position + len(view), size)
        done = position
        while done < stop:
            number = done // _WINDOW_BYTES
            data = self._window(path, size, number)
            begin = done - number * _WINDOW_BYTES
            part = data[begin : begin + stop - done]
            view[done - position : done - position + len(part)] = part
            done += len(part)
        return max(done - position, 0)

    def _window(self, path: str, size: int, number: int) -> bytes:
        with self._lock:
            for near in range(number, number + 1 + _AHEAD):
                start = near * _WINDOW_BYTES
                if start >= size:
                    break
                if (path, near) not in self._windows and (near == number or len(self._windows) < _MAX_WINDOWS):
                    stop = min(start + _WINDOW_BYTES, size)
                    self._windows[path, near] = self._submit(self.request, path, start, stop)
            found = self._windows[path, number]
            self._windows.move_to_end((path, number))
            self._drop(path, number)
        try:
            return found.result()
        except BaseException:
            with self._lock:
                self._windows.pop((path, number), None)
            raise

    def _drop(self, path: str, number: int) -> None:
        """Forget what lies behind, then what was not used for the longest time."""
        self._windows.pop((path, number - 2), None)
        for key, window in list(self._windows.items()):
            if len(self._windows) <= _MAX_WINDOWS:
                break
            if window.done() and key != (path, number):
                del self._windows[key]

    def _submit(self, call: Callable[..., bytes], *arguments: object) -> Future[bytes]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="fsdp-ckpt-remote")
        return self._pool.submit(call, *arguments)

    def begin_anew(self) -> None:
        """Forget everything, in a forked process: the threads that fetch, and hold the lock, are not in it."""
        self._lock = threading.Lock()
        self._pool = None
        self._pages.clear()
        self._windows.clear()

    def close(self) -> None:
        """Let go of everything."""
        with self._lock:
            self._pages.clear()
            self._windows.clear()
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)


class Held:
    """Ranges of one file that are on the local disk, at their places in a sparse file; for several threads.

    Args:
        path: The sparse file.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._ranges: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    def write(self, start: int, data: bytes) -> None:
        """Add a range."""
        fd = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            write_all(fd, data, start)
        finally:
            os.close(fd)
        with self._lock:
            merged: list[tuple[int, int]] = []
            for begin, end in sorted([*self._ranges, (start, start + len(data))]):
                if merged and begin <= merged[-1][1]:
                    merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
                else:
                    merged.append((begin, end))
            self._ranges = merged

    def read_into(self, view: memoryview, position: int) -> bool:
        """Fill a view where all of it is here; tell whether it is."""
        ranges = self._ranges
        place = bisect.bisect_right(ranges, position, key=lambda one: one[0]) - 1
        if place < 0 or ranges[place][1] < position + len(view):
            return False
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return read_into(fd, view, position) == len(view)
        finally:
            os.close(fd)


class RemoteFile:
    """One remote file; see ``store.local.OpenFile``.

    Args:
        cache: Of the mirror that it is in.
        path: Its path in the file system.
        size: Its bytes.
        held: What of it is on the local disk.
    """

    fd: int | None = None

    def __init__(self, cache: RangeCache, path: str, size: int, held: Held | None = None) -> None:
        self._cache = cache
        self._path = path
        self._held = held
        self.size = size

    def read(self, start: int, num_bytes: int) -> bytes:
        """Return up to ``num_bytes`` bytes from ``start``."""
        if self._held is not None:
            data = bytearray(max(min(num_bytes, self.size - start), 0))
            if self._held.read_into(memoryview(data), start):
                return bytes(data)
        if num_bytes >= _LONG_BYTES:
            stop = min(start + num_bytes, self.size)
            return self._cache.request(self._path, start, stop) if stop > start else b""
        return self._cache.piece(self._path, self.size, start, num_bytes)

    def read_into(self, view: memoryview, position: int) -> int:
        """Fill a view from byte ``position`` on, and return how many bytes came: fewer only at the file's end."""
        if self._held is not None and self._held.read_into(view, position):
            return len(view)
        if len(view) >= _LONG_BYTES:
            return self._cache.run_into(self._path, self.size, view, position)
        data = self._cache.piece(self._path, self.size, position, len(view))
        view[: len(data)] = data
        return len(data)

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetch ranges that will be read soon, together."""
        self._cache.prefetch(self._path, self.size, ranges)
