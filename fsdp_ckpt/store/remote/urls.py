"""Recognise URLs, and open the file systems that they name."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from typing import Any

from fsdp_ckpt.errors import UsageError

__all__ = ["SCHEMES", "is_url", "local_path", "open_file_system", "redact", "scheme_of"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_CREDENTIALS = re.compile(
    r"(?<=://)(?!arn:|[^/:@\s]*:\d+(?:[/\s]|$))[^/:@\s]*:[^@\s]*@"  # a secret may have a slash in it
    r"|(?<!abfs://)(?<!az://)(?<=://)[^/@\s]+@"  # before the @ of these is the container
)
_SECRET = re.compile(r"([?&](?:[^=&\s]*(?:sig|token|secret|credential|password|key)[^=&\s]*)=)[^&\s]+", re.IGNORECASE)
_TOKEN = re.compile(r"(\b(?:Bearer|Basic)\s+|(?<![A-Za-z0-9_/])hf_)[A-Za-z0-9+/=._-]{14,}", re.IGNORECASE)

SCHEMES: Mapping[str, tuple[str, str]] = {
    "hf": ("huggingface_hub", "huggingface_hub"),
    "s3": ("s3fs", "'fsdp-ckpt[s3]'"),
    "gs": ("gcsfs", "'fsdp-ckpt[gs]'"),
    "gcs": ("gcsfs", "'fsdp-ckpt[gs]'"),
    "az": ("adlfs", "'fsdp-ckpt[az]'"),
    "abfs": ("adlfs", "'fsdp-ckpt[az]'"),
    "memory": ("fsspec", "fsspec"),
}
"""By scheme: the package that it takes, and what pip installs it by."""


def scheme_of(text: str) -> str | None:
    """Return the scheme of a URL, None for a path; names with colons are paths.

    Example:
        >>> scheme_of("s3://bucket/step-1"), scheme_of("file:///data"), scheme_of("run/step-1")
        ('s3', 'file', None)
    """
    match = _SCHEME.match(text)
    return match[1].lower() if match else None


def is_url(text: str) -> bool:
    """Tell whether a text names something that is not on a local disk."""
    return scheme_of(text) not in (None, "file")


def local_path(text: str) -> str:
    """Return the path of a ``file://`` URL; any other text as it is."""
    return text[len("file://") :] if scheme_of(text) == "file" else text


def redact(text: str) -> str:
    """Return a URL, or a message with URLs in it, without user names, passwords and signatures.

    Example:
        >>> redact("s3://key:secret@bucket/x?X-Amz-Signature=ab")
        's3://bucket/x?X-Amz-Signature=…'
    """
    return _TOKEN.sub(r"\1…", _SECRET.sub(r"\1…", _CREDENTIALS.sub("", text)))


def open_file_system(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path in it.

    Credentials are where its library looks for them: environment, configuration files, the hub's login.

    Raises:
        UsageError: The scheme is unknown, its package is not installed, or there are credentials in the URL.
    """
    scheme = scheme_of(url) or ""
    url = scheme + url[len(scheme) :]
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise UsageError(f"`{redact(url)}`: the scheme `{scheme}` is not supported", hint=f"known: file://, {known}")
    if _CREDENTIALS.search(url):
        raise UsageError(
            f"`{redact(url)}` was given with credentials in it, which end up in histories and logs",
            hint="leave them out; they are taken from the environment, and from where the store's own tools keep them",
        )
    package, requirement = SCHEMES[scheme]
    try:
        importlib.import_module(package)
        import fsspec
    except ImportError:
        raise UsageError(
            f"`{redact(url)}` needs the package {package}, which is not installed", hint=f"pip install {requirement}"
        ) from None
    options: dict[str, Any] = {}
    if scheme != "memory":
        # One client for all URLs of a store: each takes 14 MB and a thread. Of the hub's, the endpoint may change.
        options = {"use_listings_cache": False, "skip_instance_cache": scheme == "hf"}
    if scheme == "s3":
        # `attempt` is what tries again: botocore below s3fs below it, each five times, would make minutes of it.
        options["config_kwargs"] = {"retries": {"total_max_attempts": 1, "mode": "standard"}}
    fs = fsspec.filesystem("hf" if scheme == "hf" else scheme, **options)
    if scheme == "s3":
        fs.retries = 1
    path = fs._strip_protocol(url) if scheme != "hf" else url[len("hf://") :]
    return fs, str(path).strip("/")
