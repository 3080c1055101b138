"""The folder that goes to a store: when what goes, and what is left of it."""

from __future__ import annotations

import errno
import json
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_ckpt.errors import Unreachable, UsageError
from fsdp_ckpt.store.publish import WHOLE_FILE
from fsdp_ckpt.store.remote.target import target
from fsdp_ckpt.store.remote.upload import UploadStaging, by_commit
from tests.remote.written import MemoryStore, memory_store

IDENTITY = "abc123"
MARK = f".saving.fsdp-ckpt-{IDENTITY}"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryStore]:
    monkeypatch.setenv("FSDP_CKPT_RETRY_SCALE", "0.01")
    with memory_store(monkeypatch) as made:
        yield made


def finish(staging: UploadStaging, name: str, data: bytes, note: str = "{}") -> Path:
    part = staging.part_file(name)
    part.write_bytes(data)
    staging.finish_file(name, part, note)
    return part


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        ("model-00001-of-00002.safetensors", "config.json"),
        ("tokenizer_config.json", "config.json"),
        ("generation_config.json", "adapter_config.json"),
        ("config.json", "model.safetensors.index.json"),
        ("optimizer_0/__3_0.distcp", "optimizer_0/.metadata"),
        ("a/model.safetensors.index.json", "pytorch_model_fsdp_0/.metadata"),
        ("optimizer_0/.metadata", "fsdp_ckpt.json"),
    ],
)
def test_what_readers_go_by_is_later(earlier: str, later: str) -> None:
    assert by_commit(earlier) < by_commit(later)


def test_files_leave_as_soon_as_they_are_complete(store: MemoryStore) -> None:
    staging = UploadStaging(target(store.url()), IDENTITY)
    part = finish(staging, "deep/a.bin", b"a" * 100)
    assert not part.exists()
    assert [path for path in staging.path.rglob("*") if path.is_file()] == [staging.path / ".fsdp-ckpt-lock"]
    assert store.files() == {MARK: b"{}", "deep/a.bin": b"a" * 100}
    staging.add_file("deep/.metadata", b"m", durable=True)
    staging.add_file("fsdp_ckpt.json", b"{}", durable=True)
    staging.add_file("notes.txt", b"n", durable=True)
    assert "notes.txt" not in store.files()
    staging.publish()
    assert store.files() == {
        "deep/a.bin": b"a" * 100,
        "deep/.metadata": b"m",
        "fsdp_ckpt.json": b"{}",
        "notes.txt": b"n",
    }
    assert [name.removeprefix("out/") for _, name in store.calls] == [
        MARK, "deep/a.bin", "notes.txt", "deep/.metadata", "fsdp_ckpt.json", MARK,
    ]  # fmt: skip
    assert not staging.path.exists()
    staging.discard()  # what is complete stays
    assert len(store.files()) == 4


def test_files_that_nobody_can_read_again_are_summed_up(store: MemoryStore) -> None:
    staging = UploadStaging(target(store.url()), IDENTITY, digests=True)
    finish(staging, "a.bin", b"some bytes", json.dumps({"w": 5}))
    assert json.loads(staging.finished("a.bin", 10) or "") == {"w": 5, WHOLE_FILE: zlib.crc32(b"some bytes")}
    staging.discard()
    assert store.files() == {}


def test_large_copies_go_up_at_once(store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdp_ckpt.store.remote.upload._LARGE_BYTES", 1000)
    (tmp_path / "large").write_bytes(b"l" * 1000)
    (tmp_path / "small").write_bytes(b"s" * 999)
    staging = UploadStaging(target(store.url()), IDENTITY)
    for name in ("large", "small"):
        staging.add_copy(name, tmp_path / name, durable=False)
    assert sorted(store.files()) == [MARK, "large"]
    assert not (staging.path / "large").exists()
    staging.publish()
    assert {name: len(data) for name, data in store.files().items()} == {"large": 1000, "small": 999}


def test_nothing_goes_up_any_more_once_it_is_stopped(store: MemoryStore) -> None:
    staging = UploadStaging(target(store.url()), IDENTITY)
    finish(staging, "a", b"a")
    staging.stop.set()
    with pytest.raises(Unreachable, match="stopped"):
        finish(staging, "b", b"b")
    assert ("put", "out/b") not in store.calls
    staging.discard()
    assert store.files() == {}


def test_a_small_file_that_fails_stops_the_others(store: MemoryStore) -> None:
    staging = UploadStaging(target(store.url()), IDENTITY)
    names = [f"{number:02}.txt" for number in range(50)]
    for name in names:
        staging.add_file(name, b"x", durable=True)

    def fail(verb: str, name: str) -> None:
        if verb == "put" and name.endswith("01.txt"):
            raise PermissionError(errno.EACCES, "no")
        time.sleep(0.01)

    store.before = fail
    with pytest.raises(Unreachable, match="denied"):
        staging.publish()
    staging.discard()
    assert store.files() == {}
    assert len([name for verb, name in store.calls if verb == "put"]) < 25


def test_the_mark_stays_beside_what_is_left_of_an_old_result(store: MemoryStore) -> None:
    for name in ("config.json", "a.bin", "z.bin"):
        store.put(f"out/{name}", b"old")
    staging = UploadStaging(target(store.url()), IDENTITY, overwrite=True)
    assert len(store.files()) == 3  # nothing changes before there is something new
    finish(staging, "a.bin", b"new")
    assert set(store.files()) == {MARK, "a.bin", "z.bin"}
    staging.discard()
    assert set(store.files()) == {MARK, "z.bin"}


def test_a_run_without_resume_keeps_no_notes(store: MemoryStore) -> None:
    staging = UploadStaging(target(store.url()), IDENTITY)
    finish(staging, "a", b"a")
    assert not staging.has_finished()
    staging.discard()
    staging = UploadStaging(target(store.url()), IDENTITY, resume=True)
    finish(staging, "x/a", b"a", '{"t": 1}')
    assert staging.has_finished()
    staging.add_file("small", b"s", durable=True)
    staging.suspend()
    assert not staging.path.exists()
    assert set(store.files()) == {MARK, "x/a", f"..fsdp-ckpt-{IDENTITY}/x/a.done"}
    again = UploadStaging(target(store.url()), IDENTITY, resume=True)
    assert again.finished("x/a", 2) is None  # of another size
    assert again.finished("x/a", 1) == '{"t": 1}'
    other = UploadStaging(target(store.url()), "def456", resume=True)
    assert other.finished("x/a", 1) is None
    again.publish()
    assert store.files() == {"x/a": b"a"}


def test_discarding_a_resumed_run_leaves_nothing(store: MemoryStore) -> None:
    staging = UploadStaging(target(store.url()), IDENTITY, resume=True)
    finish(staging, "a", b"a")
    staging.suspend()
    again = UploadStaging(target(store.url()), IDENTITY, resume=True)
    assert again.finished("a", 1) == "{}"
    finish(again, "b", b"b")
    again.discard()
    assert store.files() == {}


@pytest.mark.parametrize("url", ["memory://", "memory://a//b", "memory://a/./b", "memory://../b"])
def test_odd_places_are_refused(url: str) -> None:
    with pytest.raises(UsageError):
        target(url)
