"""Bring files to the hub: large ones first, each by itself, then all in one commit."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, BinaryIO

from huggingface_hub import CommitOperationAdd, CommitOperationDelete
from huggingface_hub.errors import HfHubHTTPError

from fsdp_ckpt.errors import IncompleteCheckpoint, Unreachable
from fsdp_ckpt.ops.sharing.hub_client import FEW_TRIES, HubClient, RemoteFile
from fsdp_ckpt.ops.sharing.interruptible import Stop, run_all, run_one
from fsdp_ckpt.run.progress import Meter
from fsdp_ckpt.store.remote.attempts import attempt

__all__ = ["Committed", "Upload", "digest_of", "is_same", "upload"]

MANY_FILES = 1000
"""The hub gives up on commits of many more files."""
_THREADS = 4
_TRIES = 6
_LARGE_BYTES = 8 << 20
_GROUP_FILES = 100
_LAST = ("fsdp_ckpt.json", ".metadata", ".index.json")
"""Endings of files without which no reader takes a checkpoint for one: where one commit is not enough, they go last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """What is to be in the repository afterwards.

    Attributes:
        files: Local path, or content, by path in the repository.
        removed: Paths in the repository that go in the same commit.
        replaced: Those of ``files`` that the repository has with another content.
        message: Of the commit.
        revision: The branch; None for the default one.
        create_pr: Open a pull request instead.
    """

    files: Mapping[str, str | bytes]
    removed: Sequence[str] = ()
    replaced: Collection[str] = ()
    message: str
    revision: str | None = None
    create_pr: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What came of it: the commit's hash and page, and the pull request's page and revision where one was opened."""

    commit: str
    url: str
    pull_request: str | None = None
    pull_revision: str | None = None


class _CountedFile(io.BufferedReader):
    """A file that says how far it was read; what is read again for another try does not count twice."""

    def __init__(self, path: str, addition: _Addition) -> None:
        super().__init__(io.FileIO(path))
        self._addition = addition

    def read(self, size: int | None = -1, /) -> bytes:
        self._addition.stop.check()
        data = super().read(size)
        self._addition.count(self.tell())
        return data


@dataclass
class _Addition(CommitOperationAdd):
    """A file of a commit that counts what is read of it for the upload."""

    def attend(self, meter: Meter, stop: Stop) -> None:
        self.meter, self.stop, self.counted = meter, stop, 0

    def count(self, position: int) -> None:
        if position > self.counted:
            self.meter.add(position - self.counted)
            self.counted = position

    @contextmanager
    def as_file(self, with_tqdm: bool = False) -> Iterator[BinaryIO]:
        if isinstance(self.path_or_fileobj, str) and with_tqdm:
            with _CountedFile(self.path_or_fileobj, self) as file:
                yield file
        else:
            with super().as_file() as file:
                yield file


def is_same(source: str | bytes, remote: RemoteFile | None) -> bool:
    """Tell whether a file is on the hub already; it is read only where the sizes are equal."""
    if remote is None:
        return False
    num_bytes = len(source) if isinstance(source, bytes) else os.path.getsize(source)
    return num_bytes == remote.num_bytes and digest_of(source, remote) == remote.digest


def digest_of(source: str | bytes, remote: RemoteFile) -> str:
    """Return what a file (its path, or its content) would be compared by if it were kept as ``remote`` is."""
    num_bytes = len(source) if isinstance(source, bytes) else os.path.getsize(source)
    found: Any = hashlib.sha256() if remote.sha256 is not None else hashlib.sha1(b"blob %d\0" % num_bytes)
    if isinstance(source, bytes):
        found.update(source)
        return str(found.hexdigest())
    with open(source, "rb", buffering=0) as file:
        buffer = bytearray(1 << 20)
        while count := file.readinto(buffer):
            found.update(memoryview(buffer)[:count])
    return str(found.hexdigest())


def upload(client: HubClient, what: Upload, *, meter: Meter) -> Committed:
    """Bring files to a repository.

    Large files are stored first, where nobody sees them; those that an earlier try has stored are not sent again. Then
    one commit shows all of them. Beyond a thousand files there are several, of which the first takes away what makes
    readers see a checkpoint, and the last brings it.

    Args:
        client: The repository, which exists.
        what: What to bring.
        meter: Told how far it is.

    Raises:
        Unreachable: The hub does not answer, or does not let this user.
        IncompleteCheckpoint: The hub did not take all of it.
    """
    stop = Stop()
    additions = []
    for name, source in what.files.items():
        addition = _Addition(path_in_repo=name, path_or_fileobj=source)
        addition.attend(meter, stop)
        additions.append(addition)
    run_all([partial(_store, client, what, group) for group in _groups(additions)], stop, num_threads=_THREADS)
    done = None
    for operations in _commits(additions, what):
        done = run_one(partial(_commit, client, what, operations, done), stop)
    assert done is not None
    _demand_all(client, additions, done)
    return done


def _store(client: HubClient, what: Upload, group: Sequence[_Addition]) -> None:
    def call() -> None:
        with _in_words(client):
            client.api.preupload_lfs_files(
                client.address.repo,
                group,
                repo_type=client.address.kind,
                revision=what.revision,
                create_pr=what.create_pr,
            )

    attempt(call, url=client.url, tries=FEW_TRIES)
    for addition in group:
        addition.count(addition.upload_info.size)  # what was not read, as it is stored, or goes with the commit


def _commit(client: HubClient, what: Upload, operations: Sequence[Any], before: Committed | None) -> Committed:
    """Make one commit; of several to a pull request, the first opens it."""
    opens = what.create_pr and before is None
    pull_revision = before.pull_revision if before is not None else None
    revision = pull_revision or what.revision
    tried = False

    def call() -> Committed:
        nonlocal tried
        if tried:  # was it made, while its answer was lost?
            state = client.state_or_none(revision)
            if state is not None and _has_all(client, state.commit, operations, what):
                return Committed(commit=state.commit, url=client.commit_url(state.commit))
        tried = True
        with _in_words(client):
            found = client.api.create_commit(
                client.address.repo,
                operations,
                repo_type=client.address.kind,
                commit_message=what.message,
                revision=revision,
                create_pr=opens,
            )
        return Committed(commit=found.oid, url=str(found), pull_request=found.pr_url, pull_revision=found.pr_revision)

    done = attempt(call, url=client.url, tries=1 if opens else _TRIES)  # else two might be opened
    if before is not None and before.pull_request is not None:
        return replace(done, pull_request=before.pull_request, pull_revision=pull_revision)
    return done


@contextmanager
def _in_words(client: HubClient) -> Iterator[None]:
    """Say it when the hub does not take what was given, as a README.md whose head is broken; all else passes."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, HfHubHTTPError):
            raise
        said = " ".join(str(error).split())[:300]
        raise Unreachable(f"`{client.url}`: the hub does not take it: {said}") from error


