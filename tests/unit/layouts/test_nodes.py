"""What tells that several folders are of one save; tests/cli/test_several_folders.py has the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_ckpt.errors import Incompatible
from fsdp_ckpt.layouts import nodes
from fsdp_ckpt.layouts.elsewhere import rank_of
from fsdp_ckpt.layouts.nodes import demand_equal_copies, demand_one_save
from fsdp_ckpt.store.local import Folder, LocalStore


@pytest.mark.parametrize(
    ("file", "rank"),
    [
        ("__0_0.distcp", 0),
        ("pytorch_model_fsdp_0/__12_3.distcp", 12),
        ("shard__7_0.distcp", 7),
        ("__5.metadata", 5),
        (".metadata", None),
        ("random_states_4.pkl", 4),
        ("rng_state_11.pth", 11),
        ("model_world_size_8_rank_3.pt", 3),
        ("pytorch_model_fsdp_0_rank2.bin", 2),
        ("ep0-ba10-rank10.pt", 10),
        ("scheduler.bin", None),
        ("pytorch_model_fsdp.bin", None),
        ("fsdp_ckpt.json", None),
        ("__" + "9" * 5000 + "_0.distcp", None),
    ],
)
def test_the_rank_that_a_name_tells(file: str, rank: int | None) -> None:
    assert rank_of(file) == rank


def place(tmp_path: Path, name: str, data: bytes) -> list[Path]:
    roots = [tmp_path / node for node in "ab"]
    for root in roots:
        root.mkdir(exist_ok=True)
        (root / name).write_bytes(data)
    return roots


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("at", "is_seen"), [(0, True), (1023, True), (1024, False), (6975, False), (6976, True), (-1, True)]
)
def test_large_files_are_compared_at_both_ends(
    at: int, is_seen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(nodes, "_EDGE_BYTES", 1024)
    monkeypatch.setattr(nodes, "_WHOLE_BYTES", 7999)
    roots = place(tmp_path, "__0_0.distcp", bytes(8000))
    folder = Folder(LocalStore(roots))
    demand_one_save(folder)
    demand_equal_copies(folder.store, "__0_0.distcp")
    flip(roots[1] / "__0_0.distcp", at)
    if is_seen:
        with pytest.raises(Incompatible, match=r"their __0_0\.distcp differ"):
            demand_one_save(Folder(LocalStore(roots)))
    else:
        demand_one_save(Folder(LocalStore(roots)))
    with pytest.raises(Incompatible, match=r"their __0_0\.distcp differ"):  # before one of them is removed
        demand_equal_copies(folder.store, "__0_0.distcp")
    monkeypatch.setattr(nodes, "_WHOLE_BYTES", 8000)
    with pytest.raises(Incompatible, match=r"their __0_0\.distcp differ"):
        demand_one_save(Folder(LocalStore(roots)))


def test_metadata_are_compared_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_EDGE_BYTES", 1024)
    monkeypatch.setattr(nodes, "_WHOLE_BYTES", 0)
    roots = place(tmp_path, ".metadata", bytes(8000))
    demand_one_save(Folder(LocalStore(roots)))
    flip(roots[1] / ".metadata", 4000)
    with pytest.raises(Incompatible, match=r"their \.metadata differ"):
        demand_one_save(Folder(LocalStore(roots)))


def test_what_need_not_be_compared(tmp_path: Path) -> None:
    roots = place(tmp_path, "x.bin", b"1")
    (roots[1] / "x.bin").unlink()
    (roots[1] / "x.bin").hardlink_to(roots[0] / "x.bin")
    demand_equal_copies(LocalStore(roots), "x.bin")
    (roots[1] / "y.bin").write_bytes(b"2")
    demand_equal_copies(LocalStore(roots), "y.bin")  # in one place only
