"""A checkpoint that ``save_state`` wrote stays one where only its sharding changes; else what is lost is said."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from fsdp_ckpt import convert, latest_complete, load_state, reshard, validate
from fsdp_ckpt.errors import ChecksumMismatch
from tests.unit.ops.saved_by_us import save_small


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_small(tmp_path / "src" / "step-7")


def _manifest(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "fsdp_ckpt.json").read_text())
    return found


def _load(path: Path) -> tuple[dict[str, torch.Tensor], int | None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 5))
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        step = load_state(path, model, optimizer).step
        state = {name: value.full_tensor() for name, value in model.state_dict().items()}
        moments = {
            f"{number}.exp_avg": kinds["exp_avg"].full_tensor()
            for number, kinds in optimizer.state_dict()["state"].items()
        }
        return state | moments, step
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("way", ["sharded", "full", "full and back"])
def test_another_form_keeps_step_and_members(way: str, saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "run" / "anything"
    if way == "sharded":
        report = convert(saved, out, to="accelerate", world_size=3)
    else:
        report = convert(saved, out, to="accelerate", full=True)
    if way == "full and back":
        convert(out, tmp_path / "back", to="accelerate", world_size=2)
        out = tmp_path / "back"
    assert report.warnings == []
    old, new = _manifest(saved), _manifest(out)
    for name in ("step", "values", "models", "optimizers", "created", "world_size"):
        assert new[name] == old[name]
    assert new["save_id"] != old["save_id"]
    assert new["state_dict_type"] == ("FULL_STATE_DICT" if way == "full" else "SHARDED_STATE_DICT")
    files = {path.relative_to(out).as_posix(): path for path in out.rglob("*") if path.is_file()}
    files.pop("fsdp_ckpt.json")
    assert new["files"] == {
        name: {"bytes": path.stat().st_size, "crc32": f"{zlib.crc32(path.read_bytes()):08x}"}
        for name, path in files.items()
    }
    assert validate(out, level="deep").errors == 0
    wanted, found = _load(saved), _load(out)
    assert found[1] == wanted[1] == 7
    assert found[0].keys() == wanted[0].keys()
    assert all(torch.equal(found[0][name], tensor) for name, tensor in wanted[0].items())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"dtype": "bfloat16"}, "names or values change"),
        ({"exclude": ["1.*"]}, "names or values change"),
        ({"rename": ["0.=first."]}, "names or values change"),
        ({"part": "model"}, "not everything is in the result"),
        ({"to": "dcp"}, "--to dcp has no place for it"),
        ({"to": "torch"}, "--to torch has no place for it"),
    ],
)
def test_what_is_lost_otherwise_is_said(options: dict[str, Any], why: str, saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = convert(saved, out, **{"to": "accelerate", **options})
    assert [text for text in report.warnings if why in text] == [
        text for text in report.warnings if text.startswith("fsdp_ckpt.json stays behind (step 7, the list of files)")
    ]
    assert any(why in text for text in report.warnings)
    assert not (out / "fsdp_ckpt.json").exists()
    assert validate(out, level="deep").errors == 0


def test_a_result_without_manifest_is_not_taken_for_one_of_ours_that_lost_it(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "run" / "step-7"
    convert(saved, out, to="accelerate", world_size=2, dtype="float64")
    report = validate(out, level="deep")
    assert [(finding.name, finding.severity) for finding in report.findings] == [("missing-rng", "warning")]
    assert latest_complete(tmp_path / "run") == out


@pytest.mark.parametrize("way", [lambda src, out: convert(src, out, to="accelerate"), lambda s, o: reshard(s, o, 2)])
def test_a_file_that_comes_along_is_compared_with_its_manifest(way: Any, saved: Path, tmp_path: Path) -> None:
    (file,) = saved.glob("random_states_*.pkl")
    sound = file.read_bytes()
    file.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    with pytest.raises(
        ChecksumMismatch, match=rf"`{file.name}` is damaged: it has CRC-32 {zlib.crc32(file.read_bytes()):08x}"
    ):
        way(saved, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    file.write_bytes(sound)
    way(saved, tmp_path / "out")
    assert (tmp_path / "out" / file.name).read_bytes() == sound


def test_a_file_that_cannot_be_read_is_copied_with_a_word(tmp_path: Path) -> None:
    src = tmp_path / "src"
    src.mkdir()
    torch.save({"w": torch.ones(3)}, src / "pytorch_model_fsdp.bin")
    torch.save({"last_epoch": 1}, src / "scheduler.bin")
    whole = (src / "scheduler.bin").read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"no archive at all"):
        (src / "scheduler.bin").write_bytes(content)
        report = convert(src, tmp_path / "out", to="accelerate", overwrite=True)
        assert len(report.warnings) == 1
        assert report.warnings[0].startswith("scheduler.bin is copied as it is, but cannot be read: ")
        assert (tmp_path / "out" / "scheduler.bin").read_bytes() == content


def test_the_tools_own_results_and_saved_checkpoints_are_replaced(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for _ in range(2):
        reshard(saved, out, 2, overwrite=True)
        convert(saved, out, to="accelerate", overwrite=True)
        convert(saved, out, to="dcp", overwrite=True)
    (saved / "notes").mkdir()
    (saved / "notes" / "mine.txt").write_text("x")
    (saved / "recipe.yaml").write_text("x")
    for _ in range(2):
        reshard(saved, out, 3, overwrite=True)
    assert (out / "notes" / "mine.txt").read_text() == "x"
    other = save_small(tmp_path / "other")
    convert(saved, other, to="accelerate", overwrite=True)
    assert _manifest(other)["step"] == 7
