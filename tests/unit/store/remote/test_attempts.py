"""What is tried again, how long that lasts, and what a user reads: with the exceptions that the libraries raise."""

from __future__ import annotations

import concurrent.futures
import errno
import http.client
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from email.message import Message
from typing import Any

import aiohttp
import botocore.exceptions
import pytest
import requests
import urllib3.exceptions
from s3fs.errors import translate_boto_error

from fsdp_ckpt.errors import CheckpointNotFound, Unreachable
from fsdp_ckpt.store.remote.attempts import attempt, explain, is_passing, status_of

httpx: Any = pytest.importorskip("httpx2", reason="huggingface_hub's client of today")

URL = "s3://bucket/run/step 1"


def boto(status: int, code: str) -> Exception:
    """Return what s3fs raises for an error that the store answers with."""
    answer: Any = {"Error": {"Code": code, "Message": f"said {code}"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    translated = translate_boto_error(botocore.exceptions.ClientError(answer, "GetObject"))
    assert isinstance(translated, Exception)
    return translated


def boto_raw(status: int, code: str) -> Exception:
    answer: Any = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error: Exception = botocore.exceptions.ClientError(answer, "GetObject")
    return error


def of_requests(status: int) -> Exception:
    response = requests.Response()
    response.status_code = status
    return requests.HTTPError(f"{status} for it", response=response)


def of_httpx(status: int) -> Exception:
    request = httpx.Request("GET", "https://there/x")
    found = httpx.HTTPStatusError(f"{status}", request=request, response=httpx.Response(status, request=request))
    assert isinstance(found, Exception)
    return found


def of_aiohttp(status: int) -> Exception:
    return aiohttp.ClientResponseError(None, (), status=status, message="it")  # type: ignore[arg-type]


def of_urllib(status: int) -> Exception:
    return urllib.error.HTTPError("http://there/x", status, "it", Message(), None)


def of_hub(status: int) -> Exception:
    from huggingface_hub.errors import HfHubHTTPError

    request = httpx.Request("GET", "https://there/x")
    return HfHubHTTPError("it", response=httpx.Response(status, request=request))


MAKERS: list[Callable[[int], Exception]] = [
    lambda status: boto(status, str(status)), lambda status: boto_raw(status, str(status)), of_requests, of_httpx,
    of_aiohttp, of_hub,
]  # fmt: skip

PASSING: list[Exception] = [
    boto(503, "SlowDown"), boto(500, "InternalError"), boto(503, "ServiceUnavailable"), boto(400, "RequestTimeout"),
    boto_raw(503, "SlowDown"), boto_raw(400, "RequestTimeout"),
    botocore.exceptions.EndpointConnectionError(endpoint_url="http://there"),
    botocore.exceptions.ConnectionClosedError(endpoint_url="http://there"),
    botocore.exceptions.ReadTimeoutError(endpoint_url="http://there"),
    botocore.exceptions.ConnectTimeoutError(endpoint_url="http://there"),
    botocore.exceptions.IncompleteReadError(actual_bytes=1, expected_bytes=2),
    botocore.exceptions.ResponseStreamingError(error="it"),
    aiohttp.ClientPayloadError("Response payload is not completed"), aiohttp.ServerDisconnectedError(),
    aiohttp.ServerTimeoutError(), aiohttp.ClientOSError(errno.ECONNRESET, "reset"),
    aiohttp.ClientConnectionResetError("it"),
    requests.ConnectionError("it"), requests.Timeout("it"), requests.exceptions.ChunkedEncodingError("it"),
    httpx.ConnectError("it"), httpx.ReadError("it"), httpx.WriteError("it"), httpx.ReadTimeout("it"),
    httpx.ConnectTimeout("it"), httpx.PoolTimeout("it"), httpx.RemoteProtocolError("it"), httpx.CloseError("it"),
    urllib3.exceptions.ProtocolError("it"), http.client.IncompleteRead(b"x", 2), http.client.RemoteDisconnected("it"),
    ConnectionResetError(errno.ECONNRESET, "reset"), BrokenPipeError(errno.EPIPE, "pipe"), TimeoutError("it"),
    concurrent.futures.TimeoutError(), OSError(errno.ETIMEDOUT, "timed out"),
]  # fmt: skip

LASTING: list[Exception] = [
    boto(403, "AccessDenied"), boto(403, "InvalidAccessKeyId"), boto(403, "SignatureDoesNotMatch"),
    boto(400, "ExpiredToken"), boto(400, "InvalidBucketName"), boto(301, "PermanentRedirect"),
    botocore.exceptions.NoCredentialsError(), botocore.exceptions.ProfileNotFound(profile="mine"),
    botocore.exceptions.ParamValidationError(report="it"),
    PermissionError("it"), OSError(errno.ENOSPC, "disk full"), ValueError("it"), TypeError("it"),
    NotImplementedError("it"),
]  # fmt: skip


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Collects the pauses that would have been made, at their full length."""
    made: list[float] = []
    monkeypatch.delenv("FSDP_CKPT_RETRY_SCALE", raising=False)
    monkeypatch.setattr(time, "sleep", made.append)
    return made


def failing(*errors: BaseException) -> Callable[[], str]:
    """Return a call that raises these, in turn, and then succeeds."""
    left = list(errors)

    def call() -> str:
        if left:
            raise left.pop(0)
        return "bytes"

    return call


def kind(value: object) -> str:
    return f"{type(value).__module__.split('.')[0]}.{type(value).__name__}"


# ---------------------------------------------------------------------------------------------- what is tried again


@pytest.mark.parametrize("error", PASSING, ids=kind)
def test_what_may_pass_is_tried_again(error: Exception, pauses: list[float]) -> None:
    assert attempt(failing(error), url=URL) == "bytes"
    assert len(pauses) == 1


@pytest.mark.parametrize("error", LASTING, ids=kind)
def test_what_lasts_is_not(error: Exception, pauses: list[float]) -> None:
    with pytest.raises(Unreachable) as caught:
        attempt(failing(error), url=URL)
    assert pauses == []
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_statuses_that_pass(make: Callable[[int], Exception], status: int, pauses: list[float]) -> None:
    error = make(status)
    assert status_of(error) == status
    assert attempt(failing(error), url=URL) == "bytes"
    assert len(pauses) == 1


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("status", [400, 401, 403, 405, 410, 416, 501])
def test_statuses_that_last(make: Callable[[int], Exception], status: int, pauses: list[float]) -> None:
    assert status_of(make(status)) == status
    with pytest.raises(Unreachable):
        attempt(failing(make(status)), url=URL)
    assert pauses == []


def test_nobody_listening_is_not_waited_for(pauses: list[float]) -> None:
    """A refused connection means a wrong address far more often than a server that is just starting."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(Unreachable, match="cannot be reached"):
        attempt(lambda: socket.create_connection(("127.0.0.1", port), timeout=5), url=URL)
    assert pauses == []


def test_what_is_refused_some_levels_down_is_refused() -> None:
    """So says s3fs that no server listens at the endpoint."""
    error = botocore.exceptions.EndpointConnectionError(endpoint_url="http://there")
    error.__context__ = aiohttp.ClientError("it")
    error.__context__.__cause__ = ConnectionRefusedError(errno.ECONNREFUSED, "refused")
    assert not is_passing(error)


def test_a_profile_that_is_missing_is_no_missing_object() -> None:
    found = explain(botocore.exceptions.ProfileNotFound(profile="mine"), URL)
    assert "mine" in found.message
    assert "does not exist" not in found.message
    assert found.hint == "check AWS_PROFILE"


def test_what_is_no_name_of_a_bucket() -> None:
    said = botocore.exceptions.ParamValidationError(report='Invalid bucket name "my bucket": must match the regex "^"')
    found = explain(said, "s3://my bucket/x")
    assert found.message == "`s3://my bucket/x`: that is no name of a bucket"


def test_what_a_cause_says_counts() -> None:
    error = OSError(errno.EIO, "it")
    error.__cause__ = ConnectionResetError(errno.ECONNRESET, "reset")
    assert is_passing(error)


@pytest.mark.parametrize("error", [FileNotFoundError("bucket/x"), CheckpointNotFound("it"), Unreachable("it")])
def test_answers_are_passed_on_as_they_are(error: Exception, pauses: list[float]) -> None:
    with pytest.raises(type(error)) as caught:
        attempt(failing(error), url=URL)
    assert caught.value is error
    assert pauses == []


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), SystemExit(143)], ids=kind)
def test_interruptions_are_obeyed(stop: BaseException, pauses: list[float]) -> None:
    with pytest.raises(type(stop)):
        attempt(failing(stop), url=URL)
    assert pauses == []


