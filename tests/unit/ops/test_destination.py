"""What a destination is, from what a user typed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.ops.destination import destination_of, place_in_words, refuse_for_urls, shown_destination, target_of
from fsdp_ckpt.store.remote.mirror import mirror
from tests.remote.written import MemoryStore, memory_store


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryStore]:
    with memory_store(monkeypatch) as made:
        yield made


def test_paths_stay_paths(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for text in (f"{tmp_path}/link", f"file://{tmp_path}/link"):
        assert destination_of(text) == tmp_path / "real"
        assert target_of(destination_of(text)) is None
        assert shown_destination(text) == f"{tmp_path}/link"
    refuse_for_urls(f"file://{tmp_path}", remove_source=True, resume=True, into=True, shared=True)


def test_urls_show_what_is_there(store: MemoryStore) -> None:
    assert not destination_of(store.url("empty")).exists()
    store.put("out/deep/model.safetensors", b"12345")
    found = destination_of(store.url())
    assert [path.relative_to(found).as_posix() for path in found.rglob("*") if path.is_file()] == [
        "deep/model.safetensors"
    ]
    assert (found / "deep/model.safetensors").stat().st_size == 5
    behind = target_of(found)
    assert behind is not None
    assert behind.url == store.url()


def test_a_source_and_a_destination_are_compared_by_their_urls(store: MemoryStore, tmp_path: Path) -> None:
    store.put("out/a", b"1")
    here, there = destination_of(store.url()), mirror(store.url()).path
    assert here != there
    assert place_in_words(here) == place_in_words(there)
    assert place_in_words(destination_of(store.url("out/deeper"))).parent == place_in_words(there)
    assert place_in_words(tmp_path) == tmp_path


def test_credentials_are_not_shown() -> None:
    assert shown_destination("s3://key:secret@bucket/out") == "s3://bucket/out"
    with pytest.raises(UsageError) as caught:
        refuse_for_urls("s3://key:secret@bucket/out", shared=True)
    assert "secret" not in caught.value.message


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(UsageError, match="`s3://bucket/out` needs the package s3fs") as caught:
        destination_of("s3://bucket/out")
    assert caught.value.hint == "pip install 'fsdp-ckpt[s3]'"
