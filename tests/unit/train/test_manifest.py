from __future__ import annotations

import itertools
import json
import zlib
from pathlib import Path
from typing import Any

import pytest

from fsdp_ckpt.errors import MalformedFile
from fsdp_ckpt.layouts.manifest import MANIFEST, Manifest, Member, check_files, read_manifest, write_manifest
from fsdp_ckpt.store.local import Folder, LocalStore

FULL = Manifest(
    save_id="0123abcd",
    step=7,
    world_size=4,
    state_dict_type="SHARDED_STATE_DICT",
    created="2026-01-02T03:04:05+00:00",
    versions={"torch": "2.13.0"},
    models=[Member(name="é ∂", part="pytorch_model_fsdp_0", kind="FSDP2", facts={"mesh": {"shape": [2, 2]}})],
    optimizers=[Member(name="0", part="optimizer_0", kind="AdamW", of=["é ∂"])],
    schedulers=[Member(name="0", part="scheduler")],
    dataloaders=[Member(name="train", part="dl_states")],
    objects=[Member(name="ema", part="custom_checkpoint_0")],
    has_rng=True,
    values={"loss": 0.25, "list": [1, None, True], "nested": {"a": "b"}},
    files={"pytorch_model_fsdp_0/__0_0.distcp": (3, "0000abcd"), "scheduler.bin": (1, "ffffffff")},
)


def _folder(path: Path, content: Any) -> Folder:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    (path / MANIFEST).write_bytes(data)
    return Folder(LocalStore(path))


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    found = read_manifest(_folder(tmp_path, write_manifest(FULL)))
    assert found is not None
    for name in ("save_id", "step", "world_size", "created", "versions", "has_rng", "values", "files"):
        assert getattr(found, name) == getattr(FULL, name)
    assert [(member.name, member.facts) for member in found.models] == [("é ∂", {"mesh": {"shape": [2, 2]}})]
    assert [(member.part, member.kind, list(member.of)) for member in found.optimizers] == [
        ("optimizer_0", "AdamW", ["é ∂"])
    ]
    assert write_manifest(found) == write_manifest(FULL)


def test_the_file_is_plain_json_for_others(tmp_path: Path) -> None:
    data = json.loads(write_manifest(FULL))
    assert data["format"] == "fsdp-ckpt/checkpoint/2"
    assert data["files"]["scheduler.bin"] == {"bytes": 1, "crc32": "ffffffff"}
    assert data["models"][0]["name"] == "é ∂"
    assert (data["step"], data["world_size"], data["values"]["list"]) == (7, 4, [1, None, True])


def test_a_folder_without_one_has_none(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    assert read_manifest(Folder(LocalStore(tmp_path))) is None


@pytest.mark.parametrize("value", [{1, 2}, object()])
def test_values_that_json_lacks_are_refused(value: Any) -> None:
    import dataclasses

    with pytest.raises((TypeError, ValueError)):
        write_manifest(dataclasses.replace(FULL, values={"x": value}))


def _changed(**changes: Any) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(write_manifest(FULL)) | changes
    del data["crc32"]
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return data | {"crc32": f"{zlib.crc32(text.encode()):08x}"}


BROKEN: dict[str, Any] = {
    "empty": b"",
    "cut short": write_manifest(FULL)[:-40],
    "no text": b"\xff\xfe\x00",
    "a list": [],
    "a number": 5,
    "nested without end": b"[" * 100_000,
    "another version": _changed(format="fsdp-ckpt/checkpoint/3"),
    "no format": {"step": 1},
    "world size 0": _changed(world_size=0),
    "world size true": _changed(world_size=True),
    "step a text": _changed(step="7"),
    "files a list": _changed(files=["a"]),
    "a size below 0": _changed(files={"a": {"bytes": -1, "crc32": "00000000"}}),
    "a size that is a text": _changed(files={"a": {"bytes": "1", "crc32": "00000000"}}),
    "no checksum": _changed(files={"a": {"bytes": 1}}),
    "a checksum that is none": _changed(files={"a": {"bytes": 1, "crc32": "zz"}}),
    "models a text": _changed(models="all"),
    "a model without a part": _changed(models=[{"name": "0"}]),
    "values a number": _changed(values=5),
}


def test_one_of_the_first_format_is_read_without_a_checksum_of_its_own(tmp_path: Path) -> None:
    data = json.loads(write_manifest(FULL)) | {"format": "fsdp-ckpt/checkpoint/1"}
    del data["crc32"]
    found = read_manifest(_folder(tmp_path, data))
    assert found is not None
    assert found.step == 7


def test_a_changed_byte_is_noticed_wherever_it_says_something(tmp_path: Path) -> None:
    data = write_manifest(FULL)
    said = json.loads(data)
    for position, bit in itertools.product(range(len(data)), range(8)):
        changed = bytearray(data)
        changed[position] ^= 1 << bit
        try:
            same = json.loads(changed) == said
        except ValueError:
            continue  # refused as no JSON
        if not same:
            with pytest.raises(MalformedFile):
                read_manifest(_folder(tmp_path, bytes(changed)))


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_one_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(MalformedFile, match=MANIFEST):
        read_manifest(_folder(tmp_path, BROKEN[name]))


def test_an_absent_step_is_none(tmp_path: Path) -> None:
    found = read_manifest(_folder(tmp_path, _changed(step=None)))
    assert found is not None
    assert found.step is None


def test_files_that_lack_or_have_another_size_are_problems(tmp_path: Path) -> None:
    (tmp_path / "scheduler.bin").write_bytes(b"12")
    folder = _folder(tmp_path, write_manifest(FULL))
    problems = check_files(folder, FULL)
    assert [(problem.code, problem.where) for problem in problems] == [
        ("missing-file", "pytorch_model_fsdp_0/__0_0.distcp"),
        ("wrong-size", "scheduler.bin"),
    ]
    assert "has 2 bytes, the manifest says 1" in problems[1].message
    (tmp_path / "scheduler.bin").write_bytes(b"1")
    (tmp_path / "pytorch_model_fsdp_0").mkdir()
    (tmp_path / "pytorch_model_fsdp_0" / "__0_0.distcp").write_bytes(b"123")
    assert check_files(Folder(LocalStore(tmp_path)), FULL) == []
