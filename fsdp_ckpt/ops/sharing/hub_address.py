"""Addresses on the hub: ``hf://[type/]owner/repo[@revision][/path]``."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from urllib.parse import quote, unquote

from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.store.remote.urls import redact, scheme_of

__all__ = ["HubAddress", "parse_hub_address"]

_TYPES = {"models": "model", "datasets": "dataset", "spaces": "space"}
_OTHER_TYPES = ("buckets", "kernels")
"""What huggingface_hub takes for no owner either."""
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?")
_SPECIAL = re.compile(r"(refs/(?:pr/\d+|convert/[\w.-]+))(?:/(.*))?", re.DOTALL)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FORM = "hf://[datasets/]OWNER/REPO[@REVISION][/PATH]"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubAddress:
    """A place on the hub.

    Attributes:
        kind: ``"model"``, ``"dataset"`` or ``"space"``.
        repo: Owner and name: ``owner/repo``.
        revision: Branch, tag, ``refs/pr/N`` or commit; None for the default branch.
        path: Folder or file in the repository, without slashes around it; ``""`` for the repository itself.
    """

    kind: str
    repo: str
    revision: str | None = None
    path: str = ""

    def __str__(self) -> str:
        prefix = "" if self.kind == "model" else f"{self.kind}s/"
        revision = self.revision or ""
        if revision and not _SPECIAL.fullmatch(revision):
            revision = quote(revision, safe="")
        return f"hf://{prefix}{self.repo}" + (f"@{revision}" if revision else "") + (f"/{self.path}" * bool(self.path))

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, which never changes, and to which nothing can be added."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    def at(self, revision: str | None, path: str | None = None) -> HubAddress:
        """Return the address with another revision, and another path where one is given."""
        return replace(self, revision=revision, path=self.path if path is None else path)

    def inside(self, file: str) -> str:
        """Return the path in the repository of a file below this address."""
        return f"{self.path}/{file}" if self.path else file


def parse_hub_address(url: str, *, revision: str | None = None, path: str | None = None) -> HubAddress:
    """Return the place that a URL names.

    Args:
        url: As typed. A revision with ``/`` in it is written with ``%2F``; ``refs/pr/3`` may be written as it is.
        revision: The same, given beside the URL.
        path: Likewise.

    Raises:
        UsageError: It is no address on the hub, or says another revision or path than what is given beside it.

    Example:
        >>> address = parse_hub_address("hf://datasets/owner/repo@v1/step-1000")
        >>> address.kind, address.repo, address.revision, address.path
        ('dataset', 'owner/repo', 'v1', 'step-1000')
    """
    shown = redact(url)
    if scheme_of(url) != "hf":
        raise UsageError(f"`{shown}` is no address on the Hugging Face hub", hint=f"write {_FORM}")
    words = url[len("hf://") :].split("/")
    kind = _TYPES.get(words[0])
    if words[0] in _OTHER_TYPES:
        raise UsageError(f"`{shown}`: {words[0]} of the hub are not supported", hint=f"write {_FORM}")
    if kind is not None:
        words = words[1:]
    if len(words) < 2:
        raise UsageError(f"`{shown}` names no repository", hint=f"write {_FORM}, with the owner")
    owner, (name, at, begun) = words[0], words[1].partition("@")
    rest = "/".join(words[2:])
    found: str | None = None
    if at:
        special = _SPECIAL.fullmatch(f"{begun}/{rest}" if rest else begun)
        found, rest = (special[1], special[2] or "") if special else (unquote(begun), rest)
        if not found:
            raise UsageError(f"`{shown}` has no revision after the @", hint=f"write {_FORM}")
    for word in (owner, name):
        if not _NAME.fullmatch(word) or ".." in word or "--" in word:
            raise UsageError(f"`{shown}`: that is no name of an owner or a repository", hint=f"write {_FORM}")
    return HubAddress(
        kind=kind or "model",
        repo=f"{owner}/{name}",
        revision=_agree("revision", found, revision),
        path=_clean_path(_agree("path", rest.strip("/") or None, path) or "", shown),
    )


def _agree(what: str, in_url: str | None, beside: str | None) -> str | None:
    if in_url is not None and beside is not None and in_url != beside.strip("/"):
        raise UsageError(f"the URL says the {what} `{in_url}`, the option `{beside}`", hint="give it once")
    return beside if in_url is None else in_url


def _clean_path(path: str, shown: str) -> str:
    words = path.strip("/").split("/") if path.strip("/") else []
    if any(word in ("", ".", "..") or "\0" in word for word in words):
        raise UsageError(f"`{shown}`: that is no path in a repository", hint=f"write {_FORM}")
    return "/".join(words)
