"""Side files for a folder of transformers: from a folder, from the hub's cache, from the hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdp_ckpt.errors import CheckpointNotFound, Unreachable, UsageError
from fsdp_ckpt.ops.conversion.hf_side import export_side_files

CONFIG = {"model_type": "llama"}


def folder(path: Path, *names: str) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    for name in names:
        (path / name).write_text(f"{path.name}/{name}")
    return path


def test_beside_the_checkpoint_without_what_makes_it_an_adapter(tmp_path: Path) -> None:
    source = folder(
        tmp_path / "run", "tokenizer.json", "tokenizer_config.json", "adapter_config.json", "model.safetensors"
    )
    found = export_side_files(None, [source])
    assert sorted(found.files) == ["config.json", "tokenizer.json", "tokenizer_config.json"]
    assert (found.config, found.missing) == (CONFIG, ())


def test_from_a_folder_that_is_named(tmp_path: Path) -> None:
    source = folder(tmp_path / "run", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
    other = folder(tmp_path / "base", "tokenizer_config.json", "model.safetensors.index.json", "model.safetensors")
    found = export_side_files(str(other), [source])
    assert {name: path.parent.name for name, path in found.files.items()} == {
        "config.json": "base",
        "tokenizer_config.json": "base",
    }


def test_the_tokenizer_of_the_checkpoint_where_the_folder_has_none(tmp_path: Path) -> None:
    source = folder(tmp_path / "run", "tokenizer.json", "tokenizer_config.json")
    found = export_side_files(str(folder(tmp_path / "base", "generation_config.json")), [source])
    assert {name: path.parent.name for name, path in found.files.items()} == {
        "config.json": "base",
        "generation_config.json": "base",
        "tokenizer.json": "run",
        "tokenizer_config.json": "run",
    }
    assert found.missing == ()


def test_links_lead_into_the_cache_and_nowhere_else(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("key")
    snapshot = tmp_path / "models--a--b/snapshots/0123"
    blobs = tmp_path / "models--a--b/blobs"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "c0ffee").write_text(json.dumps(CONFIG))
    (snapshot / "config.json").symlink_to("../../blobs/c0ffee")
    (snapshot / "tokenizer.json").symlink_to(secret)
    assert list(export_side_files(str(snapshot), []).files) == ["config.json"]
    plain = folder(tmp_path / "plain")
    (plain / "tokenizer.model").symlink_to(secret)
    assert list(export_side_files(str(plain), []).files) == ["config.json"]


def test_from_the_hub_by_way_of_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The layout of the cache is that of huggingface_hub: refs name a commit, snapshots link to blobs.
    commit = "0123456789abcdef0123456789abcdef01234567"
    home = tmp_path / "hub/models--owner--name"
    snapshot = home / "snapshots" / commit
    for part in (home / "refs", home / "blobs", snapshot):
        part.mkdir(parents=True)
    (home / "refs/main").write_text(commit)
    for name, text in {
        "config.json": json.dumps(CONFIG),
        "tokenizer_config.json": "{}",
        "model.safetensors": "x",
    }.items():
        (home / "blobs" / name).write_text(text)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    for name in ("owner/name", f"owner/name@{commit}"):
        found = export_side_files(name, [])
        assert sorted(found.files) == ["config.json", "tokenizer_config.json"]
        assert found.config == CONFIG
    with pytest.raises(Unreachable, match="`owner/other` is no folder here") as caught:
        export_side_files("owner/other", [])
    assert caught.value.exit_code == 7
    assert "--config-from DIR" in (caught.value.hint or "")


@pytest.mark.parametrize("name", ["./no/such", "/no/such", "no/such/folder", "a b", "../x"])
def test_what_is_neither_a_folder_nor_on_the_hub(name: str) -> None:
    with pytest.raises(CheckpointNotFound, match="there is no folder"):
        export_side_files(name, [])


def test_without_configuration(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no config\.json") as caught:
        export_side_files(None, [tmp_path])
    assert "--config-from" in (caught.value.hint or "")
    with pytest.raises(CheckpointNotFound, match=r"no config\.json in"):
        export_side_files(str(tmp_path), [])
