"""The calls to the hub that push and pull make, through huggingface_hub: with retries, quiet, and with our errors.

Login, ``HF_TOKEN``, ``HF_HOME``, ``HF_ENDPOINT`` and ``HF_HUB_OFFLINE`` are its affair. It logs the URLs that it tries
again, signatures included; while we call it, it says nothing.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import logging as hub_logging
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from fsdp_ckpt.errors import PathOutside, Unreachable
from fsdp_ckpt.ops.sharing.hub_address import HubAddress
from fsdp_ckpt.store.remote.attempts import attempt

__all__ = ["FEW_TRIES", "HubClient", "RemoteFile", "RepoState", "quiet_hub"]

FEW_TRIES = 3
"""For calls that newer versions of huggingface_hub themselves make up to six times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A file on the hub.

    Attributes:
        path: In the repository.
        num_bytes: Its size.
        sha256: Of its content, for files that are kept as large objects; None for others.
        git_sha1: Of git's blob, for those others.
    """

    path: str
    num_bytes: int
    sha256: str | None
    git_sha1: str

    @property
    def digest(self) -> str:
        """What its content is compared by."""
        return self.sha256 or self.git_sha1


@dataclass(frozen=True, slots=True, kw_only=True)
class RepoState:
    """A repository at a revision: its newest commit, and who sees it."""

    commit: str
    is_private: bool


class HubClient:
    """A repository's side of the hub.

    Args:
        address: The place; its revision is not followed by later commits unless it is a branch.
    """

    def __init__(self, address: HubAddress) -> None:
        self.address = address
        self.url = str(address)
        self.api = HfApi(library_name="fsdp-ckpt")

    def demand_login(self) -> None:
        """Refuse to go on without a token.

        Raises:
            Unreachable: There is none.
        """
        if not get_token():
            raise Unreachable(f"`{self.url}`: you are not logged in to the hub", hint="hf auth login, or set HF_TOKEN")

    def state(self) -> RepoState:
        """Return the repository's state at the address's revision.

        Raises:
            Unreachable: There is no such repository or revision, or it may not be seen.
        """
        found = self._state(self.address.revision)
        return RepoState(commit=str(found.sha), is_private=bool(found.private))

    def state_or_none(self, revision: str | None) -> RepoState | None:
        """Return the repository's state, None where the repository or the revision does not exist, as far as one sees.

        Raises:
            Unreachable: The hub does not answer.
        """
        try:
            found = self._state(revision)
        except Unreachable as error:
            if isinstance(error.__cause__, RepositoryNotFoundError | RevisionNotFoundError):
                if "GatedRepo" in type(error.__cause__).__name__:
                    raise
                return None
            raise
        return RepoState(commit=str(found.sha), is_private=bool(found.private))

    def _state(self, revision: str | None):  # type: ignore[no-untyped-def]  # one of three classes of theirs
        address = self.address
        return attempt(
            lambda: self.api.repo_info(address.repo, repo_type=address.kind, revision=revision), url=self.url
        )

    def create(self, *, private: bool) -> None:
        """Make the repository; nothing where it exists.

        Raises:
            Unreachable: This user may not.
        """
        attempt(
            lambda: self.api.create_repo(
                self.address.repo, repo_type=self.address.kind, private=private, exist_ok=True
            ),
            url=self.url,
        )

    def create_branch(self, branch: str) -> None:
        """Make a branch of the default one; nothing where it exists."""
        attempt(
            lambda: self.api.create_branch(
                self.address.repo, repo_type=self.address.kind, branch=branch, exist_ok=True
            ),
            url=self.url,
        )

    def files(self, commit: str, path: str | None = None) -> dict[str, RemoteFile]:
        """Return the files below a path, by their paths in the repository; the one that the path is, if it is a file.

        Args:
            commit: Where to look.
            path: Folder or file; None for the address's.

        Raises:
            PathOutside: A name would lead out of a folder.
            Unreachable: It cannot be listed.
        """
        path = self.address.path if path is None else path
        repo, kind = self.address.repo, self.address.kind
        if path:
            found = attempt(
                lambda: self.api.get_paths_info(repo, [path], repo_type=kind, revision=commit), url=self.url
            )
            if not found:
                return {}
            if isinstance(found[0], RepoFile):
                return {path: _remote_file(found[0])}
        listed = attempt(
            lambda: list(self.api.list_repo_tree(repo, path or None, recursive=True, repo_type=kind, revision=commit)),
            url=self.url,
            tries=FEW_TRIES,
        )
        return {entry.path: _remote_file(entry) for entry in listed if isinstance(entry, RepoFile)}

    def commit_url(self, commit: str) -> str:
        """Return the page of a commit."""
        kind = self.address.kind
        prefix = "" if kind == "model" else f"{kind}s/"
        return f"{self.api.endpoint}/{prefix}{self.address.repo}/commit/{commit}"


def _remote_file(entry: RepoFile) -> RemoteFile:
    path, lfs = entry.path, entry.lfs
    if any(word in ("", ".", "..") or "\0" in word for word in path.split("/")):
        raise PathOutside(f"the repository has a file named {path!r:.200}, which leads out of it; nothing was read")
    return RemoteFile(
        path=path,
        num_bytes=entry.size if lfs is None else lfs.size,
        sha256=None if lfs is None else lfs.sha256,
        git_sha1=entry.blob_id,
    )


@contextmanager
def quiet_hub() -> Iterator[None]:
    """Keep huggingface_hub from writing to the terminal: bars, and warnings with signed URLs in them."""
    verbosity, no_bars = hub_logging.get_verbosity(), are_progress_bars_disabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hub_logging.set_verbosity(logging.ERROR)
        disable_progress_bars()
        try:
            yield
        finally:
            hub_logging.set_verbosity(verbosity)
            if not no_bars:
                enable_progress_bars()
