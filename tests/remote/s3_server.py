"""An S3 server in a process of its own: moto's, on a free port of the loopback device.

What tests put there and take from there goes by plain HTTP, so that no S3 library stands between a test and the truth.
Run as a program it serves until its standard input ends, so that it never outlives the tests.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import threading
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlencode

__all__ = ["SIGNED", "Bucket", "S3Server", "serving"]

_START_S = 60
_ANSWER_S = 60
SIGNED = {
    "Authorization": "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=x"
}
"""The server looks whether a request is signed, and not how; one that is not may do nothing."""
_NAMESPACE = "{http://s3.amazonaws.com/doc/2006-03-01/}"


@dataclass(frozen=True, slots=True)
class S3Server:
    """Where the server listens."""

    host: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def request(self, method: str, target: str, body: bytes | None = None) -> bytes:
        """Make a request that must succeed; return the body of the answer.

        Args:
            method: The verb.
            target: Path and query, quoted.
            body: What to send.
        """
        connection = http.client.HTTPConnection(self.host, self.port, timeout=_ANSWER_S)
        try:
            connection.request(method, target, body, SIGNED | {"Content-Length": str(len(body or b""))})
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        assert answer.status < 300, f"{method} {target}: {answer.status} {content[:500]!r}"
        return content

    def make_bucket(self, name: str) -> Bucket:
        self.request("PUT", f"/{name}")
        return Bucket(self, name)


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket, which the caller has for itself."""

    server: S3Server
    name: str

    def url(self, key: str = "") -> str:
        """Return the URL that a user would type."""
        return f"s3://{self.name}/{key}".rstrip("/")

    def put(self, key: str, content: bytes) -> None:
        self.server.request("PUT", f"/{self.name}/{quote(key)}", content)

    def get(self, key: str) -> bytes:
        return self.server.request("GET", f"/{self.name}/{quote(key)}")

    def delete(self, key: str) -> None:
        self.server.request("DELETE", f"/{self.name}/{quote(key)}")

    def keys(self, prefix: str = "") -> dict[str, int]:
        """Return all keys with the sizes of their objects in bytes, sorted."""
        found: dict[str, int] = {}
        query = {"list-type": "2", "prefix": prefix}
        while True:
            page = ET.fromstring(self.server.request("GET", f"/{self.name}?{urlencode(query)}"))
            for item in page.iter(f"{_NAMESPACE}Contents"):
                key, size = item.findtext(f"{_NAMESPACE}Key"), item.findtext(f"{_NAMESPACE}Size")
                assert key is not None
                assert size is not None
                found[key] = int(size)
            token = page.findtext(f"{_NAMESPACE}NextContinuationToken")
            if not token:
                return dict(sorted(found.items()))
            query["continuation-token"] = token

    def unfinished_uploads(self) -> list[str]:
        """Return the keys of multipart uploads that were begun and neither completed nor aborted."""
        page = ET.fromstring(self.server.request("GET", f"/{self.name}?uploads"))
        return sorted(
            key for item in page.iter() if item.tag.endswith("Upload") for part in item
            if part.tag.endswith("Key") and (key := part.text)
        )  # fmt: skip

    def upload(self, folder: Path, prefix: str) -> str:
        """Copy all files below a folder, links followed, to keys below a prefix; return the URL of that."""
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                self.put(f"{prefix}/{file.relative_to(folder).as_posix()}", file.read_bytes())
        return self.url(prefix)

    def download(self, prefix: str, folder: Path) -> Path:
        """Copy all objects below a prefix to a folder, which is made; return it."""
        for key in self.keys(f"{prefix}/"):
            file = folder / key.removeprefix(f"{prefix}/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(self.get(key))
        return folder


@contextlib.contextmanager
def serving() -> Iterator[S3Server]:
    """Run a server."""
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    process = subprocess.Popen(
        [sys.executable, "-P", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment | {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_EC2_METADATA_DISABLED": "true"},
    )
    timer = threading.Timer(_START_S, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        timer.cancel()
        assert line, "the S3 server did not start"
        host, port = json.loads(line)
        yield S3Server(host, port)
    finally:
        timer.cancel()
        process.kill()
        process.communicate()


def _main() -> None:
    from moto.server import ThreadedMotoServer

    with contextlib.redirect_stdout(sys.stderr):
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
    print(json.dumps(server.get_host_and_port()), flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    _main()
