"""The hub of the tests, asked by huggingface_hub's own client: what it says is what the client makes of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, HfFileSystem, hf_hub_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tests.remote.hub_server import Hub, use_hub

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=")  # the client's own way to upload

LARGE = bytes(range(256)) * 12_000  # three parts of 1 MiB, NUL bytes in it
SMALL = b'{"a": 1}\n'


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub(tmp_path / "hub", page_size=3) as running:
        use_hub(running, monkeypatch, tmp_path / "home")
        yield running


def test_account_and_repositories(hub: Hub) -> None:
    api = HfApi()
    assert api.whoami()["name"] == "owner"
    assert api.create_repo("owner/new", private=True).repo_id == "owner/new"
    assert api.create_repo("owner/new", private=True, exist_ok=True).repo_id == "owner/new"
    assert hub.repos["owner/new"].private
    api.create_repo("owner/set", repo_type="dataset")
    assert api.repo_info("owner/set", repo_type="dataset").sha == hub.repos["datasets/owner/set"].branches["main"]
    api.create_branch("owner/new", branch="side")
    assert [branch.name for branch in api.list_repo_refs("owner/new").branches] == ["main", "side"]


def test_uploads_of_every_kind_and_listings_in_pages(hub: Hub) -> None:
    repo = hub.add_repo("owner/name")
    api = HfApi()
    content = {"a.json": SMALL, "deep/er/b.bin": b"\0" * 1000, "c.safetensors": LARGE, "d": b"", "e.txt": b"text"}
    adds = [CommitOperationAdd(path, data) for path, data in content.items()]
    done = api.create_commit("owner/name", adds, commit_message="all of it")
    assert (done.oid, repo.files()) == (repo.branches["main"], dict(sorted(content.items())))
    assert (hub.count("upload"), hub.count("part"), hub.count("complete"), hub.count("verify")) == (1, 3, 1, 2)
    assert hub.received_bytes("upload", "part") == 1000 + len(LARGE)
    assert not any(one.authorized for one in hub.of("upload", "part"))
    found = {entry.path: entry for entry in api.list_repo_tree("owner/name", recursive=True)}
    assert set(found) == {*content, "deep", "deep/er"}
    assert hub.count("tree") == 3
    lfs: Any = found["c.safetensors"]
    assert (lfs.size, lfs.lfs.sha256) == (len(LARGE), hashlib.sha256(LARGE).hexdigest())
    assert lfs.lfs is not None
    small: Any = found["a.json"]
    assert (small.lfs, small.blob_id) == (None, hashlib.sha1(b"blob 9\0" + SMALL).hexdigest())
    again = api.create_commit("owner/name", [CommitOperationAdd("c.safetensors", LARGE)], commit_message="again")
    assert (again.oid, hub.count("part")) == (done.oid, 3)


def test_pull_requests_and_deletions(hub: Hub) -> None:
    repo = hub.add_repo("owner/name", {"old.txt": b"old", "keep.txt": b"keep"}, read_only=True)
    api = HfApi()
    operations: list[Any] = [CommitOperationAdd("new.txt", b"new"), CommitOperationDelete("old.txt")]
    with pytest.raises(HfHubHTTPError, match="403"):
        api.create_commit("owner/name", operations, commit_message="no")
    operations[0] = CommitOperationAdd("new.txt", b"new")
    done = api.create_commit("owner/name", operations, commit_message="please", create_pr=True)
    assert done.pr_revision == "refs/pr/1"
    assert repo.files("refs/pr/1") == {"keep.txt": b"keep", "new.txt": b"new"}
    assert "old.txt" in repo.files()


def test_downloads_whole_and_in_ranges(hub: Hub, tmp_path: Path) -> None:
    hub.add_repo("owner/name", {"a.json": SMALL, "c.safetensors": LARGE}, private=True)
    for path, content in (("a.json", SMALL), ("c.safetensors", LARGE)):
        assert Path(hf_hub_download("owner/name", path)).read_bytes() == content
    hub.forget()
    files = HfFileSystem(skip_instance_cache=True)
    with files.open("owner/name/c.safetensors", cache_type="none") as opened:  # its cache would fetch 5 MiB
        opened.seek(1000)
        assert opened.read(10) == LARGE[1000:1010]
    assert hub.sent_bytes("cdn") == 10
    assert not any(one.authorized for one in hub.of("cdn"))
    assert sorted(files.find("owner/name")) == ["owner/name/a.json", "owner/name/c.safetensors"]


def test_errors_are_those_of_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add_repo("owner/name", {"a.json": SMALL})
    hub.add_repo("owner/secret", {"a.json": SMALL}, private=True)
    hub.add_repo("owner/gated", {"a.json": SMALL}, gated=True)
    api = HfApi()
    with pytest.raises(RepositoryNotFoundError):
        api.repo_info("owner/typo")
    with pytest.raises(RevisionNotFoundError):
        api.repo_info("owner/name", revision="typo")
    with pytest.raises(RemoteEntryNotFoundError):
        hf_hub_download("owner/name", "typo")
    with pytest.raises(GatedRepoError):
        hf_hub_download("owner/gated", "a.json")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(RepositoryNotFoundError):
        api.repo_info("owner/secret")


def test_faults_happen_as_often_as_asked(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    repo = hub.add_repo("owner/name", {"c.safetensors": LARGE})
    hub.fail("cdn", drop_after_bytes=100_000)
    assert Path(hf_hub_download("owner/name", "c.safetensors", local_dir=tmp_path / "a")).read_bytes() == LARGE
    assert [one.sent_bytes for one in hub.of("cdn")] == [100_000, len(LARGE) - 100_000]
    hub.forget()
    hub.fail("cdn", corrupt=True)
    got = Path(hf_hub_download("owner/name", "c.safetensors", local_dir=tmp_path / "b")).read_bytes()
    assert (got[1:], got[0]) == (LARGE[1:], LARGE[0] ^ 1)
    hub.fail("tree", status=503, times=2)
    hub.fail("tree", status=429, retry_after_s=1)
    assert len(list(HfApi().list_repo_tree("owner/name"))) == 1
    assert [one.status for one in hub.of("tree")] == [503, 503, 429, 200]
    hub.fail("part", drop_after_bytes=200_000, skip=1)
    other = LARGE[::-1]
    HfApi().create_commit("owner/name", [CommitOperationAdd("x.bin", other)], commit_message="x")
    assert (repo.files()["x.bin"] == other, hub.count("part")) == (True, 4)
    hub.fail("commit", lose_answer=True)
    with pytest.raises(Exception, match=r"(?i)disconnected|closed"):
        HfApi().create_commit("owner/name", [CommitOperationAdd("y.txt", b"y")], commit_message="y")
    assert repo.files()["y.txt"] == b"y"
    hub.fail("resolve", status=500, times=100)
    with pytest.raises((HfHubHTTPError, LocalEntryNotFoundError)):
        hf_hub_download("owner/name", "x.bin", local_dir=tmp_path / "c")
