"""What is no tensor: values, small files, and pickles that nobody vouches for."""

from __future__ import annotations

import math
import pickle
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fsdp_ckpt.errors import (
    CorruptCheckpoint,
)
from fsdp_ckpt.ops.diff import Change, diff
from tests.hostile.attacks import memory_attacks
from tests.unit.codec.raw_zip import Entry, build_zip
from tests.unit.ops.test_diff import dcp, save_folder, weights


def other(tmp_path: Path, name: str, value: Any) -> Path:
    return dcp(tmp_path / name, weights(), extra={"value": [value]})


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (1, 1, True),
        (1, 2, False),
        (1, 1.0, True),
        (1, True, False),
        (math.nan, math.nan, True),
        ("a", "b", False),
        (None, 0, False),
        ((1, 2), [1, 2], True),
        ({"x": {1, 2}}, {"x": {2, 1}}, True),
        ({"x": [1, {"y": 2}]}, {"x": [1, {"y": 3}]}, False),
        (torch.bfloat16, torch.bfloat16, True),
        (torch.bfloat16, torch.float16, False),
        (np.arange(4), np.arange(4), True),
        (np.arange(4), np.arange(4) * 2, False),
        (b"abc", b"abd", False),
        (Path("x"), Path("x"), True),
        (torch.arange(3), torch.arange(3), True),
        (torch.arange(3), torch.tensor([0, 1, 3]), False),
        (torch.arange(3), torch.arange(3).float(), False),
        ((torch.zeros(2), "x"), (torch.zeros(2), "x"), True),
        ((torch.zeros(2), "x"), (torch.ones(2), "x"), False),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["dcp", "file"])
def test_values(a: Any, b: Any, equal: bool, kind: str, tmp_path: Path) -> None:
    paths = tmp_path / "a", tmp_path / "b"
    for path, value in zip(paths, (a, b), strict=True):
        if kind == "dcp":
            dcp(path, weights(), extra={"value": (value, 0)})  # torch takes lists of tensors apart
        else:
            torch.save({"model": weights(), "extra": {"value": (value, 0)}}, path)
    report = diff(*paths)
    assert report.is_equal is equal
    model, extra = report.parts
    assert model.is_equal
    assert [value.name for value in extra.objects] == ([] if equal else ["value"])
    assert extra.num_objects == 1


def test_values_on_one_side(tmp_path: Path) -> None:
    a = dcp(tmp_path / "a", weights(), scheduler={"last_epoch": 1, "gamma": 0.5})
    b = dcp(tmp_path / "b", weights(), scheduler={"last_epoch": 1, "power": 2})
    found = {value.name: (value.change, value.a, value.b) for value in diff(a, b).parts[1].objects}
    assert found == {"gamma": (Change.REMOVED, 0.5, None), "power": (Change.ADDED, None, 2)}


def test_small_files_beside_the_model(tmp_path: Path) -> None:
    def states(seed: int) -> dict[str, Any]:
        generator = np.random.RandomState(seed)
        return {"numpy_random_seed": generator.get_state(), "torch_manual_seed": torch.arange(8) + seed, "step": 3}

    a = save_folder(tmp_path / "a", states(0), {"last_epoch": 3})
    assert diff(a, save_folder(tmp_path / "b", states(0), {"last_epoch": 3})).is_equal
    report = diff(a, save_folder(tmp_path / "c", states(1), {"last_epoch": 4}))
    _, scheduler, rng = report.parts
    assert [(value.name, value.a, value.b) for value in scheduler.objects] == [("last_epoch", 3, 4)]
    assert [value.name for value in rng.objects] == ["numpy_random_seed", "torch_manual_seed"]
    assert all(value.is_random and value.a is None and value.b is None for value in rng.objects)
    assert report.read_bytes == 0
    (tmp_path / "c/random_states_0.pkl").unlink()
    assert diff(a, tmp_path / "c").only_in_a == ["random_states_0"]


def test_files_that_nobody_can_decode_are_compared_by_their_bytes(tmp_path: Path) -> None:
    a, b = save_folder(tmp_path / "a", {}, {}), save_folder(tmp_path / "b", {}, {})
    for folder in (a, b):
        (folder / "sampler.bin").write_bytes(b"some bytes")
    assert diff(a, b).is_equal
    (b / "sampler.bin").write_bytes(b"same bytes")
    (value,) = next(part for part in diff(a, b).parts if part.part_a == "sampler").objects
    assert value.a.startswith("<10 bytes, CRC-32 ")
    assert value.a != value.b


def attacks() -> dict[str, bytes]:
    """Pickles that would take memory or time out of all proportion, or never end."""
    twice: list[Any] = []
    pair = (twice, twice)
    twice += [pair, pair]
    itself: dict[str, Any] = {}
    itself["x"] = itself
    return dict(memory_attacks()) | {
        "pairs-in-themselves": pickle.dumps([pair]),
        "dict-in-itself": pickle.dumps(itself),
    }


@pytest.mark.parametrize("name", attacks())
def test_hostile_values_are_equal_to_themselves_or_refused(name: str, tmp_path: Path) -> None:
    archive = build_zip([Entry("x/data.pkl", attacks()[name]), Entry("x/version", b"3\n")])
    for side in ("a", "b"):
        (save_folder(tmp_path / side, {}, {}) / "random_states_0.pkl").write_bytes(archive)
    begun = time.process_time()
    with suppress(CorruptCheckpoint):
        assert diff(tmp_path / "a", tmp_path / "b").is_equal
    assert time.process_time() - begun < 20


# ------------------------------------------------------------------------------------------------------------- damage
