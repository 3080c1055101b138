from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.remote.proxy import Proxy, proxied
from tests.remote.s3_server import Bucket, S3Server, serving

KEY_ID, SECRET = "AKIAFSDPCKPTTESTS", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYtestsonly"
"""Credentials as a user has them: to be seen nowhere."""

_NUMBERS = itertools.count(1)


@pytest.fixture(autouse=True)
def _only_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where anything in this process connects to another machine, and make pauses between tries short."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6):
            assert str(address[0]) in ("127.0.0.1", "::1", "localhost"), f"a test connects to {address}"
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)
    for name in [name for name in os.environ if name.startswith("AWS_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FSDP_CKPT_RETRY_SCALE", "0.02")


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    with serving() as server:
        yield server


@pytest.fixture(scope="session")
def _s3_proxy(s3_server: S3Server) -> Iterator[Proxy]:
    with proxied(s3_server.host, s3_server.port) as proxy:
        yield proxy


@pytest.fixture
def s3_environment(_s3_proxy: Proxy, _only_loopback: None, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What a user of an S3 server of their own sets; also for commands in other processes."""
    changes = {
        "AWS_ENDPOINT_URL_S3": _s3_proxy.url,
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
        "FSDP_CKPT_RETRY_SCALE": "0.02",
    }
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    return changes


@pytest.fixture
def proxy(_s3_proxy: Proxy, s3_environment: dict[str, str]) -> Iterator[Proxy]:
    """Everything that goes to the S3 server, but what ``bucket`` does, goes through here."""
    _s3_proxy.clear()
    yield _s3_proxy
    _s3_proxy.clear()


@pytest.fixture
def bucket(s3_server: S3Server, proxy: Proxy) -> Bucket:
    return s3_server.make_bucket(f"ckpt-{os.getpid()}-{next(_NUMBERS)}")