def _has_all(client: HubClient, commit: str, operations: Sequence[Any], what: Upload) -> bool:
    additions = [one for one in operations if isinstance(one, _Addition)]
    there = client.files(commit, "")
    return all(is_same(what.files[one.path_in_repo], there.get(one.path_in_repo)) for one in additions)


def _groups(additions: Sequence[_Addition]) -> Iterator[list[_Addition]]:
    """Yield files to store at a time: large ones alone, so that no pool of threads of huggingface_hub has them.

    The process would wait for such threads at its end, also after Ctrl-C.
    """
    small = [one for one in additions if one.upload_info.size < _LARGE_BYTES]
    yield from ([one] for one in additions if one.upload_info.size >= _LARGE_BYTES)
    for start in range(0, len(small), _GROUP_FILES):
        yield small[start : start + _GROUP_FILES]


def _commits(additions: Sequence[_Addition], what: Upload) -> Iterator[list[Any]]:
    if len(additions) + len(what.removed) <= MANY_FILES:
        yield [*map(_removal, what.removed), *additions]
        return
    first = [one for one in additions if not one.path_in_repo.endswith(_LAST)]
    last = [one for one in additions if one.path_in_repo.endswith(_LAST)]
    gone = [*what.removed, *(one.path_in_repo for one in last if one.path_in_repo in what.replaced)]
    for start in range(0, len(first), MANY_FILES):
        yield [*(map(_removal, gone) if start == 0 else []), *first[start : start + MANY_FILES]]
    if last:
        yield last


def _removal(path: str) -> CommitOperationDelete:
    return CommitOperationDelete(path_in_repo=path, is_folder=False)


def _demand_all(client: HubClient, additions: Sequence[_Addition], done: Committed) -> None:
    """Look whether the commit has everything: a .gitignore in the repository makes the hub leave files out silently."""
    there = {path: file.num_bytes for path, file in client.files(done.commit).items()}
    below = [one for one in additions if not client.address.path or one.path_in_repo.startswith(client.address.path)]
    missing = [one.path_in_repo for one in below if there.get(one.path_in_repo) != one.upload_info.size]
    if missing:
        raise IncompleteCheckpoint(
            f"`{client.url}`: the hub did not take {len(missing)} of {len(additions)} files, such as `{missing[0]}`",
            hint="look into the repository's .gitignore, then push again",
        )
