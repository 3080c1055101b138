"""A store of the folders of several nodes: found in order, each folder guarded by itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fsdp_ckpt.errors import CheckpointNotFound, IncompleteCheckpoint, MalformedFile
from fsdp_ckpt.store.local import Folder, LocalStore


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    for name, files in {"a": ["one", "both", "sub/x"], "b": ["two", "both", "sub/y", "more/z"], "c": ["three"]}.items():
        for file in files:
            path = tmp_path / name / "ckpt" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{file} of {name}")
    (tmp_path / "secret").write_text("secret")
    return [tmp_path / name / "ckpt" for name in "abc"]


def test_a_file_is_where_it_is_found_first(roots: list[Path]) -> None:
    store = LocalStore(roots)
    assert (store.root, store.roots) == (roots[0], tuple(roots))
    assert {name: store.read(name) for name in ("one", "two", "three", "sub/x", "sub/y", "more/z", "both")} == {
        "one": b"one of a", "two": b"two of b", "three": b"three of c", "sub/x": b"sub/x of a", "sub/y": b"sub/y of b",
        "more/z": b"more/z of b", "both": b"both of a",
    }  # fmt: skip
    assert LocalStore(roots[::-1]).read("both") == b"both of b"
    assert store.path("two") == str((roots[1] / "two").resolve())
    assert store.size("two") == len("two of b")
    assert store.size("nothing") is None
    with pytest.raises(IncompleteCheckpoint, match="nothing is missing"):
        store.read("nothing")


def test_folders_list_what_any_of_them_has(roots: list[Path]) -> None:
    (roots[1] / "both").write_text("longer than the first one")
    folder = Folder(LocalStore(roots))
    assert dict(folder.files) == {"both": len("both of a"), "one": 8, "three": 10, "two": 8}
    assert list(folder.files) == sorted(folder.files)
    assert folder.folders == {"sub", "more"}
    assert list(folder.sub("sub").files) == ["x", "y"]
    assert list(folder.sub("more").files) == ["z"]
    assert folder.sub("sub").paths == tuple(root / "sub" for root in roots)
    with pytest.raises(CheckpointNotFound, match="there is no folder"):
        _ = folder.sub("nothing").files


def test_below_are_the_roots_that_have_the_folder(roots: list[Path]) -> None:
    store = LocalStore(roots)
    assert store.below("sub").roots == (roots[0] / "sub", roots[1] / "sub")
    assert store.below("more").roots == (roots[1] / "more",)
    assert store.below("more").read("z") == b"more/z of b"
    assert store.below("nothing").roots == (roots[0] / "nothing",)


@pytest.mark.parametrize("target", ["../../secret", "/etc/passwd", "../../a/ckpt/one", "../../c/ckpt/three"])
def test_a_link_out_of_any_of_them_is_refused(target: str, roots: list[Path]) -> None:
    (roots[1] / "link").symlink_to(target)  # also to another node's folder
    for use in (LocalStore(roots).size, LocalStore(roots).read):
        with pytest.raises(MalformedFile, match="link out of the checkpoint"):
            use("link")


def test_a_linked_folder_that_leads_out_is_refused(roots: list[Path]) -> None:
    (roots[2] / "far").symlink_to("../..")
    with pytest.raises(MalformedFile, match="link out of the checkpoint"):
        LocalStore(roots).read("far/secret")


@pytest.mark.parametrize("name", ["../secret", "../../secret", "/etc/passwd", "..", "", "sub/../../b/two", "\0"])
def test_names_that_lead_out_are_refused(name: str, roots: list[Path]) -> None:
    with pytest.raises(MalformedFile, match="leads out of the checkpoint"):
        LocalStore(roots).read(name)


def test_a_dangling_link_does_not_hide_a_file(roots: list[Path]) -> None:
    (roots[0] / "two").symlink_to("nowhere")
    assert LocalStore(roots).read("two") == b"two of b"


def test_what_is_no_regular_file_on_the_second_is_refused(roots: list[Path]) -> None:
    os.mkfifo(roots[1] / "fifo")
    with pytest.raises(MalformedFile, match="no regular file"):
        LocalStore(roots).read("fifo")
