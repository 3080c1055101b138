"""What a load takes from a store, and what it says when something is wrong there."""

from __future__ import annotations

import copy
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fsdp_ckpt import load_state, save_state
from fsdp_ckpt.errors import ChecksumMismatch, IncompleteCheckpoint, StateMismatch, Unreachable
from tests.unit.train.remote_store import Store, make_store, small_job

URL = "memory://bucket/run/step-1"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Store]:
    yield from make_store(monkeypatch, tmp_path)


@pytest.fixture
def fetched(store: Store, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes that were fetched of each object, by the last part of its name."""
    found: Counter[str] = Counter()
    real = type(store.fs).cat_file

    def cat_file(self: Any, path: str, start: int | None = None, end: int | None = None, **options: Any) -> Any:
        data = real(self, path, start, end, **options)
        found[path.rpartition("/")[2]] += len(data)
        return data

    monkeypatch.setattr(type(store.fs), "cat_file", cat_file)
    return found


def _same(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def test_every_byte_of_the_data_is_fetched_once(store: Store, fetched: Counter[str], tmp_path: Path) -> None:
    model = nn.Linear(2048, 2560)
    save_state(URL, model, rng=False)
    fetched.clear()
    other = nn.Linear(2048, 2560)
    report = load_state(URL, other)
    assert _same(other, model)
    assert report.verified_bytes >= 20 << 20, "all of it was read twice"
    assert fetched["__0_0.distcp"] < 1.1 * len(store.get("run/step-1/pytorch_model_fsdp_0/__0_0.distcp"))
    assert not any((tmp_path / "tmp").iterdir()), "and it does not stay on the local disk"


def test_without_room_on_the_local_disk_it_is_fetched_twice(
    store: Store, fetched: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2048, 2560)
    save_state(URL, model, rng=False)
    fetched.clear()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    other = nn.Linear(2048, 2560)
    load_state(URL, other)
    assert _same(other, model)
    assert fetched["__0_0.distcp"] > 1.6 * len(store.get("run/step-1/pytorch_model_fsdp_0/__0_0.distcp"))


def test_what_is_not_asked_for_is_not_fetched(store: Store, fetched: Counter[str], tmp_path: Path) -> None:
    weights = {"small.weight": torch.randn(8, 8), "large.weight": torch.randn(1024, 1024)}
    save_file(weights, tmp_path / "model.safetensors")
    store.put("weights/model.safetensors", (tmp_path / "model.safetensors").read_bytes())
    model = nn.ModuleDict({"small": nn.Linear(8, 8, bias=False), "large": nn.Linear(1024, 1024, bias=False)})
    report = load_state("memory://bucket/weights/model.safetensors", model, include=["small.*"])
    assert torch.equal(model.state_dict()["small.weight"], weights["small.weight"])
    assert report.path == "memory://bucket/weights/model.safetensors"
    assert fetched["model.safetensors"] < 200_000


def test_a_flipped_bit_is_found_before_anything_is_changed(store: Store) -> None:
    model, optimizer = small_job()
    save_state(URL, model, optimizer)
    name = "run/step-1/pytorch_model_fsdp_0/__0_0.distcp"
    data = bytearray(store.get(name))
    data[data.index(model.state_dict()["weight"].numpy().tobytes()) + 5] ^= 1
    store.put(name, bytes(data))
    other, fresh = small_job(1)
    before = copy.deepcopy(other)
    with pytest.raises(ChecksumMismatch, match="weight"):
        load_state(URL, other, fresh)
    assert _same(other, before)


def test_files_of_two_saves_are_not_mixed(store: Store) -> None:
    for step in (1, 2):
        save_state(f"memory://bucket/run/step-{step}", *small_job(step))
    stray = "pytorch_model_fsdp_0/__0_0.distcp"
    store.put(f"run/step-2/{stray}", store.get(f"run/step-1/{stray}"))
    with pytest.raises(IncompleteCheckpoint, match="is of another save") as caught:
        load_state("memory://bucket/run/step-2", *small_job(3))
    assert "`memory://bucket/run/step-2`" in str(caught.value)
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("fsdp-ckpt validate memory://bucket/run/step-2;")


def test_a_file_that_is_missing_is_named_with_its_url(store: Store) -> None:
    save_state(URL, *small_job())
    store.remove("run/step-1/optimizer_0/__0_0.distcp")
    with pytest.raises(IncompleteCheckpoint, match=r"`memory://bucket/run/step-1` is incomplete.*optimizer_0/__0_0"):
        load_state(URL, *small_job(1))


def test_a_flipped_bit_in_the_metadata_is_no_attack(store: Store) -> None:
    save_state(URL, *small_job())
    name = "run/step-1/optimizer_0/.metadata"
    data = bytearray(store.get(name))
    data[len(data) // 2] ^= 4
    store.put(name, bytes(data))
    with pytest.raises(ChecksumMismatch, match=r"`memory://bucket/run/step-1`: optimizer_0/.metadata is damaged"):
        load_state(URL, *small_job(1))


def test_other_shapes_are_named_as_for_a_local_checkpoint(store: Store) -> None:
    save_state(URL, nn.Linear(4, 3))
    with pytest.raises(StateMismatch, match=r"\(3, 4\)") as caught:
        load_state(URL, nn.Linear(5, 3))
    assert caught.value.mismatched


def test_the_newest_whole_one_of_a_run_is_taken(store: Store) -> None:
    for step in (1, 2, 3):
        save_state(f"memory://bucket/run/step-{step}", *small_job(step), step=step)
    store.remove("run/step-3/optimizer_0/__0_0.distcp")
    model, optimizer = small_job(9)
    report = load_state("memory://bucket/run", model, optimizer)
    assert (report.path, report.step) == ("memory://bucket/run/step-2", 2)
    assert _same(model, small_job(2)[0])
    assert report.warnings == ["passed over: step-3 (incomplete)"]


def test_nothing_there_is_said_with_the_url(store: Store) -> None:
    store.put("other/file")
    with pytest.raises(Unreachable, match=r"`memory://bucket/run/step-1` does not exist"):
        load_state(URL, *small_job())


def test_a_local_checkpoint_that_was_uploaded_loads(store: Store, tmp_path: Path) -> None:
    model, optimizer = small_job()
    save_state(tmp_path / "ck", model, optimizer, durable=False)
    url = store.upload(tmp_path / "ck", "copied")
    other, fresh = small_job(1)
    assert load_state(url, other, fresh).path == url
    assert _same(other, model)
    assert not [name for name in os.listdir(tmp_path / "tmp") if name.startswith("fsdp-ckpt")]
