from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from fsdp_ckpt.errors import DestinationExists
from fsdp_ckpt.store import publish
from fsdp_ckpt.store.leftovers import leftovers
from fsdp_ckpt.store.publish import Staging, current_umask, resolve_destination
from tests.unit.store.folders import content, names, write


def test_a_new_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    staging = Staging(out, "ab12")
    write(staging, a="1", b="2")
    assert not out.exists(), "nothing is seen before everything is there"
    assert staging.path.parent == tmp_path
    assert staging.path.name.startswith("."), "hidden"
    staging.publish()
    assert content(out) == {"a": "1", "b": "2"}
    assert names(tmp_path) == ["out"]


def test_parents_are_made_and_removed_again(tmp_path: Path) -> None:
    staging = Staging(tmp_path / "x" / "y" / "out", "ab12")
    write(staging, a="1")
    staging.discard()
    assert names(tmp_path) == []
    (tmp_path / "x").mkdir()
    staging = Staging(tmp_path / "x" / "y" / "out", "ab12")
    staging.discard()
    assert names(tmp_path) == ["x"], "what was there stays"
    staging = Staging(tmp_path / "x" / "y" / "out", "ab12")
    write(staging, a="1")
    staging.publish()
    assert content(tmp_path / "x" / "y" / "out") == {"a": "1"}


def test_an_empty_folder_is_no_obstacle(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    staging = Staging(out, "ab12")
    write(staging, a="1")
    staging.publish()
    assert content(out) == {"a": "1"}


def test_content_that_appears_in_the_meantime_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    staging = Staging(out, "ab12")
    write(staging, a="1")
    out.mkdir()
    (out / "theirs").write_text("x")
    with pytest.raises(DestinationExists, match="appeared"):
        staging.publish()
    staging.discard()
    assert content(out) == {"theirs": "x"}
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("can_exchange", [False, True])
def test_overwriting_replaces_everything(
    can_exchange: bool, durable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange:
        monkeypatch.setattr(publish, "exchange", lambda _a, _b: False)
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("0")
    staging = Staging(out, "ab12", overwrite=True)
    write(staging, a="1")
    assert content(out) == {"old": "0"}
    staging.publish(durable=durable)
    assert content(out) == {"a": "1"}
    assert names(tmp_path) == ["out"]


def test_discarding_leaves_the_old_content(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("0")
    staging = Staging(out, "ab12", overwrite=True)
    write(staging, a="1")
    staging.discard()
    assert content(out) == {"old": "0"}
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002, 0o027])
def test_the_umask_decides_about_the_mode(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        assert current_umask() == umask
        assert os.umask(umask) == umask, "it was not changed"
        staging = Staging(tmp_path / "out", "ab12")
        write(staging, a="1")
        staging.publish()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o777 & ~umask


def test_links_to_a_folder_stay_links(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    staging = Staging(resolve_destination(tmp_path / "link"), "ab12")
    write(staging, a="1")
    staging.publish()
    assert (tmp_path / "link").is_symlink()
    assert content(tmp_path / "real") == {"a": "1"}


def test_other_hidden_folders_are_none_of_ours(tmp_path: Path) -> None:
    out = tmp_path / "out"
    keep = [
        ".out.fsdp-ckpt-xyz",
        ".out.fsdp-ckpt-",
        ".other.fsdp-ckpt-ab12",
        "out.fsdp-ckpt-ab12",
        ".out.fsdp-ckpt-ab12.bak",
    ]
    for name in keep:
        (tmp_path / name).mkdir()
    (tmp_path / ".out.fsdp-ckpt-aaaa").write_text("a file")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".out.fsdp-ckpt-bbbb").symlink_to("elsewhere")
    assert list(leftovers(out)) == []
    Staging(out, "cd34").discard()
    assert names(tmp_path) == sorted([*keep, ".out.fsdp-ckpt-aaaa", ".out.fsdp-ckpt-bbbb", "elsewhere"])


def test_descriptors_are_given_back(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for end in (Staging.publish, Staging.discard, Staging.suspend):
        end(Staging(tmp_path / end.__name__, "ab12"))
    assert len(os.listdir("/proc/self/fd")) == before
