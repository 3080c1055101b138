"""A small hub on loopback, which speaks the routes that huggingface_hub's real client calls.

::

    with Hub(tmp_path / "hub") as hub:
        repo = hub.add_repo("owner/name", {"config.json": b"{}", "x.safetensors": path})   # bytes, or where they lie
        hub.add_repo("owner/secret", private=True)               # 401 RepoNotFound without a token
        hub.add_repo("owner/gated", gated=True)                  # 403 GatedRepo for its files, whoever asks
        hub.add_repo("owner/closed", read_only=True)             # 403 for whoever writes
        run("inspect", "hf://owner/name", env=environment(**hub.environment(home)))   # in a process of its own
        use_hub(hub, monkeypatch, home)                          # or in this one; pauses between tries are short then
        hub.fail("resolve", status=503, times=2)                 # see Fault for all that can go wrong
        hub.fail("cdn", drop_after_bytes=1000)
        hub.count("resolve", method="GET"), hub.sent_bytes("resolve", "cdn"), hub.received_bytes("upload", "part")
        hub.requests                                             # all of them, oldest first
        repo.files(), repo.files("refs/pr/1"), repo.branches, repo.messages()
        hub.repos["owner/made"]                                  # what a push made; datasets: "datasets/owner/made"

Routes, as ``fail`` and the counters name them: ``whoami create info refs branch tree paths-info resolve cdn
validate-yaml preupload batch upload part complete verify commit``, and ``unknown`` for what is not spoken.

Large files (by suffix, size or content) are LFS objects: ``resolve`` answers with a redirect to ``cdn``, which is
another origin (``localhost`` instead of ``127.0.0.1``), so that a client that takes its token there is found out.
Uploads beyond ``multipart_bytes`` go in parts of that size. Listings have pages of ``page_size`` entries. There is no
xet here. Note that ``HfFileSystem.cat_file`` fetches 5 MiB beyond what it is asked for; ``open(cache_type="none")``
does not.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import pytest

from tests.remote.hub_faults import Fault, Ledger, Request
from tests.remote.hub_handler import HubHandler
from tests.remote.hub_repos import Repo, Storage

__all__ = ["TOKEN", "Hub", "use_hub"]

TOKEN = "hf_" + "test" * 8
"""The one token that the hub knows."""


class Hub:
    """A hub that runs while the context is open.

    Args:
        folder: For what is uploaded.
        multipart_bytes: Uploads of more bytes go in parts of so many.
        page_size: Entries of a page of a listing.
    """

    def __init__(self, folder: Path, *, multipart_bytes: int = 1 << 20, page_size: int = 100) -> None:
        self.storage = Storage(folder)
        self.multipart_bytes = multipart_bytes
        self.page_size = page_size
        self.repos: dict[str, Repo] = {}
        self.ledger = Ledger()
        self.lock = threading.RLock()
        self.parts: dict[str, Path] = {}
        self.token = TOKEN
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
        self._server.daemon_threads = True
        self._server.hub = self  # type: ignore[attr-defined]  # handlers find it there
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def endpoint(self) -> str:
        """What ``HF_ENDPOINT`` has to be."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def cdn(self) -> str:
        """Another origin, from which large files come."""
        return f"http://localhost:{self._server.server_address[1]}"

    def environment(self, home: Path, **changes: str) -> dict[str, str]:
        """Return the variables that make huggingface_hub talk to this hub, logged in, and to nothing else."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(home),
            "HF_TOKEN": self.token,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_OFFLINE": "0",
            "FSDP_CKPT_RETRY_SCALE": "0.01",
            "NO_PROXY": "*",
        } | changes

    def add_repo(
        self,
        name: str,
        files: Mapping[str, bytes | Path] | None = None,
        *,
        kind: str = "model",
        private: bool = False,
        gated: bool = False,
        read_only: bool = False,
    ) -> Repo:
        """Make a repository with these files on its branch ``main``."""
        repo = Repo(kind=kind, name=name, private=private, gated=gated, read_only=read_only)
        blobs = {path: self.storage.add(path, content) for path, content in (files or {}).items()}
        repo.commit("main", blobs, "initial commit")
        self.repos[repo.path] = repo
        return repo

    def add_commit(self, repo: Repo, files: Mapping[str, bytes | Path], *, branch: str = "main") -> str:
        """Add files to a branch, which is made of ``main`` where it is new, and return the commit's hash."""
        before = repo.at(branch) or repo.at("main")
        kept = dict(before.files) if before else {}
        blobs = {path: self.storage.add(path, content) for path, content in files.items()}
        return repo.commit(branch, {**kept, **blobs}, "more").oid

    def fail(self, route: str, **what: Any) -> Fault:
        """Let the next requests to a route go wrong."""
        fault = Fault(route=route, **what)
        self.ledger.faults.append(fault)
        return fault

    @property
    def requests(self) -> list[Request]:
        return list(self.ledger.requests)

    def forget(self) -> None:
        """Begin to count anew, and let nothing go wrong any more."""
        self.ledger.requests.clear()
        self.ledger.faults.clear()

    def of(self, *routes: str, method: str | None = None) -> list[Request]:
        """Return the requests to some routes; to all without any."""
        return [one for one in self.requests if (not routes or one.route in routes) and method in (None, one.method)]

    def count(self, *routes: str, method: str | None = None) -> int:
        """Return how many requests there were."""
        return len(self.of(*routes, method=method))

    def sent_bytes(self, *routes: str) -> int:
        """Return how many bytes of content went out."""
        return sum(one.sent_bytes for one in self.of(*routes))

    def received_bytes(self, *routes: str) -> int:
        """Return how many bytes of content came in."""
        return sum(one.received_bytes for one in self.of(*routes))


def use_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch, home: Path, **changes: str) -> None:
    """Make this process's huggingface_hub talk to a hub, although it was imported long ago, with short pauses."""
    from huggingface_hub import constants, file_download
    from huggingface_hub.utils import _http

    for name, value in hub.environment(home, **changes).items():
        monkeypatch.setenv(name, value)
    values: dict[str, object] = {
        "ENDPOINT": hub.endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_TOKEN_PATH": str(home / "token"),
        "HF_STORED_TOKENS_PATH": str(home / "stored_tokens"),
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_DISABLE_TELEMETRY": True,
        "HF_HUB_OFFLINE": os.environ["HF_HUB_OFFLINE"] == "1",
    }
    for constant, known in values.items():
        monkeypatch.setattr(constants, constant, known)
    import time

    short = SimpleNamespace(**{name: getattr(time, name) for name in ("monotonic", "perf_counter", "time")})
    short.sleep = lambda seconds: time.sleep(seconds / 100)
    for module in (_http, file_download):
        monkeypatch.setattr(module, "time", short)
