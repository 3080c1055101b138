"""A URL that is written to: what lies there already, and the calls that change it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fsdp_ckpt.errors import Unreachable, UsageError
from fsdp_ckpt.store.remote.attempts import attempt
from fsdp_ckpt.store.remote.mirror import Listing, Mirror, list_files
from fsdp_ckpt.store.remote.mirrors import add_mirror
from fsdp_ckpt.store.remote.urls import open_file_system, redact

__all__ = ["Target", "target"]

T = TypeVar("T")

_PART_BYTES = 8 << 20
_PARTS_AT_ONCE = 4
_MAX_PARTS = 9_000
"""S3 takes 10,000."""
_STEP_BYTES = 256 << 10
"""Google takes parts of multiples of this."""
_THREADS = 8


class Target(Mirror):
    """A mirror of a place that may be empty, and is to be filled.

    Its folder shows what is there, so that a destination is checked in one way, wherever it is; what is to be uploaded
    is put together beside that.

    Args:
        url: As typed.
        fs: Its file system.
        base: The path in it.
        found: What is there, where it was listed already.

    Attributes:
        base: The path in the file system.
        sizes: Bytes of the objects that were there at the beginning, by name below the URL.
        memory_bytes: What an upload has in memory: several parts, as sent and as read.
        failed: Names of objects of which an upload failed, whether or not a later one did not.
    """

    def __init__(self, url: str, fs: Any, base: str, *, found: Listing | None = None) -> None:
        if any(part in ("", ".", "..") or "\0" in part for part in base.split("/")):
            raise UsageError(f"`{redact(url)}` is no place to write to", hint="name a bucket and a folder in it")
        listing = _listed(fs, base, url) if found is None else found
        super().__init__(url, fs, base, listing)
        self.base = base
        self.sizes = _sizes(listing, base)
        if not listing:
            self.path.rmdir()  # nothing is there
        self.memory_bytes = 2 * _PARTS_AT_ONCE * _PART_BYTES
        self.failed: set[str] = set()

    def now(self) -> dict[str, int]:
        """Return the bytes of the objects that are there now, by name."""
        return _sizes(_listed(self._fs, self.base, self.url), self.base)

    def put(
        self, local: Path, name: str, is_stopped: Callable[[], bool], count: Callable[[int], None] | None = None
    ) -> None:
        """Upload a file, in parts where it is large, and look whether all of it arrived.

        Args:
            local: The file.
            name: Of the object, below the URL; what has the name is replaced.
            is_stopped: Asked again and again; when it says so, the upload is given up, and what the store has of it is
                thrown away.
            count: Told how many more bytes are there.

        Raises:
            Unreachable: It failed for good, or was stopped.
        """
        size, remote = local.stat().st_size, f"{self.base}/{name}"
        watch = _watch(size, is_stopped, count)
        options = self._options(size)

        def once() -> None:
            if is_stopped():
                raise Unreachable(f"`{self.url}`: the upload was stopped")
            watch.value = 0
            try:
                self._fs.put_file(str(local), remote, callback=watch, **options)
            except BaseException:
                self.failed.add(name)
                raise
            there = self._fs.info(remote).get("size")
            if there != size:
                raise ConnectionError(f"{name} has {there} bytes after the upload of {size}")
            watch.absolute_update(size)

        _call(once, self.url)

    def _options(self, size: int) -> dict[str, int]:
        """Return what bounds the memory of an upload, in the words of each library."""
        part_bytes = max(_PART_BYTES, -(-size // _MAX_PARTS))
        if self.scheme == "s3":
            return {"chunksize": part_bytes, "max_concurrency": _PARTS_AT_ONCE}
        if self.scheme in ("gs", "gcs"):
            return {"chunksize": -(-part_bytes // _STEP_BYTES) * _STEP_BYTES}
        return {"max_concurrency": _PARTS_AT_ONCE} if self.scheme in ("az", "abfs") else {}

    def read(self, name: str) -> bytes:
        """Return the content of a small object."""
        return bytes(_call(lambda: self._fs.cat_file(f"{self.base}/{name}"), self.url))

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects, several at a time; those that are not there are none too few.

        Raises:
            Unreachable: One could not be removed.
        """
        wanted = list(names)
        if wanted:
            with ThreadPoolExecutor(min(_THREADS, len(wanted))) as pool:
                for done in [pool.submit(self._remove, name) for name in wanted]:
                    done.result()

    def _remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            attempt(lambda: self._fs.rm_file(f"{self.base}/{name}"), url=self.url)

    def abort(self) -> None:
        """Throw away what the store has of uploads that failed, where it failed at that, too.

        Only S3 keeps, and charges for, parts of uploads that do not end.
        """
        if self.scheme != "s3" or not self.failed:
            return
        bucket, _, prefix = self.base.partition("/")
        wanted = {f"{prefix}/{name}" if prefix else name for name in self.failed}
        for one in attempt(lambda: self._fs.list_multipart_uploads(bucket), url=self.url):
            key, number = one["Key"], one["UploadId"]
            if key in wanted:
                with suppress(FileNotFoundError):
                    attempt(partial(self._fs.abort_mpu, bucket, key, number), url=self.url)


def target(url: str) -> Target:
    """Look at a place in an object store that is to be written to.

    Raises:
        UsageError: The scheme is unknown, its package is not installed, or it names no place.
        Unreachable: It cannot be listed.
    """
    fs, base = open_file_system(url)
    made = Target(url, fs, base)
    add_mirror(made)
    return made


def _call(call: Callable[[], T], url: str) -> T:
    try:
        return attempt(call, url=url)
    except FileNotFoundError as error:
        raise Unreachable(
            f"`{redact(url)}`: there is no such bucket", hint="make it first, or check the name"
        ) from error


def _listed(fs: Any, base: str, url: str) -> Listing:
    return _call(lambda: list_files(fs, base), url)


def _sizes(listing: Listing, base: str) -> dict[str, int]:
    prefix = f"{base}/"
    return {
        path.removeprefix(prefix): int(facts.get("size") or 0)
        for path, facts in listing.items()
        if path.startswith(prefix)
    }


def _watch(size: int, is_stopped: Callable[[], bool], count: Callable[[int], None] | None) -> Any:
    """Return what the library tells after each part: an exception makes it throw away the others."""
    from fsspec.callbacks import Callback

    class Watch(Callback):  # type: ignore[misc]  # without types
        counted = 0  # what is sent again does not count again

        def call(self, *_args: Any, **_more: Any) -> None:
            if is_stopped():
                raise Unreachable("the upload was stopped")
            more = min(self.value, size) - self.counted
            if more > 0 and count is not None:
                self.counted += more
                count(more)

    return Watch()
