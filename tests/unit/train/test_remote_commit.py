"""What a save to a URL replaces, what it refuses, and what is left when it fails."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_ckpt import inspect, latest_complete, load_state, save_state
from fsdp_ckpt.errors import DestinationExists, FsdpCkptError, IncompleteCheckpoint, NotEnoughSpace, UsageError
from fsdp_ckpt.layouts.manifest import MANIFEST
from fsdp_ckpt.train import remote_commit
from fsdp_ckpt.train.remote_objects import Objects
from tests.unit.train.remote_store import Store, make_store, small_job

URL = "memory://bucket/run/step-1"
FILES = {
    MANIFEST, "optimizer_0/.metadata", "optimizer_0/__0_0.distcp", "pytorch_model_fsdp_0/.metadata",
    "pytorch_model_fsdp_0/__0_0.distcp", "random_states_0.pkl",
}  # fmt: skip
MARK = ".saving.fsdp-ckpt-0123456789abcdef"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Store]:
    yield from make_store(monkeypatch, tmp_path)
    assert not [path for path in (tmp_path / "tmp").iterdir() if path.name.startswith("fsdp-ckpt-save")]


def _saved(seed: int, **options: Any) -> Any:
    return save_state(URL, *small_job(seed), **options)


def _loads(seed: int) -> bool:
    model, optimizer = small_job(99)
    load_state(URL, model, optimizer)
    return torch.equal(model.state_dict()["weight"], small_job(seed)[0].state_dict()["weight"])


def test_what_is_saved_is_what_is_listed(store: Store) -> None:
    report = _saved(1, step=7)
    assert set(store.names("run/step-1")) == FILES == set(report.files)
    assert report.files == {name: len(store.get(f"run/step-1/{name}")) for name in FILES}
    assert report.path == URL
    assert inspect(URL).complete
    listed = json.loads(store.get(f"run/step-1/{MANIFEST}"))["files"]
    assert {name: entry["bytes"] for name, entry in listed.items()} | {MANIFEST: report.files[MANIFEST]} == report.files


def test_whole_state_dicts_are_saved_as_well(store: Store) -> None:
    _saved(1, state_dict_type="FULL_STATE_DICT")
    assert {"pytorch_model_fsdp.bin", "optimizer.bin"} < set(store.names("run/step-1"))
    assert _loads(1)


def test_a_checkpoint_is_replaced_and_nothing_of_it_is_left(store: Store) -> None:
    _saved(1, state_dict_type="FULL_STATE_DICT")
    _saved(2)
    assert set(store.names("run/step-1")) == FILES
    assert _loads(2)


def test_a_checkpoint_is_not_replaced_unless_that_is_allowed(store: Store) -> None:
    _saved(1)
    with pytest.raises(DestinationExists, match=f"`{URL}` exists") as caught:
        _saved(2, overwrite=False)
    assert caught.value.hint == "pass overwrite=True to replace it"
    assert _loads(1)


@pytest.mark.parametrize("name", ["run/step-1/notes.txt", "run/step-1/optimizer_0/mine"])
def test_what_is_no_part_of_a_checkpoint_is_never_replaced(store: Store, name: str) -> None:
    _saved(1)
    store.put(name)
    with pytest.raises(DestinationExists, match=f"`{URL}` holds `{name.removeprefix('run/step-1/')}`"):
        _saved(2)
    assert _loads(1)


def test_an_object_of_that_name_is_not_replaced(store: Store) -> None:
    store.put("run/step-1", b"mine")
    with pytest.raises(DestinationExists, match=f"`{URL}` is a file"):
        _saved(1)
    assert store.get("run/step-1") == b"mine"


def _dead(store: Store) -> None:
    """What a save that was killed between the last data and the manifest has left."""
    _saved(1)
    names = store.names("run/step-1")
    store.remove(f"run/step-1/{MANIFEST}")
    store.put(f"run/step-1/{MARK}", json.dumps({"files": names}).encode())


def test_what_a_dead_save_has_left_is_no_checkpoint(store: Store) -> None:
    _dead(store)
    assert latest_complete("memory://bucket/run") is None
    assert not inspect(URL).complete
    with pytest.raises(IncompleteCheckpoint, match="the save to this place did not end"):
        _loads(1)


def test_what_a_dead_save_has_left_is_in_nobodys_way(store: Store) -> None:
    _dead(store)
    _saved(2, overwrite=False)
    assert set(store.names("run/step-1")) == FILES
    assert _loads(2)


@pytest.mark.parametrize("mark", [b"{", b"[]", b'{"files": 3}', b'{"files": ["../other"]}'])
def test_a_mark_that_says_nothing_allows_nothing(store: Store, mark: bytes) -> None:
    store.put("run/step-1/mine")
    store.put("run/other")
    store.put(f"run/step-1/{MARK}", mark)
    with pytest.raises(DestinationExists, match="holds `mine`"):
        _saved(2)
    assert store.names("run") == ["other", f"step-1/{MARK}", "step-1/mine"]


def _break(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, error: BaseException, *, after: int = 0) -> None:
    real, calls = getattr(place, name), [0]

    def broken(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] > after:
            raise error
        return real(*arguments, **options)

    monkeypatch.setattr(place, name, broken)


def test_when_the_local_disk_is_full_nothing_has_changed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    _saved(1)
    full = OSError(errno.ENOSPC, "No space left on device")
    _break(monkeypatch, remote_commit, "write_files", NotEnoughSpace(str(full)))
    with pytest.raises(NotEnoughSpace) as caught:
        _saved(2)
    assert "TMPDIR" in (caught.value.hint or "")
    assert set(store.names("run/step-1")) == FILES
    assert _loads(1)


@pytest.mark.parametrize("after", [0, 1, 2, 4])
def test_when_an_upload_fails_nothing_is_left(store: Store, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """The mark is the first object, two of this rank's come next, then the metadata."""
    _break(monkeypatch, type(store.fs), "put_file", PermissionError("no"), after=after)
    with pytest.raises(FsdpCkptError, match=rf"`{URL}.*access is denied"):
        _saved(1)
    assert store.names() == []


