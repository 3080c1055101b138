"""Any damage to any file, at random: a repair that says that all is whole is right, and what it did can be undone."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from fsdp_ckpt.errors import FsdpCkptError
from fsdp_ckpt.ops.repair import RepairReport, repair
from tests.build import assert_same, rows, save_dcp
from tests.compat.judges import read_with_torch
from tests.unit.ops.mended import tree
from tests.unit.ops.test_repair_boxes import save_own

COUNT = pytest.mark.parametrize("count", [40, pytest.param(1200, marks=pytest.mark.slow)])


def damage(folder: Path, chance: random.Random) -> str:
    """Do one thing to one file."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = chance.choice(files)
    data = bytearray(path.read_bytes())
    kind = chance.choice(["flip", "flip", "zeros", "cut", "append", "delete", "empty", "copy", "rename", "swap"])
    place = chance.randrange(len(data)) if data else 0
    match kind:
        case "flip" if data:
            data[place] ^= 1 << chance.randrange(8)
        case "zeros":
            data[place : place + 4096] = bytes(len(data[place : place + 4096]))
        case "cut":
            del data[place:]
        case "append":
            data += chance.randbytes(chance.randrange(1, 5000))
        case "empty":
            data.clear()
        case _:
            pass
    path.write_bytes(data)
    if kind == "delete":
        path.unlink()
    elif kind == "copy":
        shutil.copy(path, path.with_name(f"__7_{chance.randrange(9)}.distcp"))
    elif kind == "rename":
        path.rename(path.with_name(path.name + ".tmp"))
    elif kind == "swap":
        other = chance.choice(files)
        content = other.read_bytes()
        other.write_bytes(path.read_bytes())
        path.write_bytes(content)
    return f"{kind} of {path.relative_to(folder)} at {place}"


def undo(report: RepairReport) -> None:
    for command in report.undo:
        subprocess.run(["bash", "-ec", command], check=True, timeout=20)


def without_backups(folder: Path) -> dict[str, tuple[int, bytes | str]]:
    return {name: item for name, item in tree(folder).items() if not name.startswith(".before-repair-")}


@COUNT
@pytest.mark.timeout(1200)
def test_a_checkpoint_of_ours_with_a_copy(count: int, tmp_path: Path) -> None:
    """Whatever happens to it, it becomes what it was; only what is added, and belongs to nothing, may stay."""
    save_own(tmp_path / "good")
    good = tree(tmp_path / "good")
    ends: Counter[str] = Counter()
    for seed in range(count):
        chance, path = random.Random(seed), tmp_path / "run/step-3"
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(tmp_path / "good", path)
        what = ", ".join(damage(path, chance) for _ in range(chance.choice([1, 1, 1, 3])))
        before = tree(path)
        report = repair(path, apply=True, replica=tmp_path / "good")
        assert report.whole or any(fault.where == "fsdp_ckpt.json" for fault in report.faults), (
            f"{seed}: {what}: {report}"
        )
        if report.whole:
            now = without_backups(path)
            assert {name: now.get(name) for name in good} == good, f"{seed}: {what}"
        ends["whole" if report.whole else "told"] += 1
        undo(report)
        assert tree(path) == before, f"{seed}: {what}: {report.undo}"
    print(dict(ends))
    assert ends["whole"] >= count * 2 // 3


STATE = {"w": rows(torch.arange(480.0).reshape(24, 20), 2), "b": torch.ones(50) * 3, "step": 10, "name": "one"}


@COUNT
@pytest.mark.timeout(1200)
def test_a_checkpoint_of_torch_with_one_of_another_step(count: int, tmp_path: Path) -> None:
    """Where it says that all is whole, torch reads the numbers that were saved; nothing is ever made up."""
    save_dcp(tmp_path / "good", STATE)
    expected = read_with_torch(tmp_path / "good")
    other = {"w": rows(torch.arange(480.0).reshape(24, 20) + 7, 2), "b": torch.ones(50), "step": 9, "name": "nine"}
    save_dcp(tmp_path / "other", other)
    ends: Counter[str] = Counter()
    for seed in range(count):
        chance, path = random.Random(seed), tmp_path / "run/step-3"
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(tmp_path / "good", path)
        what = "no .metadata"
        os.rename(path / ".metadata", path / chance.choice([".metadata.tmp", "gone"]))
        if seed % 3:
            (path / ".metadata.tmp").unlink(missing_ok=True)
            what += ", " + damage(path, chance)
        before = tree(path)
        try:
            report = repair(path, apply=True, like=tmp_path / "other")
        except FsdpCkptError:
            assert tree(path) == before
            ends["refused"] += 1
            continue
        end = "whole" if report.whole else "told"
        if report.whole:
            try:
                found = read_with_torch(path)
            except CheckpointException:
                end = "unseen"  # bits of a zip's structure that no checksum covers; torch sees them, and says so
            else:
                assert_same(found, expected)
        ends[end] += 1
        undo(report)
        assert tree(path) == before, f"{seed}: {what}"
    print(dict(ends))
    assert ends["whole"] >= count // 4
    assert ends["told"] >= count // 4
    assert ends["unseen"] <= count // 20
