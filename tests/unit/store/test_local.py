from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path

import pytest

from fsdp_ckpt.errors import CheckpointNotFound, FsdpCkptError, IncompleteCheckpoint, MalformedFile
from fsdp_ckpt.store.local import Folder, LocalStore

ESCAPES = [
    "../secret", "a/../../secret", "..", "a/..", "/etc/passwd", "//etc/passwd", "", "x\0y", "\0", "a/\0",
    "../ckpt/inside",
]  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_bytes(b"secret")
    root = tmp_path / "ckpt"
    (root / "sub").mkdir(parents=True)
    (root / "inside").write_bytes(b"0123456789")
    (root / "sub" / "file").write_bytes(b"abc")
    return root


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("name", ESCAPES)
def test_names_that_lead_out_are_refused(name: str, root: Path) -> None:
    store = LocalStore(root)
    for use in (store.path, store.size, store.read, lambda name: store.reader(name)(0, 1)):
        with pytest.raises(MalformedFile, match="leads out of the checkpoint"):
            use(name)


@pytest.mark.parametrize("target", ["../secret", "/etc/passwd", "..", "sub/../../secret"])
def test_links_that_lead_out_are_refused(target: str, root: Path) -> None:
    (root / "link").symlink_to(target)
    with pytest.raises(MalformedFile, match="link out of the checkpoint"):
        LocalStore(root).size("link")


def test_a_link_to_a_folder_outside_is_refused(root: Path) -> None:
    (root / "folder").symlink_to("..")
    with pytest.raises(MalformedFile, match="link out"):
        LocalStore(root).read("folder/secret")


def test_a_chain_of_links_that_leads_out_is_refused(root: Path) -> None:
    (root / "one").symlink_to("two")
    (root / "two").symlink_to("../secret")
    with pytest.raises(MalformedFile, match="link out"):
        LocalStore(root).read("one")


def test_a_sibling_whose_name_begins_alike_is_outside(root: Path) -> None:
    (root.parent / "ckpt-other").write_bytes(b"x")
    (root / "link").symlink_to("../ckpt-other")
    with pytest.raises(MalformedFile, match="link out"):
        LocalStore(root).read("link")


def test_links_within_the_checkpoint_are_followed(root: Path) -> None:
    (root / "link").symlink_to("sub/file")
    (root / "sub" / "up").symlink_to("../inside")
    store = LocalStore(root)
    assert store.read("link") == b"abc"
    assert store.read("sub/up") == b"0123456789"


def test_the_root_may_be_reached_through_a_link(root: Path) -> None:
    (root.parent / "latest").symlink_to("ckpt")
    assert LocalStore(root.parent / "latest").read("inside") == b"0123456789"


def test_links_of_the_hugging_face_cache(tmp_path: Path) -> None:
    # models--org--name/snapshots/REVISION/model.safetensors -> ../../blobs/HASH
    model = tmp_path / "models--org--name"
    (model / "blobs").mkdir(parents=True)
    (model / "snapshots" / "abc").mkdir(parents=True)
    (model / "blobs" / "123").write_bytes(b"blob")
    (model / "secret").write_bytes(b"secret")
    (model / "snapshots" / "abc" / "model.safetensors").symlink_to("../../blobs/123")
    (model / "snapshots" / "abc" / "other").symlink_to("../../secret")
    store = LocalStore(model / "snapshots" / "abc")
    assert store.read("model.safetensors") == b"blob"
    with pytest.raises(MalformedFile, match="link out"):
        store.read("other")


def test_the_root_of_the_file_system() -> None:
    assert LocalStore(Path("/")).size("etc/passwd") == os.stat("/etc/passwd").st_size


def test_sizes(root: Path) -> None:
    store = LocalStore(root)
    assert store.size("inside") == 10
    assert store.size("sub/file") == 3
    assert store.size("nothing") is None
    assert store.size("inside/below") is None, "a file is no folder"
    assert store.size("nothing/below") is None


IMPOSSIBLE = {"long": "x" * 300, "long path": "/".join(["y" * 200] * 30), "surrogate": "w\ud800", "loop": "loop"}


