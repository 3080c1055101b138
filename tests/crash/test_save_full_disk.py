"""A disk that fills up in the middle of a save: a tmpfs whose size, or number of files, grows step by step."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.crash.save_trial import FALLOCATE, SCENES, Trial, check_errors
from tests.crash.save_yard import Yard

pytestmark = pytest.mark.dist

ROWS = 3000
ROOMY = "size=32m,nr_inodes=1000"
PAGE_BYTES = 4096


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root may mount a tmpfs")
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", ROOMY, "tmpfs", str(place)], check=False, capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"mounting is refused here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def _resize(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(disk)], check=True)


def _fill_up(trial: Trial, disk: Path, limits: Sequence[int], limit: Callable[[os.statvfs_result, int], str]) -> None:
    """Save with room for the old checkpoint and a little more: an error on every rank, and the old one stays."""
    ends: Counter[str] = Counter()
    for extra in limits:
        version = trial.next_version()
        options = limit(os.statvfs(disk), extra)
        _resize(disk, options)
        first = check_errors(trial.team.order(**trial.order(version)), "NotEnoughSpace", options)
        assert first.seconds < 10
        standing = trial.check_folder(version, options)
        assert (standing == version) is (first.kind == ""), f"{options}: {first}, but version {standing} is there"
        _resize(disk, ROOMY)
        trial.go_on(standing, options, fresh=False)
        ends[first.kind] += 1
    print(f"{len(limits)} times the disk was full or nearly so: {dict(ends)}")
    assert ends["NotEnoughSpace"] == len(limits) - 1, ends
    assert ends[""] == 1, "the last limit leaves room enough"


def _pages(status: os.statvfs_result, extra: int) -> str:
    return f"size={(status.f_blocks - status.f_bfree + extra) * PAGE_BYTES}"


def _inodes(status: os.statvfs_result, extra: int) -> str:
    return f"nr_inodes={status.f_files - status.f_ffree + extra}"


def _needs(disk: Path) -> tuple[int, int]:
    """Return how many pages and inodes the checkpoint takes that is there alone."""
    status = os.statvfs(disk)
    return status.f_blocks - status.f_bfree, status.f_files - status.f_ffree


@pytest.mark.parametrize("reserves", [True, False])
def test_the_disk_is_full_after_some_pages(yard: Yard, disk: Path, tmp_path: Path, reserves: bool) -> None:
    """Also on one that does not reserve space in advance, so that it is a write that fails."""
    forbidden = 0 if reserves else FALLOCATE
    trial = Trial(yard, SCENES["overwrite"], disk, log=tmp_path / "log", rows=ROWS, forbidden=forbidden)
    pages, _ = _needs(disk)
    assert pages > 100
    _fill_up(trial, disk, [*range(0, pages - 1, pages // 4), pages + 20], _pages)


def test_the_disk_has_no_room_for_some_file(yard: Yard, disk: Path, tmp_path: Path) -> None:
    trial = Trial(yard, SCENES["overwrite"], disk, log=tmp_path / "log")
    _, files = _needs(disk)
    assert files > 10
    _fill_up(trial, disk, [*range(0, files - 2, 4), files + 5], _inodes)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("reserves", [True, False])
def test_the_disk_is_full_after_every_page(yard: Yard, disk: Path, tmp_path: Path, reserves: bool) -> None:
    forbidden = 0 if reserves else FALLOCATE
    trial = Trial(yard, SCENES["overwrite"], disk, log=tmp_path / "log", rows=ROWS, forbidden=forbidden)
    pages, _ = _needs(disk)
    _fill_up(trial, disk, [*range(pages - 2), pages + 20], _pages)


@pytest.mark.slow
def test_the_disk_has_no_room_for_every_file(yard: Yard, disk: Path, tmp_path: Path) -> None:
    trial = Trial(yard, SCENES["overwrite"], disk, log=tmp_path / "log")
    _, files = _needs(disk)
    _fill_up(trial, disk, [*range(files - 2), files + 5], _inodes)
