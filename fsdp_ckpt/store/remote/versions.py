"""Stay with one version of what is read, whatever is written to the same place meanwhile."""

from __future__ import annotations

import re
from typing import Any

from fsdp_ckpt.errors import MalformedFile, UsageError
from fsdp_ckpt.store.remote.attempts import attempt, explain, status_of

__all__ = ["at_commit", "read_unchanged"]

_REPLACED = 412
"""The status of an answer to a request for what is not there any more."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_OTHER_KINDS = ("buckets", "kernels")
_FORM = "hf://[datasets/]OWNER/REPO[@REVISION][/PATH]"


def at_commit(fs: Any, base: str, url: str) -> tuple[str, str]:
    """Return the repository as a path has it, and the same at the commit that its revision has now.

    Args:
        fs: The hub's file system.
        base: A path in it, without the scheme.
        url: For messages.

    Returns:
        Both without the path in the repository: ``("org/name", "org/name@4b825dc6…")``.

    Raises:
        UsageError: It is no address on the hub.
        Unreachable: There is no such repository or revision, or it may not be seen.
    """
    from huggingface_hub import HfApi

    if base.partition("/")[0] in _OTHER_KINDS:
        raise UsageError(f"`{url}`: {base.partition('/')[0]} of the hub are not supported", hint=f"write {_FORM}")
    try:
        place = attempt(lambda: _resolved(fs, base, url), url=url)
    except FileNotFoundError as error:
        raise explain(error.__cause__ if isinstance(error.__cause__, Exception) else error, url) from error
    top = base.removesuffix(place.path_in_repo).rstrip("/")
    commit = place.revision
    if not _COMMIT.fullmatch(commit):
        api = HfApi(library_name="fsdp-ckpt")
        commit = attempt(
            lambda: api.repo_info(place.repo_id, repo_type=place.repo_type, revision=place.revision).sha, url=url
        )
    kind = "" if place.repo_type == "model" else f"{place.repo_type}s/"
    return top, f"{kind}{place.repo_id}@{commit}"


def read_unchanged(fs: Any, path: str, start: int, stop: int, tag: str) -> bytes:
    """Return bytes ``[start, stop)`` of an object of S3, if it is still the one that was listed.

    Args:
        fs: Of s3fs.
        path: Bucket and key.
        start: First byte.
        stop: The byte after the last.
        tag: The ``ETag`` that the listing had for it.

    Raises:
        MalformedFile: It was replaced since.
    """
    from fsspec.asyn import sync

    bucket, key, _ = fs.split_path(path)
    try:
        answer = fs.call_s3("get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{stop - 1}", IfMatch=tag)
    except OSError as error:
        if status_of(error) == _REPLACED:
            raise MalformedFile(
                f"s3://{path} was replaced while it was being read", hint="run the same command again"
            ) from error
        raise
    try:
        return bytes(sync(fs.loop, answer["Body"].read))
    finally:
        answer["Body"].close()


def _resolved(fs: Any, base: str, url: str) -> Any:
    try:
        place = fs.resolve_path(base)
    except (ValueError, NotImplementedError) as error:
        if getattr(error, "response", None) is not None:  # an answer of the hub
            raise
        raise UsageError(f"`{url}` is no address on the Hugging Face hub", hint=f"write {_FORM}") from error
    return place