@pytest.mark.parametrize("name", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_names_that_no_file_can_have_are_missing_or_malformed(name: str, root: Path) -> None:
    (root / "loop").symlink_to("loop")
    store = LocalStore(root)
    with contextlib.suppress(FsdpCkptError):
        assert store.size(name) is None
    with pytest.raises(FsdpCkptError):
        store.read(name)
    with pytest.raises(FsdpCkptError):
        store.reader(name)(0, 1)


def test_what_is_no_regular_file_is_refused_without_waiting(root: Path) -> None:
    os.mkfifo(root / "fifo")  # reading it would wait for a writer for ever
    store = LocalStore(root)
    for name in ("fifo", "sub"):
        with pytest.raises(MalformedFile, match="no regular file"):
            store.size(name)
        with pytest.raises(MalformedFile, match="no regular file"):
            store.reader(name)(0, 1)


def test_a_socket_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        with pytest.raises(FsdpCkptError):
            LocalStore(root).reader("socket")(0, 1)


def test_reading(root: Path) -> None:
    store = LocalStore(root)
    read = store.reader("inside")
    assert read(0, 10) == b"0123456789"
    assert read(3, 4) == b"3456"
    assert read(10, 0) == b""
    assert store.read("sub/file") == b"abc"


@pytest.mark.parametrize(("start", "num_bytes"), [(0, 11), (9, 2), (10, 1), (100, 1)])
def test_reading_beyond_the_end_is_malformed(start: int, num_bytes: int, root: Path) -> None:
    with pytest.raises(MalformedFile, match="ends at byte"):
        LocalStore(root).reader("inside")(start, num_bytes)


def test_what_is_missing_is_incomplete(root: Path) -> None:
    store = LocalStore(root)
    for use in (store.read, lambda name: store.reader(name)(0, 1)):
        with pytest.raises(IncompleteCheckpoint, match="nothing is missing"):
            use("nothing")


def test_thousands_of_files_need_few_descriptors(root: Path) -> None:
    for number in range(300):
        (root / f"f{number}").write_bytes(number.to_bytes(2, "little"))
    store, before = LocalStore(root), open_descriptors()
    for number in [*range(300), *range(300)]:
        assert store.reader(f"f{number}")(0, 2) == number.to_bytes(2, "little")
    assert open_descriptors() - before <= 64
    store.close()
    assert open_descriptors() == before


def test_a_lent_descriptor_stays_open(root: Path) -> None:
    for number in range(200):
        (root / f"f{number}").write_bytes(b"x")
    store = LocalStore(root)
    with store.opened("inside") as source:
        for number in range(200):
            store.reader(f"f{number}")(0, 1)
        assert source.read(0, 10) == b"0123456789"
    store.close()


def test_many_threads(root: Path) -> None:
    for number in range(120):
        (root / f"f{number}").write_bytes(bytes([number]) * 50)
    store = LocalStore(root)
    wrong: list[int] = []

    def is_right(number: int) -> bool:
        return store.reader(f"f{number}")(5, 3) == bytes([number]) * 3

    def work(first: int) -> None:
        wrong.extend(number for number in range(first, first + 400) if not is_right(number % 120))

    threads = [threading.Thread(target=work, args=(31 * number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.close()
    assert not wrong


def test_folders_list_files_and_folders(root: Path) -> None:
    (root / "to_file").symlink_to("inside")
    (root / "to_folder").symlink_to("sub")
    (root / "dangling").symlink_to("nowhere")
    os.mkfifo(root / "fifo")
    folder = Folder(LocalStore(root))
    assert dict(folder.files) == {"inside": 10, "to_file": 10}
    assert folder.folders == {"sub", "to_folder"}
    below = folder.sub("sub")
    assert (below.prefix, dict(below.files), below.path) == ("sub/", {"file": 3}, root / "sub")
    assert list(folder.files) == sorted(folder.files)


@pytest.mark.parametrize("name", ["nothing", "inside"])
def test_a_folder_that_is_none(name: str, root: Path) -> None:
    with pytest.raises(CheckpointNotFound, match=name):
        _ = Folder(LocalStore(root)).sub(name).files