# ------------------------------------------------------------------------------------------------------ how long


def test_pauses_grow_and_end(pauses: list[float]) -> None:
    with pytest.raises(Unreachable):
        attempt(failing(*[boto(503, "SlowDown")] * 100), url=URL)
    assert len(pauses) == 5
    for number, pause in enumerate(pauses):
        assert 0.25 * 2**number <= pause <= 0.5 * 2**number
    assert sum(pauses) <= 15.5, "nobody waits minutes for an answer that does not come"


def test_no_pause_is_longer_than_twenty_seconds(pauses: list[float]) -> None:
    with pytest.raises(Unreachable):
        attempt(failing(*[TimeoutError()] * 20), url=URL, tries=10)
    assert len(pauses) == 9
    assert max(pauses) <= 20
    assert min(pauses[-3:]) >= 10


def test_pauses_differ(pauses: list[float]) -> None:
    """So that a thousand ranks do not come back at once."""
    for _ in range(20):
        attempt(failing(TimeoutError()), url=URL)
    assert len({round(pause, 6) for pause in pauses}) > 10


def test_the_last_failure_is_told_at_once(pauses: list[float]) -> None:
    with pytest.raises(Unreachable):
        attempt(failing(*[TimeoutError()] * 3), url=URL, tries=3)
    assert len(pauses) == 2


