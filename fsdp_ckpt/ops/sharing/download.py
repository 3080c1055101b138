"""Bring files from the hub into a folder that is not yet the destination, and compare each with what the hub says."""

from __future__ import annotations

import inspect
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import LocalEntryNotFoundError

from fsdp_ckpt.errors import ChecksumMismatch, MalformedFile
from fsdp_ckpt.ops.sharing.hub_client import HubClient, RemoteFile
from fsdp_ckpt.ops.sharing.interruptible import Stop, run_all
from fsdp_ckpt.ops.sharing.upload import digest_of
from fsdp_ckpt.run.progress import Meter
from fsdp_ckpt.store.leftovers import is_staging, unfinished_marks
from fsdp_ckpt.store.publish import Staging
from fsdp_ckpt.store.remote.attempts import attempt

__all__ = ["download", "is_reserved"]

_THREADS = 8
_LARGE_BYTES = 16 << 20
_LARGE_THREADS = 4
"""huggingface_hub has some 40 MB in memory of each large file that it fetches."""
_NOTE = re.compile(r"\..*\.done", re.DOTALL)
_TAKES_BARS = "tqdm_class" in inspect.signature(hf_hub_download).parameters
"""Older versions of huggingface_hub do not: then files are counted when they are whole."""
_ARRIVING = ".arriving"
"""Folder in the staging folder that huggingface_hub downloads into; what is in it is not verified."""


def is_reserved(path: str) -> bool:
    """Tell whether a name is one that we give to files of our own while we write.

    Not meant are marks of remote saves that did not end: who pulls one has to learn of it.
    """
    words = [word for word in path.split("/") if not unfinished_marks([word])]
    return any(is_staging(word) or word == _ARRIVING or _NOTE.fullmatch(word) for word in words)


def download(
    client: HubClient, commit: str, files: Mapping[str, RemoteFile], staging: Staging, *, meter: Meter
) -> dict[str, int]:
    """Fetch files, and verify each: size, and SHA-256 of large objects, git's SHA-1 of others.

    Those that an earlier run with the same aim has verified are not fetched again.

    Args:
        client: The repository.
        commit: Where to fetch from; it does not change.
        files: Files on the hub by the names that they get.
        staging: Where to.
        meter: Told how far it is.

    Returns:
        Bytes of the files that were there already, by name.

    Raises:
        Unreachable: A file cannot be fetched.
        ChecksumMismatch: What came is not what the hub says, twice.
    """
    arriving = staging.path / _ARRIVING
    shutil.rmtree(arriving, ignore_errors=True)  # a killed run's
    stop = Stop()
    kept: dict[str, int] = {}
    calls: list[_Fetch] = []
    for name, file in sorted(files.items(), key=lambda item: -item[1].num_bytes):
        staging.keep(name)
        if staging.finished(name, file.num_bytes) == file.digest:
            kept[name] = file.num_bytes
            meter.add(file.num_bytes)
        else:
            bar = type("_BarOfFile", (_Bar,), {"meter": meter, "stop": stop})
            calls.append(
                _Fetch(client=client, commit=commit, name=name, file=file, staging=staging, arriving=arriving, bar=bar)
            )
    try:
        small = [call for call in calls if call.file.num_bytes < _LARGE_BYTES]
        run_all(small, stop, num_threads=_THREADS)
        large = [call for call in calls if call.file.num_bytes >= _LARGE_BYTES]
        run_all(large, stop, num_threads=_LARGE_THREADS)
    finally:
        shutil.rmtree(arriving, ignore_errors=True)
    return kept


class _Bar:
    """What huggingface_hub takes for one of its progress bars, of one file: counts bytes as they come, once.

    Subclasses are of one file: it makes instances itself, and more of them when it tries again.
    """

    meter: Meter
    stop: Stop
    position = counted = 0

    def __init__(self, *_args: Any, **options: Any) -> None:
        type(self).position = int(options.get("initial") or 0)
        self.n, self.total = 0, options.get("total")
        self.format_dict: dict[str, Any] = {}

    @classmethod
    def move(cls, num_bytes: float) -> None:
        """Count bytes, unless an earlier try has."""
        cls.stop.check()
        cls.position += int(num_bytes)
        if cls.position > cls.counted:
            cls.meter.add(cls.position - cls.counted)
            cls.counted = cls.position

    def update(self, n: float | None = 1) -> None:
        """Take note of bytes of the file."""
        self.move(n or 0)

    def update_transfer(self, n: float | None = 1) -> None:
        """Pass over bytes on the wire, of which there may be fewer."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("set_", "refresh", "close")):
            return lambda *_args, **_options: None
        raise AttributeError(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fetch:
    """A file to fetch and to verify."""

    client: HubClient
    commit: str
    name: str
    file: RemoteFile
    staging: Staging
    arriving: Path
    bar: type[_Bar]

    def __call__(self) -> None:
        path = self._once()
        try:
            _verify(path, self.file)
        except ChecksumMismatch:
            path.unlink()
            self.bar.position = 0
            path = self._once()
            _verify(path, self.file)
        self.bar.move(self.file.num_bytes - self.bar.position)
        target = self.staging.part_file(self.name)
        os.rename(path, target)
        self.staging.finish_file(self.name, target, self.file.digest)

    def _once(self) -> Path:
        return attempt(self._download, url=self.client.url)

    def _download(self) -> Path:
        address = self.client.address
        options: dict[str, Any] = {"tqdm_class": self.bar} if _TAKES_BARS else {}
        try:
            return Path(
                hf_hub_download(
                    address.repo,
                    self.file.path,
                    repo_type=address.kind,
                    revision=self.commit,
                    local_dir=self.arriving,
                    library_name="fsdp-ckpt",
                    **options,
                )
            )
        except LocalEntryNotFoundError as error:  # it looked for an older copy; what went wrong is the cause
            if isinstance(error.__cause__, Exception):
                raise error.__cause__ from None
            raise MalformedFile(f"`{self.file.path}`: {error}") from error


def _verify(path: Path, file: RemoteFile) -> None:
    size = path.stat().st_size
    if size != file.num_bytes:
        raise ChecksumMismatch(f"`{file.path}` came with {size} bytes, the hub says {file.num_bytes}")
    found = digest_of(str(path), file)
    if found != file.digest:
        kind = "SHA-256" if file.sha256 else "git hash"
        raise ChecksumMismatch(
            f"`{file.path}` came with the {kind} {found}, the hub says {file.digest}",
            hint="a proxy or a disk on the way damages files; try again",
        )
