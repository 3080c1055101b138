"""Write a result to an object store, where nothing can be renamed, so that nobody takes half of it for the whole.

Files are put together in a local folder, go up one by one as soon as they are complete, and leave the local disk. What
makes a reader see a checkpoint - manifest, metadata, index, configuration - goes up last. Where something is replaced,
those of the old result are removed first: it stops being complete before anything of it changes. As long as not all is
there, a mark lies beside it.
"""

from __future__ import annotations

import json
import os
import re
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from fsdp_ckpt.errors import DestinationExists, Unreachable
from fsdp_ckpt.store.leftovers import is_staging, saving_mark, staging_name
from fsdp_ckpt.store.publish import WHOLE_FILE, Staging
from fsdp_ckpt.store.remote.target import Target

__all__ = ["UploadStaging", "by_commit"]

_THREADS = 4
_LARGE_BYTES = 64 << 20
_BLOCK_BYTES = 1 << 20
_LAST = (r"(adapter_)?config\.json", r".*\.index\.json", r"\.metadata", r"fsdp_ckpt\.json")
"""Names of what readers go by; the later, the more."""


def by_commit(name: str) -> int:
    """Return when a file goes up: 0 for data, more for what makes readers see them.

    Example:
        >>> [by_commit(name) for name in ("model.safetensors", "config.json", "optimizer_0/.metadata")]
        [0, 1, 3]
    """
    file = name.rpartition("/")[2]
    return next((rank for rank in range(len(_LAST), 0, -1) if re.fullmatch(_LAST[rank - 1], file)), 0)


