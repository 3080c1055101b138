"""Results written into a repository of the hub: in one commit, or not at all."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fsdp_ckpt
from fsdp_ckpt.errors import DestinationExists, Unreachable, UsageError
from tests.remote.hub_server import Hub, use_hub
from tests.remote.written import contents

FIXTURES = Path(__file__).parents[2] / "fixtures"
ACCELERATE = FIXTURES / "torch-2.13.0/fsdp2_sharded_w2"
TRAINER = FIXTURES / "frameworks/trainer/checkpoint-2"
OWN = {".gitattributes": b"*.bin filter=lfs", "README.md": b"# mine"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub(tmp_path / "hub", multipart_bytes=10_000) as running:
        use_hub(running, monkeypatch, tmp_path / "home")
        yield running


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def merge_many(src: Any, out: Any, **options: Any) -> Any:
    return fsdp_ckpt.merge(src, out, max_shard_size="1KB", **options)


def is_empty(folder: Path) -> bool:
    """Tell whether no file below a folder takes any space."""
    return not any(path.stat().st_blocks for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    "write",
    [
        merge_many,
        lambda src, out: fsdp_ckpt.convert(src, out, to="accelerate", world_size=3),
        lambda src, out: fsdp_ckpt.reshard(src, out, 5),
    ],
)
def test_a_new_repository_is_private_and_gets_one_commit(write: Any, hub: Hub, tmp_path: Path, temporary: Path) -> None:
    report = write(ACCELERATE, "hf://owner/new")
    write(ACCELERATE, tmp_path / "out")
    repo = hub.repos["owner/new"]
    assert repo.private
    assert {name: data for name, data in repo.files().items() if name not in OWN} == contents(tmp_path / "out")
    assert len(repo.messages()) == 2
    assert report.destination == "hf://owner/new"
    assert hub.count("commit") == 1
    assert is_empty(temporary)
    assert fsdp_ckpt.inspect("hf://owner/new").complete


def test_into_a_folder_on_a_new_branch_of_a_repository_with_more(hub: Hub, tmp_path: Path) -> None:
    repo = hub.add_repo("owner/name", {**OWN, "other/model.safetensors": b"x"}, kind="dataset")
    before = repo.files()
    report = merge_many(TRAINER, "hf://datasets/owner/name@side/step-2")
    merge_many(TRAINER, tmp_path / "out")
    made = {f"step-2/{name}": data for name, data in contents(tmp_path / "out").items()}
    assert repo.files("side") == {**before, **made}
    assert repo.files() == before
    assert report.destination == "hf://datasets/owner/name@side/step-2"


def test_what_the_repository_has_of_its_own_is_kept(hub: Hub, tmp_path: Path) -> None:
    repo = hub.add_repo("owner/name", OWN)
    merge_many(TRAINER, "hf://owner/name")
    with pytest.raises(DestinationExists, match="not empty"):
        fsdp_ckpt.merge(TRAINER, "hf://owner/name")
    commits = len(repo.messages())
    fsdp_ckpt.merge(TRAINER, "hf://owner/name", overwrite=True)
    assert len(repo.messages()) == commits + 1
    fsdp_ckpt.merge(TRAINER, tmp_path / "out")
    assert repo.files() == {**OWN, **contents(tmp_path / "out")}
    fsdp_ckpt.merge(TRAINER, "hf://owner/name", overwrite=True)  # the same again is no change
    assert len(repo.messages()) == commits + 1


def test_from_the_hub_to_the_hub(hub: Hub, tmp_path: Path) -> None:
    hub.add_repo("owner/src", dict(contents(ACCELERATE)))
    merge_many("hf://owner/src", "hf://owner/dst")
    merge_many(ACCELERATE, tmp_path / "out")
    repo = hub.repos["owner/dst"]
    assert {name: data for name, data in repo.files().items() if name not in OWN} == contents(tmp_path / "out")


@pytest.mark.parametrize("route", ["preupload", "batch", "part", "commit"])
def test_a_failure_leaves_the_repository_as_it_is(route: str, hub: Hub, temporary: Path) -> None:
    repo = hub.add_repo("owner/name", OWN)
    before, commits = repo.files(), len(repo.messages())
    hub.fail(route, status=403, times=100)
    with pytest.raises(Unreachable) as caught:
        fsdp_ckpt.convert(ACCELERATE, "hf://owner/name", to="accelerate", world_size=2)
    assert caught.value.exit_code == 7
    assert "hf://owner/name" in caught.value.message
    assert (repo.files(), len(repo.messages())) == (before, commits)
    assert is_empty(temporary)


def test_a_dry_run_makes_no_repository(hub: Hub) -> None:
    report = merge_many(ACCELERATE, "hf://owner/new", dry_run=True)
    assert (report.destination, report.dry_run) == ("hf://owner/new", True)
    assert hub.repos == {}
    assert not [one for one in hub.requests if one.method != "GET" and one.route != "paths-info"]


def test_what_cannot_be_is_said_before_anything_is_read(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add_repo("owner/name", {**OWN, "model.safetensors": b"x", "file": b"y"})
    commit = "0" * 40
    for url, options, words in (
        (f"hf://owner/name@{commit}", {}, "is a commit"),
        ("hf://owner", {}, "names no repository"),
        ("hf://owner/new", {"resume": True}, "--resume"),
        ("hf://owner/new", {"remove_source": True}, "--remove-source"),
    ):
        with pytest.raises(UsageError, match=words):
            merge_many(ACCELERATE, url, **options)
    with pytest.raises(DestinationExists, match="not a folder"):
        merge_many(ACCELERATE, "hf://owner/name/file", overwrite=True)
    with pytest.raises(DestinationExists, match="`file`"):
        merge_many(ACCELERATE, "hf://owner/name", overwrite=True)
    with pytest.raises(Unreachable, match="refs/pr/7"):
        merge_many(ACCELERATE, "hf://owner/name@refs/pr/7")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(Unreachable, match="not logged in"):
        merge_many(ACCELERATE, "hf://owner/new")
    assert hub.count("create", "commit", "preupload") == 0