# ------------------------------------------------------------------------------------------------- what users read


@pytest.mark.parametrize(
    ("error", "words", "hint"),
    [
        (boto(403, "AccessDenied"), "access is denied", "credentials"),
        (boto_raw(403, "403"), "access is denied", "credentials"),
        (PermissionError("Forbidden"), "access is denied", "credentials"),
        (of_aiohttp(401), "asks for credentials", "credentials"),
        (botocore.exceptions.NoCredentialsError(), "asks for credentials", "credentials"),
        (of_httpx(404), "does not exist", "check the name"),
        (boto(429, "TooManyRequests"), "too many requests", "wait"),
        (of_requests(429), "too many requests", "wait"),
        (boto(500, "InternalError"), "500", "try again"),
        (of_requests(502), "502", "try again"),
        (httpx.ConnectError("name or service not known"), "name or service not known", "network"),
        (botocore.exceptions.EndpointConnectionError(endpoint_url="http://there"), "http://there", "network"),
    ],
    ids=lambda value: kind(value) if isinstance(value, Exception) else "",
)
def test_the_message_says_what_is_wrong(error: Exception, words: str, hint: str) -> None:
    found = explain(error, URL)
    assert f"`{URL}`" in found.message
    assert words in found.message
    assert "\n" not in found.message
    assert hint in str(found.hint)
    assert found.exit_code == 7


def test_the_hub_has_words_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    answer = httpx.Response(401, request=httpx.Request("GET", "https://there/x"))
    refused = httpx.Response(403, request=httpx.Request("GET", "https://there/x"))
    gated = explain(GatedRepoError("it", response=refused), "hf://org/name")
    assert "gated" in gated.message
    private = explain(RepositoryNotFoundError("it", response=answer), "hf://org/name")
    assert "no such repository, or it is private" in private.message
    assert "hf auth login" in str(private.hint)
    assert "HF_HUB_OFFLINE" in explain(OfflineModeIsEnabled("it"), "hf://org/name").message


def test_a_blocked_hub_is_not_blamed_for_other_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """HF_HUB_OFFLINE is about the Hub: S3 does not become unreachable by it."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE" not in explain(boto(500, "InternalError"), URL).message
    assert "HF_HUB_OFFLINE" not in explain(ConnectionResetError(errno.ECONNRESET, "reset"), URL).message


def test_long_and_many_lined_causes_stay_one_line() -> None:
    found = explain(RuntimeError("first\nsecond " + "x" * 5000), URL)
    assert "first" in found.message
    assert "\n" not in found.message
    assert len(explain(RuntimeError("x" * 5000), URL).message) < 500


@pytest.mark.parametrize(
    "said",
    [
        "https://me:hunter2hunter2@there/x",
        "GET https://there/x?X-Amz-Credential=hunter2hunter2&a=1 failed",
        "GET https://there/x?X-Amz-Signature=hunter2hunter2 failed",
        "GET https://there/x?X-Amz-Security-Token=hunter2hunter2 failed",
        "GET https://there.blob.core.windows.net/x?sv=1&sig=hunter2hunter2 failed",
        "GET https://there/x?AWSAccessKeyId=hunter2hunter2&Signature=hunter2hunter2 failed",
        "GET https://there/x?access_token=hunter2hunter2 failed",
        "Authorization: Bearer hunter2hunter2",
        "invalid token hf_hunter2hunter2hunter2hunter2hunter2",
    ],
)
def test_credentials_are_never_told(said: str) -> None:
    for error in (RuntimeError(said), httpx.ConnectError(said), PermissionError(said)):
        found = explain(error, "s3://me:hunter2hunter2@bucket/x?sig=hunter2hunter2")
        assert "hunter2" not in f"{found.message} {found.hint}"
        assert "bucket/x" in found.message