def test_when_the_manifest_fails_nothing_is_left(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where it did arrive, and only the answer was lost."""
    real = type(store.fs).put_file

    def put_file(self: Any, lpath: str, rpath: str, **options: Any) -> None:
        real(self, lpath, rpath, **options)
        if rpath.endswith(MANIFEST):
            raise PermissionError("no")

    monkeypatch.setattr(type(store.fs), "put_file", put_file)
    with pytest.raises(FsdpCkptError, match="access is denied"):
        _saved(1)
    assert store.names() == []


def test_when_the_old_one_cannot_be_taken_down_it_is_no_checkpoint_any_more(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    _saved(1)
    _break(monkeypatch, type(store.fs), "rm_file", PermissionError("no"), after=2)
    with pytest.raises(FsdpCkptError, match="access is denied"):
        _saved(2)
    monkeypatch.undo()
    assert MANIFEST not in store.names("run/step-1")
    assert latest_complete("memory://bucket/run") is None
    _saved(3)
    assert set(store.names("run/step-1")) == FILES


def _meanwhile(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Let something happen when everything but the manifest is there."""
    real = Objects.now

    def now(self: Objects) -> dict[str, int]:
        act()
        return real(self)

    monkeypatch.setattr(Objects, "now", now)


def test_two_jobs_that_save_to_one_place_are_told(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    _meanwhile(monkeypatch, lambda: store.put(f"run/step-1/{MARK}"))
    with pytest.raises(DestinationExists, match=f"another job is saving to `{URL}`"):
        _saved(1)
    assert set(store.names("run/step-1")) == {*FILES - {MANIFEST}, MARK}, "what may be the other's stays"


def test_an_object_that_got_lost_is_noticed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    _meanwhile(monkeypatch, lambda: store.put("run/step-1/optimizer_0/__0_0.distcp", b"half"))
    with pytest.raises(IncompleteCheckpoint, match=r"optimizer_0/__0_0.distcp has 4 bytes there, and \d+ here"):
        _saved(1)
    assert store.names() == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("hf://user/repo/step-1", "the Hub takes whole commits"),
        ("memory://bucket//step-1", "no place to save to"),
        ("memory://bucket/../step-1", "no place to save to"),
        ("s3://key:secret@bucket/step-1", r"`s3://bucket/step-1`: there are credentials in the URL"),
        ("ftp://host/step-1", "the scheme `ftp` is not supported"),
    ],
)
def test_urls_that_cannot_be_saved_to(store: Store, url: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        save_state(url, *small_job())
    assert "secret" not in str(caught.value)
    assert store.names() == []


def test_a_process_that_ends_waits_for_its_upload() -> None:
    """Uploading begins threads, which Python forbids once the end of the process waits for threads."""
    program = """
import atexit, fsspec, time, torch
from fsdp_ckpt import save_state
from fsdp_ckpt.train import remote_commit
real = remote_commit.write_files
remote_commit.write_files = lambda *args, **options: (time.sleep(1), real(*args, **options))[1]
atexit.register(lambda: print(sorted(name.rpartition("/")[2] for name in fsspec.filesystem("memory").find("/bucket"))))
save_state("memory://bucket/ck", torch.nn.Linear(2, 2), async_save=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert done.stdout.strip() == "['.metadata', '__0_0.distcp', 'fsdp_ckpt.json', 'random_states_0.pkl']", done.stderr
