"""The server and the proxy that the other tests stand on, seen through s3fs as its users have it."""

from __future__ import annotations

import http.client
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.remote.proxy import (
    SLOW_DOWN,
    Delay,
    Drop,
    Fault,
    Flip,
    NoRanges,
    Proxy,
    Reset,
    Slow,
    Status,
    TooShort,
)
from tests.remote.s3_server import SIGNED, Bucket

DATA = bytes(range(256)) * 400


def get(proxy: Proxy, bucket: Bucket, key: str, **headers: str) -> tuple[int, bytes]:
    """Read through the proxy with nothing but Python's own client."""
    connection = http.client.HTTPConnection(proxy.url.removeprefix("http://"), timeout=20)
    try:
        connection.request("GET", f"/{bucket.name}/{key}", headers=SIGNED | headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_what_is_put_is_what_s3fs_gets(bucket: Bucket, tmp_path: Path) -> None:
    (tmp_path / "ck/a b").mkdir(parents=True)
    (tmp_path / "ck/a b/[x]=1é#%.bin").write_bytes(DATA)
    url = bucket.upload(tmp_path / "ck", "run=[1e-3]/step 1")
    fs: Any = fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True)
    (found,) = fs.find(url)
    assert found == f"{bucket.name}/run=[1e-3]/step 1/a b/[x]=1é#%.bin"
    assert fs.cat_file(found, start=10, end=300) == DATA[10:300]
    assert bucket.keys("run=[1e-3]/") == {"run=[1e-3]/step 1/a b/[x]=1é#%.bin": len(DATA)}
    assert (bucket.download("run=[1e-3]/step 1", tmp_path / "back") / "a b/[x]=1é#%.bin").read_bytes() == DATA


def test_more_keys_than_one_page_are_listed(bucket: Bucket) -> None:
    for number in range(1005):
        bucket.put(f"k/{number:04d}", b"")
    assert len(bucket.keys("k/")) == 1005


def test_the_proxy_counts(bucket: Bucket, proxy: Proxy) -> None:
    bucket.put("x", DATA)
    assert get(proxy, bucket, "x", Range="bytes=5-14") == (206, DATA[5:15])
    assert get(proxy, bucket, "x") == (200, DATA)
    first, second = proxy.object_reads()
    assert (first.status, first.sent_bytes, first.span) == (206, 10, (5, 15))
    assert (second.status, second.sent_bytes, second.span) == (200, len(DATA), None)
    assert proxy.sent_bytes == len(DATA) + 10


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (Status(code=500), (500, b"")),
        (SLOW_DOWN, (503, SLOW_DOWN.body)),
        (Flip(3), (200, DATA[:3] + bytes([DATA[3] ^ 0x10]) + DATA[4:])),
        (TooShort(1), (200, DATA[:-1])),
        (NoRanges(), (200, DATA)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_answers_are_changed_as_often_as_asked(
    bucket: Bucket, proxy: Proxy, fault: Fault, expected: tuple[int, bytes]
) -> None:
    bucket.put("x", DATA)
    proxy.fail(fault, after=1, times=1)
    span = {"Range": "bytes=0-9"} if isinstance(fault, NoRanges) else {}
    right = (206, DATA[:10]) if span else (200, DATA)
    assert [get(proxy, bucket, "x", **span) for _ in range(3)] == [right, expected, right]


def test_connections_end_early(bucket: Bucket, proxy: Proxy) -> None:
    bucket.put("x", DATA)
    proxy.fail(Drop(1000), times=1)
    with pytest.raises(http.client.IncompleteRead) as caught:
        get(proxy, bucket, "x")
    assert caught.value.partial == DATA[:1000]
    proxy.fail(Reset(), times=1)
    with pytest.raises(ConnectionResetError):
        get(proxy, bucket, "x")
    assert get(proxy, bucket, "x") == (200, DATA)
    assert [request.sent_bytes for request in proxy.requests] == [1000, 0, len(DATA)]


def test_answers_are_late_and_slow(bucket: Bucket, proxy: Proxy) -> None:
    bucket.put("x", DATA)
    for fault in (Delay(0.3), Slow(len(DATA) / 0.3)):
        proxy.fail(fault, times=1)
        began = time.monotonic()
        assert get(proxy, bucket, "x") == (200, DATA)
        assert time.monotonic() - began >= 0.25
