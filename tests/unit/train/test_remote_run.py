"""A Checkpointer whose run is at a URL: what it resumes from, what it removes, and in which order."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_ckpt import Checkpointer, latest_complete, load_state
from fsdp_ckpt.errors import IncompleteCheckpoint, StateMismatch, Unreachable, UsageError
from fsdp_ckpt.layouts.manifest import MANIFEST
from tests.unit.train.remote_store import Store, make_store, small_job

URL = "memory://bucket/run"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Store]:
    yield from make_store(monkeypatch, tmp_path)
    assert not [path for path in (tmp_path / "tmp").iterdir() if path.name.startswith("fsdp-ckpt-prune")]


def _save(values: dict[int, Any], **rule: Any) -> Checkpointer:
    model, optimizer = small_job()
    checkpointer = Checkpointer(URL, model, optimizer, **rule)
    for step, loss in values.items():
        checkpointer.save(step, values={} if loss is None else {"loss": loss})
    return checkpointer


def _steps(store: Store) -> list[str]:
    return sorted({name.split("/")[0] for name in store.names("run")})


def _resumed(**options: Any) -> Any:
    return Checkpointer(URL, *small_job(9), **options).resume()


def test_an_empty_place_is_an_empty_run(store: Store) -> None:
    assert _resumed() is None
    assert latest_complete(URL) is None
    assert repr(Checkpointer(URL + "/", keep=2)) == "Checkpointer('memory://bucket/run', keep=2)"
    assert Checkpointer(URL).path(5) == "memory://bucket/run/step-5"
    assert store.names() == []


def test_the_newest_is_resumed_with_its_values(store: Store) -> None:
    _save({9: 0.5, 10: 0.4})
    report = _resumed()
    assert (report.step, report.path, report.values) == (10, f"{URL}/step-10", {"loss": 0.4})
    assert latest_complete(URL) == f"{URL}/step-10"
    assert load_state(URL, *small_job(9)).step == 10


def test_the_last_the_round_and_the_best_stay(store: Store) -> None:
    values = {0: 9.0, 100: 0.5, 200: 0.2, 300: 0.4, 400: 0.3, 500: float("nan"), 600: None, 1000: 0.9, 1100: 0.8}
    _save(values, keep=2, keep_every=500, keep_best="loss:min=2")
    assert _steps(store) == ["step-0", "step-1000", "step-1100", "step-200", "step-400", "step-500"]


def test_a_new_process_knows_what_an_earlier_one_saved(store: Store) -> None:
    _save({1: 0.5, 2: 0.1, 3: 0.6}, keep=5, keep_best="loss")
    _save({4: 0.2}, keep=1, keep_best="loss")
    assert _steps(store) == ["step-2", "step-4"]


def test_a_step_that_is_saved_again_counts_with_its_new_value(store: Store) -> None:
    checkpointer = _save({1: 0.1, 2: 0.2}, keep=1, keep_best="loss")
    assert _steps(store) == ["step-1", "step-2"]
    checkpointer.save(1, values={"loss": 0.9})
    checkpointer.save(3, values={"loss": 0.5})
    assert _steps(store) == ["step-2", "step-3"]


def test_the_manifest_goes_first_and_beside_a_mark(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    _save({1: None})
    seen: list[tuple[str, list[str]]] = []
    real = type(store.fs).rm_file

    def rm_file(self: Any, path: str) -> None:
        seen.append((path.rpartition("step-1/")[2], store.names("run/step-1")))
        real(self, path)

    monkeypatch.setattr(type(store.fs), "rm_file", rm_file)
    _save({2: None}, keep=1)
    removed = [(name, names) for name, names in seen if "step-2" not in name]
    assert removed[0][0] == MANIFEST
    assert {name for name, _ in removed[1:3]} == {"optimizer_0/.metadata", "pytorch_model_fsdp_0/.metadata"}
    assert removed[-1][0].startswith(".removing.fsdp-ckpt-")
    for _, names in removed:
        assert removed[-1][0] in names, "what is left is marked as long as it is there"
    assert _steps(store) == ["step-2"]


def test_a_removal_that_was_cut_off_leaves_no_checkpoint_and_is_ended(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _save({1: None, 2: None})
    real, calls = type(store.fs).rm_file, [0]

    def rm_file(self: Any, path: str) -> None:
        calls[0] += "step-1/" in path
        if calls[0] > 1:
            raise PermissionError("no")
        real(self, path)

    monkeypatch.setattr(type(store.fs), "rm_file", rm_file)
    with caplog.at_level(logging.WARNING, "fsdp_ckpt"):
        _save({3: None}, keep=2)
    monkeypatch.undo()
    assert "could not remove old checkpoints in memory://bucket/run" in caplog.text
    assert MANIFEST not in store.names("run/step-1")
    with pytest.raises(IncompleteCheckpoint):
        load_state(f"{URL}/step-1", *small_job(9))
    _save({4: None}, keep=2)
    assert _steps(store) == ["step-3", "step-4"]


def test_what_is_not_ours_or_not_whole_is_never_removed(store: Store) -> None:
    _save({1: None, 2: None, 3: None})
    store.remove("run/step-2/random_states_0.pkl")
    store.put("run/step-3/fsdp_ckpt.json", b"{")
    store.put("run/checkpoint-4/model.safetensors")
    store.put("run/step-05/fsdp_ckpt.json")
    store.put("run/notes.txt")
    store.put("run/step-0/.saving.fsdp-ckpt-00", json.dumps({"files": ["random_states_0.pkl"]}).encode())
    store.put("run/step-0/random_states_0.pkl")
    before = set(store.names("run"))
    _save({6: None}, keep=1)
    gone = before - set(store.names("run"))
    assert gone
    assert all(name.startswith("step-1/") for name in gone)


def test_newer_ones_stay(store: Store) -> None:
    """Of a run that was rolled back."""
    _save({5: None})
    _save({1: None, 2: None}, keep=1)
    assert _steps(store) == ["step-2", "step-5"]


def test_incomplete_and_damaged_ones_are_passed_over(store: Store) -> None:
    _save({1: None, 2: None, 3: None, 4: None})
    store.remove(f"run/step-4/{MANIFEST}")
    store.put("run/step-4/.saving.fsdp-ckpt-00", b"{}")
    store.remove("run/step-3/optimizer_0/__0_0.distcp")
    name = "run/step-2/pytorch_model_fsdp_0/__0_0.distcp"
    data = bytearray(store.get(name))
    data[data.index(small_job()[0].state_dict()["weight"].numpy().tobytes())] ^= 1
    store.put(name, bytes(data))
    report = _resumed()
    assert report.step == 1
    passed = [text.split(":")[0] for text in report.warnings]
    assert passed == ["passed over step-4", "passed over step-3", "passed over step-2"]
    assert "did not end" in report.warnings[0]


def test_when_none_can_be_used_training_does_not_begin_anew(store: Store) -> None:
    _save({1: None})
    store.remove("run/step-1/optimizer_0/__0_0.distcp")
    with pytest.raises(IncompleteCheckpoint, match="`memory://bucket/run` holds no checkpoint that can be used"):
        _resumed()


def test_a_store_that_does_not_answer_is_no_empty_run(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    _save({1: None})

    def find(*_: Any, **__: Any) -> None:
        raise PermissionError("no")

    monkeypatch.setattr(type(store.fs), "find", find)
    with pytest.raises(Unreachable, match="`memory://bucket/run`: access is denied"):
        _resumed()


def test_a_checkpoint_that_cannot_be_fetched_is_not_passed_over(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Going on from an older one would throw away what was trained since."""
    _save({1: None, 2: None})
    real = type(store.fs).cat_file

    def cat_file(self: Any, path: str, *arguments: Any, **options: Any) -> Any:
        if "step-2/optimizer" in path:
            raise PermissionError("no")
        return real(self, path, *arguments, **options)

    monkeypatch.setattr(type(store.fs), "cat_file", cat_file)
    with pytest.raises(Unreachable, match="access is denied"):
        _resumed()


def test_another_model_is_an_error_and_not_passed_over(store: Store) -> None:
    _save({1: None, 2: None})
    with pytest.raises(StateMismatch):
        Checkpointer(URL, torch.nn.Linear(5, 3)).resume()


def test_a_checkpoint_is_no_run(store: Store) -> None:
    _save({1: None})
    with pytest.raises(UsageError, match="`memory://bucket/run/step-1` is a checkpoint, not the folder of a run"):
        Checkpointer(f"{URL}/step-1", *small_job()).resume()
    with pytest.raises(UsageError, match="`memory://bucket/run/step-1` is a checkpoint, not the folder of a run"):
        latest_complete(f"{URL}/step-1")


def test_a_run_that_was_uploaded_goes_on(store: Store, tmp_path: Path) -> None:
    model, optimizer = small_job()
    with Checkpointer(tmp_path / "local", model, optimizer, durable=False) as local:
        local.save(1)
        local.save(2)
    store.upload(tmp_path / "local", "run")
    assert _resumed().step == 2
    _save({3: None}, keep=1)
    assert _steps(store) == ["step-3"]
