"""Try remote calls again when that may help, and say in one sentence why it did not."""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable
from typing import TypeVar

from fsdp_ckpt.errors import FsdpCkptError, Unreachable
from fsdp_ckpt.store.remote.urls import redact, scheme_of

__all__ = ["attempt", "explain", "is_passing", "status_of"]

T = TypeVar("T")

_TRIES = 6
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 20.0
_PASSING_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_PASSING_CODES = frozenset({
    "SlowDown", "RequestTimeout", "RequestTimeTooSkewed", "InternalError", "ServiceUnavailable", "ThrottlingException",
    "Throttling", "TooManyRequests", "500", "502", "503", "504",
})  # fmt: skip
_PASSING_ERRNO = frozenset({errno.ECONNRESET, errno.ETIMEDOUT, errno.EPIPE, errno.EAGAIN, errno.ECONNABORTED})
_PASSING_NAMES = (
    "timeout", "connectionerror", "connecterror", "readerror", "remoteprotocolerror", "incompleteread",
    "protocolerror", "clientpayloaderror", "serverdisconnected", "endpointconnectionerror", "clientoserror",
    "clientconnectorerror", "connectionclosed", "connectionreset", "remotedisconnected", "responsestreaming",
    "chunkedencoding", "writeerror", "closeerror",
)  # fmt: skip
_LEVELS = 5
"""How far down exceptions are looked into."""


def attempt(call: Callable[[], T], *, url: str, tries: int = _TRIES) -> T:
    """Make a call, again after a growing pause where its failure may pass: 5xx, throttling, lost connections.

    Args:
        call: Must be safe to make twice.
        url: What it is about, for messages.
        tries: How often, at most.

    Raises:
        Unreachable: It failed for good.
        FileNotFoundError: There is no such object.
    """
    for number in range(1, tries + 1):
        try:
            return call()
        except (FsdpCkptError, FileNotFoundError):
            raise
        except Exception as error:  # every library has exceptions of its own
            if number == tries or not is_passing(error):
                raise explain(error, url) from error
            wait_s = min(_FIRST_WAIT_S * 2 ** (number - 1), _LONGEST_WAIT_S) * _scale()
            time.sleep(wait_s * (0.5 + random.random() / 2))  # not all ranks at once
    raise AssertionError("unreachable")


def _scale() -> float:
    """Return the factor of all pauses; tests make it small."""
    return float(os.environ.get("FSDP_CKPT_RETRY_SCALE", "1"))


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status that an exception of any of the libraries carries, None where it has none."""
    for one in (error, error.__cause__, error.__context__):
        response = getattr(one, "response", None)
        status = getattr(response, "status_code", None) or getattr(one, "status", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if isinstance(status, int):
            return status
    return None


def is_passing(error: BaseException) -> bool:
    """Tell whether trying again may help."""
    chain = (error, error.__cause__, error.__context__)
    for one in chain:
        response = getattr(one, "response", None)
        if isinstance(response, dict) and response.get("Error", {}).get("Code") in _PASSING_CODES:
            return True
    status = status_of(error)
    if status is not None:
        return status in _PASSING_STATUS
    for one in chain:
        if isinstance(one, OSError) and one.errno in _PASSING_ERRNO:
            return True
        if one is not None and any(name in type(one).__name__.lower() for name in _PASSING_NAMES):
            return not _is_refused(one)
    return isinstance(error, TimeoutError)


def _is_refused(error: BaseException | None) -> bool:
    """Tell whether nothing listens there; what says so is some levels down."""
    for _ in range(_LEVELS):
        if error is None:
            return False
        if isinstance(error, OSError) and error.errno == errno.ECONNREFUSED:
            return True
        error = error.__cause__ or error.__context__
    return False


def explain(error: BaseException, url: str) -> Unreachable:
    """Return what a failed call means for the user."""
    if type(error).__name__ == "LocalEntryNotFoundError" and error.__cause__ is not None:
        return explain(error.__cause__, url)  # huggingface_hub found no older copy; what went wrong is the cause
    shown, status, hub = redact(url), status_of(error), scheme_of(url) == "hf"
    name = type(error).__name__
    if "GatedRepo" in name:
        return Unreachable(
            f"`{shown}` is gated: its owner has to grant access", hint=f"ask on its page, then: hf auth login ({shown})"
        )
    login = "hf auth login, or set HF_TOKEN" if hub else "check the credentials in the environment"
    if "RevisionNotFound" in name:
        return Unreachable(f"`{shown}`: there is no such revision", hint="name a branch, a tag or a commit after the @")
    if hub and status == 401 and "RepositoryNotFound" not in name:
        return Unreachable(f"`{shown}`: the hub does not accept your token", hint=login)
    if status == 401 or "NoCredentials" in name or "RepositoryNotFound" in name:
        what = "there is no such repository, or it is private" if hub else "the store asks for credentials"
        return Unreachable(f"`{shown}`: {what}", hint=f"check the name; for a private one: {login}" if hub else login)
    if status == 403 or isinstance(error, PermissionError):
        return Unreachable(f"`{shown}`: access is denied{_said(error)}", hint=login)
    if "ParamValidation" in name or "ProfileNotFound" in name:
        return _explain_not_sent(error, shown)
    if status == 404 or "NotFound" in name:
        return Unreachable(
            f"`{shown}` does not exist", hint="check the name, and the revision" if hub else "check the name"
        )
    if "Offline" in name or (hub and os.environ.get("HF_HUB_OFFLINE") == "1"):
        return Unreachable(f"`{shown}`: HF_HUB_OFFLINE is set", hint="unset HF_HUB_OFFLINE")
    if status == 429:
        return Unreachable(f"`{shown}`: too many requests in a short time", hint="wait some minutes, and try again")
    if status is not None:
        return Unreachable(f"`{shown}`: the server answers with error {status}{_said(error)}", hint="try again later")
    detail = redact(f"{name}: {error}".splitlines()[0][:300])
    return Unreachable(f"`{shown}` cannot be reached: {detail}", hint="check the network, and try again")


def _explain_not_sent(error: BaseException, shown: str) -> Unreachable:
    """Return what it means that the S3 library refuses to send anything."""
    if "ProfileNotFound" in type(error).__name__:
        return Unreachable(f"`{shown}`: {redact(str(error))}", hint="check AWS_PROFILE")
    if "bucket name" in str(error):
        return Unreachable(f"`{shown}`: that is no name of a bucket", hint="check the name")
    return Unreachable(f"`{shown}` cannot be asked for: {redact(' '.join(str(error).split())[:300])}")


def _said(error: BaseException) -> str:
    """Return what the hub says about a refusal, as of storage that is used up; nothing where it says nothing."""
    said = getattr(error, "server_message", None)
    return f" ({redact(said.splitlines()[0][:200])})" if isinstance(said, str) and said.strip() else ""