class UploadStaging(Staging):
    """A local folder whose files go to an object store.

    Args:
        target: Where they go.
        identity: Hexadecimal; equal for runs that would write the same bytes.
        overwrite: Whether objects that are there may be replaced, and those that are no part of the result removed.
        resume: Leave notes of what is finished, keep it when the run is interrupted, and take up what another left.
        digests: Note the CRC-32 of whole files, which nobody can read again here.
    """

    def __init__(
        self,
        target: Target,
        identity: str,
        *,
        overwrite: bool = False,
        resume: bool = False,
        digests: bool = False,
    ) -> None:
        super().__init__(target.path, identity, overwrite=overwrite)
        self.target = target
        self.resume = resume
        self.digests = digests
        self.stop = threading.Event()
        """Set by whoever runs it, to give up uploads."""
        self.count: Callable[[int], None] | None = None
        """Told how many more bytes of large files are there."""
        self._own = f"{staging_name('', identity)}/"
        self._mark = saving_mark(identity)
        self._notes: dict[str, str] = {}
        self._small: list[str] = []
        self._result: set[str] = set()
        self._sent: list[str] = []
        self._removed: set[str] = set()
        self._lock_sent = threading.Lock()
        self._has_begun = self._is_committed = False

    def finish_file(self, name: str, part: Path, note: str) -> None:
        """Upload a complete file, and remove it here."""
        if self.digests:
            note = json.dumps({**json.loads(note), WHOLE_FILE: _crc(part)})
        self._send(name, part, self.count)
        part.unlink()
        if self.resume:
            self._write_object(f"{self._own}{name}.done", note.encode())
        self._notes[name] = note

    def finished(self, name: str, size: int) -> str | None:
        """Return the note of a file of this size that this run, or an earlier one, has uploaded."""
        if name not in self._notes and self.resume and self.target.sizes.get(name) == size:
            place = f"{self._own}{name}.done"
            if place in self.target.sizes:
                self._notes[name] = self.target.read(place).decode()
                self._result.add(name)
        return self._notes.get(name)

    def has_finished(self) -> bool:
        """Tell whether an object is to be kept for a run that resumes."""
        return self.resume and bool(self._notes)

    def add_file(self, name: str, data: bytes, *, durable: bool) -> None:  # noqa: ARG002 - as Staging's
        """Take a small file of the result."""
        super().add_file(name, data, durable=False)
        self._small.append(name)

    def add_copy(self, name: str, src: Path, *, durable: bool) -> None:  # noqa: ARG002 - as Staging's
        """Take a file for the result; a large one goes up at once."""
        super().add_copy(name, src, durable=False)
        path = self.path / name
        if by_commit(name) == 0 and path.stat().st_size >= _LARGE_BYTES:
            self._run([lambda: self._send(name, path)])
            path.unlink()
        else:
            self._small.append(name)

    def publish(self, *, durable: bool = True, keep_old: bool = False) -> None:  # noqa: ARG002 - as Staging's
        """Upload the small files, remove what is no part of the result, then upload what readers go by.

        Raises:
            DestinationExists: Something else appeared there in the meantime.
            Unreachable: The store failed for good.
        """
        self._begin()
        small = sorted(self._small, key=lambda name: (by_commit(name), name))
        result = self._result.union(small)
        self._refuse_strangers(result)
        self._run([self._sender(name) for name in small if by_commit(name) == 0])
        stale = self.target.sizes.keys() - self._removed - result
        self.target.remove(name for name in sorted(stale) if not self._is_ours(name))
        for name in filter(by_commit, small):
            self._run([self._sender(name)])
        if self.resume:
            self.target.remove(name for name in self.target.now() if name.startswith(self._own))
        self.target.abort()
        self.target.remove([self._mark])
        self._is_committed = True
        self._clean()

    def discard(self) -> None:
        """Remove what this run uploaded, what readers go by first, and everything here.

        Where something is left of what was to be replaced, the mark stays beside it.
        """
        if not self._is_committed:
            with suppress(Unreachable):  # the network may be why; the reason for the failure is what has to be said
                notes = [name for name in self.target.sizes if self.resume and name.startswith(self._own)]
                sent = {*self._sent, *self._result, *notes} - {self._mark}
                self.target.remove(name for name in sent if by_commit(name))
                self.target.remove(sent)
                if self._sent and all(map(self._is_ours, self.target.sizes.keys() - sent)):
                    self.target.remove([self._mark])
                self.target.abort()
        self._clean()

    def suspend(self) -> None:
        """Leave in the store what is finished, for a run that resumes."""
        done = self._notes.keys()
        with suppress(Unreachable):
            self.target.remove(name for name in set(self._sent) if name not in done and not self._is_ours(name))
            self.target.abort()
        self._clean()

    def _clean(self) -> None:
        super().discard()

    def _begin(self) -> None:
        """Make what is there incomplete, before anything of it changes."""
        with self._lock_sent:
            if self._has_begun:
                return
            self._write_object(self._mark, b"{}")
            old = sorted(self.target.sizes, key=by_commit, reverse=True)
            for name in old:  # one after the other: an index without what it names is worse than none
                if by_commit(name):
                    self.target.remove([name])
                    self._removed.add(name)
            notes = [name for name in old if is_staging(name.partition("/")[0]) and name != self._mark]
            self.target.remove(name for name in notes if not (self.resume and name.startswith(self._own)))
            self._has_begun = True

    def _send(self, name: str, path: Path, count: Callable[[int], None] | None = None) -> None:
        self._begin()
        with self._lock_sent:
            self._sent.append(name)
            self._result.add(name)
        self.target.put(path, name, self.stop.is_set, count)

    def _sender(self, name: str) -> Callable[[], None]:
        return lambda: self._send(name, self.path / name)

    def _write_object(self, name: str, data: bytes) -> None:
        local = self.path / f".{os.urandom(8).hex()}"
        local.write_bytes(data)
        self._sent.append(name)
        self.target.put(local, name, self.stop.is_set)
        local.unlink()

    def _run(self, calls: Sequence[Callable[[], None]]) -> None:
        """Make calls in threads and wait for them, also when Ctrl-C is pressed: none may upload any more after that."""
        if not calls:
            return
        with ThreadPoolExecutor(min(_THREADS, len(calls))) as pool:
            try:
                for done in [pool.submit(call) for call in calls]:
                    done.result()
            except BaseException:
                self.stop.set()
                raise

    def _is_ours(self, name: str) -> bool:
        return name == self._mark or name.startswith(self._own)

    def _refuse_strangers(self, result: Iterable[str]) -> None:
        known = {*self.target.sizes, *result, *self._sent}
        for name in self.target.now():
            if name not in known and not self._is_ours(name):
                raise DestinationExists(
                    f"`{self.target.url}/{name}` appeared while the result was being written",
                    hint="let only one process write there",
                )


def _crc(path: Path) -> int:
    found = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            found = zlib.crc32(block, found)
    return found
