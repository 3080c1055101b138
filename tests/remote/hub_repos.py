"""What the hub of the tests keeps: repositories with commits, branches and files, and stored objects."""

from __future__ import annotations

import hashlib
import itertools
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Blob", "Commit", "Repo", "Storage"]

_LARGE_SUFFIXES = (".bin", ".pt", ".pth", ".safetensors", ".distcp", ".zip", ".ckpt")
_LARGE_BYTES = 10 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """A file's content, which lies on disk.

    Attributes:
        sha256: Of the content; what large files go by.
        git_oid: SHA-1 of the content with git's header; what others go by.
        large: Whether it is kept as an LFS object.
    """

    path: Path
    num_bytes: int
    sha256: str
    git_oid: str
    large: bool

    @property
    def oid(self) -> str:
        """What the hub answers a push with, to tell that the file is there already."""
        return self.sha256 if self.large else self.git_oid

    @property
    def etag(self) -> str:
        return self.oid

    def describe(self, path: str) -> dict[str, object]:
        """Return the entry of a listing."""
        entry: dict[str, object] = {"type": "file", "path": path, "size": self.num_bytes, "oid": self.git_oid}
        if self.large:
            entry["lfs"] = {"oid": self.sha256, "size": self.num_bytes, "pointerSize": 135}
        return entry


def is_large(path: str, sample: bytes, num_bytes: int) -> bool:
    """Tell whether the hub keeps a file as an LFS object: by its name, its size, or as it is not text."""
    return num_bytes > 0 and (path.endswith(_LARGE_SUFFIXES) or num_bytes > _LARGE_BYTES or b"\0" in sample)


class Storage:
    """Objects on disk, by what they contain."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._names = itertools.count()

    def new_file(self) -> Path:
        """Return a path for an upload."""
        return self.folder / f"upload-{next(self._names)}"

    def large_object(self, sha256: str) -> Path:
        """Return where an LFS object lies, whether or not it is there."""
        return self.folder / sha256

    def add(self, path: str, content: bytes | Path) -> Blob:
        """Keep a file; one that is given by its path is read where it is, however large it is."""
        if isinstance(content, bytes):
            file = self.new_file()
            file.write_bytes(content)
        else:
            file = content
        num_bytes = file.stat().st_size
        sha256, sha1 = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % num_bytes)
        sample = b""
        with open(file, "rb") as opened:
            while piece := opened.read(1 << 20):
                sample = sample or piece[:512]
                sha256.update(piece)
                sha1.update(piece)
        large = is_large(path, sample, num_bytes)
        if large and not self.large_object(sha256.hexdigest()).exists():
            self.large_object(sha256.hexdigest()).symlink_to(file.resolve())
        return Blob(path=file, num_bytes=num_bytes, sha256=sha256.hexdigest(), git_oid=sha1.hexdigest(), large=large)

    def blob_of(self, sha256: str) -> Blob | None:
        """Return the file of an LFS object that was uploaded, None where there is none."""
        file = self.large_object(sha256)
        if not file.exists():
            return None
        git_oid = hashlib.sha1(sha256.encode()).hexdigest()  # the real one is of the pointer; nobody compares it
        return Blob(path=file, num_bytes=file.stat().st_size, sha256=sha256, git_oid=git_oid, large=True)

    def finish(self, upload: Path, sha256: str) -> str | None:
        """Make an upload the object that it says it is, or say why it is not."""
        with open(upload, "rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if found != sha256:
            return f"the object is {found}"
        shutil.move(upload, self.large_object(sha256))
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """One state of a repository."""

    oid: str
    message: str
    files: Mapping[str, Blob]


@dataclass(slots=True, kw_only=True)
class Repo:
    """A repository.

    Attributes:
        kind: "model", "dataset" or "space".
        name: Owner and name.
        private: Nobody without a token sees it.
        gated: Everybody sees it; nobody gets its files.
        read_only: Nobody may write to it.
        branches: Newest commit by branch, and by ``refs/pr/N``.
        commits: Every commit, by its hash.
    """

    kind: str
    name: str
    private: bool = False
    gated: bool = False
    read_only: bool = False
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)
    num_requests: int = 0

    @property
    def path(self) -> str:
        """Where it is on the hub: datasets and spaces have their kind in front."""
        return self.name if self.kind == "model" else f"{self.kind}s/{self.name}"

    def commit(self, branch: str, files: Mapping[str, Blob], message: str) -> Commit:
        """Make files the newest state of a branch."""
        number = len(self.commits)
        oid = hashlib.sha1(f"{self.path} {branch} {number} {message}".encode()).hexdigest()
        made = Commit(oid=oid, message=message, files=dict(files))
        self.commits[oid] = made
        self.branches[branch] = oid
        return made

    def at(self, revision: str) -> Commit | None:
        """Return the commit of a branch, a pull request or a hash; None where there is none."""
        return self.commits.get(self.branches.get(revision, revision))

    def files(self, revision: str = "main") -> dict[str, bytes]:
        """Return what everybody finds at a revision; for tests to compare with."""
        commit = self.at(revision)
        assert commit is not None, f"{self.path} has no {revision}"
        return {path: blob.path.read_bytes() for path, blob in sorted(commit.files.items())}

    def messages(self, revision: str = "main") -> list[str]:
        """Return the messages of all commits that were made, oldest first."""
        return [commit.message for commit in self.commits.values()]


def listing(commit: Commit, folder: str, *, recursive: bool) -> Iterator[dict[str, object]]:
    """Yield the entries of a folder, folders included, as the hub lists them."""
    prefix = f"{folder}/" if folder else ""
    folders: set[str] = set()
    for path, blob in sorted(commit.files.items()):
        if not path.startswith(prefix):
            continue
        below = path[len(prefix) :].split("/")
        for depth in range(1, len(below)) if recursive else range(1, min(len(below), 2)):
            name = prefix + "/".join(below[:depth])
            if name not in folders:
                folders.add(name)
                yield {"type": "directory", "path": name, "size": 0, "oid": hashlib.sha1(name.encode()).hexdigest()}
        if recursive or len(below) == 1:
            yield blob.describe(path)
