"""Little memory, few open files, no room: it works, or says what is missing, and leaves nothing."""

from __future__ import annotations

import os
import resource
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest

from tests.cli.hook import Hooked
from tests.cli.tool import DCP, EXPECTED, FIXTURES, assert_refused, leftovers, run, snapshot, tensors
from tests.hostile.forge_dcp import Forged, Rows, index, metadata, pattern, place, tensor_metadata
from tests.hostile.forge_pickle import dump
from tests.hostile.forge_zip import tensor_value


def _limit(kind: int, value: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(kind, (value, value))


@pytest.fixture
def many_files(tmp_path: Path) -> Path:
    """A tensor of 150 rows in 150 files."""
    forged = Forged()
    forged.tensor("w", (150, 4), rows=(1,) * 150)
    return forged.write(tmp_path / "many")


def test_64_open_files_are_enough_for_any_number_of_ranks(many_files: Path, tmp_path: Path) -> None:
    limit = _limit(resource.RLIMIT_NOFILE, 64)
    for number, options in enumerate(([], ["--jobs", "8"], ["--dtype", "bfloat16"])):
        result = run("merge", many_files, tmp_path / f"out{number}", *options, preexec_fn=limit)
        assert result.code == 0, result.err
    assert tensors(tmp_path / "out0")["w"][2] == pattern(150 * 16)
    assert run("inspect", many_files, "--shards", preexec_fn=limit).code == 0


def test_64_open_files_are_enough_for_any_number_of_outputs(tmp_path: Path) -> None:
    forged = Forged()
    for number in range(150):
        forged.tensor(f"w{number}", (64,))
    source = forged.write(tmp_path / "ckpt")
    limit = _limit(resource.RLIMIT_NOFILE, 64)
    result = run("merge", source, tmp_path / "out", "--max-shard-size", "256", preexec_fn=limit)
    assert result.code == 0, result.err
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 150
    assert len(tensors(tmp_path / "out")) == 150


def test_little_address_space_is_enough(tmp_path: Path) -> None:
    limit = _limit(resource.RLIMIT_AS, 400 << 20)
    result = run("merge", DCP, tmp_path / "out", preexec_fn=limit)
    assert result.code == 0, result.err
    assert tensors(tmp_path / "out") == tensors(EXPECTED)


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """Half a gigabyte of tensors in 400 MB of address space: nothing is loaded whole."""
    source = tmp_path / "ckpt"
    source.mkdir()
    rows, columns = 2048, 65536
    _sparse_tensor(source, rows, columns)
    limit = _limit(resource.RLIMIT_AS, 400 << 20)
    result = run("merge", source, tmp_path / "out", "--no-fsync", "--jobs", "1", preexec_fn=limit, timeout_s=120)
    assert result.code == 0, result.err
    assert (tmp_path / "out/model.safetensors").stat().st_size > rows * columns * 4
    (tmp_path / "out/model.safetensors").unlink()


def _sparse_tensor(folder: Path, rows: int, columns: int) -> None:
    """Put a tensor of zeros, a hole on disk, into a folder: an archive around a hole, without a checksum."""
    size, name = rows * columns * 4, b"archive/data/0"
    value = dump(tensor_value((rows, columns)))
    before = struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0, 0, 0, 0, 0, 0, 0, 16, 0) + b"archive/data.pkl" + value
    version_at = len(before)
    before += struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0, 0, 0, 0, 0, 0, 0, 15, 0) + b"archive/version3"
    data_at = len(before)
    before += struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0, 0, 0, 0, 0, 0, 0, len(name), 0) + name
    directory = b""
    for entry, length, header in (
        (b"archive/data.pkl", len(value), 0), (b"archive/version", 1, version_at), (name, size, data_at),
    ):  # fmt: skip
        fields = (20, 0, 20, 0, 0, 0, 0, 0, 0, length, length, len(entry), 0, 0, 0, 0, 0, header)
        directory += struct.pack("<4s4B4H3L5H2L", b"PK\1\2", *fields) + entry
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 3, 3, len(directory), len(before) + size, 0)
    with open(folder / "__0_0.distcp", "wb") as file:
        file.write(before)
        file.seek(len(before) + size)
        file.write(directory + end)
    items = {"w": tensor_metadata((rows, columns), [((0, 0), (rows, columns))])}
    at = place("__0_0.distcp", 0, (folder / "__0_0.distcp").stat().st_size)
    (folder / ".metadata").write_bytes(metadata(items, Rows((index("w", (0, 0)), at))))


def _mount(folder: Path, size: str) -> None:
    if os.getuid() != 0:
        pytest.skip("mounting needs root")
    folder.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    done = subprocess.run(options, check=False, capture_output=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte."""
    folder = tmp_path / "disk"
    _mount(folder, "1m")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Two megabytes in eight tensors."""
    forged = Forged()
    for number in range(8):
        forged.tensor(f"layers.{number}.weight", (256, 256), rows=(128, 128))
    return forged.write(tmp_path / "large")


def test_a_disk_that_is_too_small_is_noticed_before_anything_is_written(small_disk: Path, large: Path) -> None:
    for options in ([], ["--dry-run"], ["--format", "bin"], ["--max-shard-size", "300KB"]):
        result = run("merge", large, small_disk / "a/out", *options)
        assert_refused(result, 6)
        assert "2.1" in result.err  # MB needed, of which 1.05 are there
        assert list(small_disk.iterdir()) == []
    result = run("merge", large, small_disk / "out", "--dtype", "bfloat16", "--exclude", "layers.[4567].*")
    assert result.code == 0, result.err


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_disk_that_fills_up_on_the_way(overwrite: bool, small_disk: Path, large: Path, tmp_path: Path) -> None:
    options = ["--include", "layers.[012].*", "--max-shard-size", "300KB"]  # three files of 256 KiB: they would fit
    out = small_disk / "out"
    if overwrite:
        out.mkdir()
        (out / "model.safetensors").write_bytes(b"old")
    before = snapshot(small_disk)
    hooked = Hooked(
        tmp_path / "hook", ("merge", large, out, *options, "--jobs", "1", *(["--overwrite"] if overwrite else [])),
        "os.rename", r"\.part'", 1,
    )  # fmt: skip
    hooked.wait_until_there()
    (small_disk / "hog").write_bytes(bytes(600_000))  # somebody else's file
    hooked.go_on()
    result = hooked.result()
    assert_refused(result, 6)
    (small_disk / "hog").unlink()
    assert leftovers(small_disk) == []
    assert {name: entry[2] for name, entry in snapshot(small_disk).items()} == {n: e[2] for n, e in before.items()}
    assert run("merge", large, out, *options, *(["--overwrite"] if overwrite else [])).code == 0
    assert set(tensors(out)) == {f"layers.{n}.weight" for n in range(3)}


@pytest.mark.parametrize(("error", "code"), [("ENOSPC", 6), ("EDQUOT", 6), ("EIO", 70), ("EMFILE", 70)])
def test_a_file_that_cannot_be_made(
    error: Literal["ENOSPC", "EDQUOT", "EIO", "EMFILE"], code: int, tmp_path: Path
) -> None:
    arguments = ("merge", DCP, tmp_path / "out", "--max-shard-size", "2KB")
    result = Hooked(tmp_path / "hook", arguments, "open", r"\.part'", 2, error).result()
    assert_refused(result, code)
    assert not (tmp_path / "out").exists()
    assert leftovers(tmp_path) == []


def test_side_files_count_as_well(small_disk: Path, tmp_path: Path) -> None:
    forged = Forged()
    forged.tensor("w", (128, 128))
    source = forged.write(tmp_path / "ckpt")
    (source / "tokenizer.json").write_bytes(b" " * 2_000_000)
    result = run("merge", source, small_disk / "out")
    assert_refused(result, 6)
    assert list(small_disk.iterdir()) == []


def test_a_limit_on_the_size_of_files(large: Path, tmp_path: Path) -> None:
    limit = _limit(resource.RLIMIT_FSIZE, 100_000)
    result = run("merge", large, tmp_path / "out", preexec_fn=limit)
    assert_refused(result, 6)
    assert not (tmp_path / "out").exists()
    assert leftovers(tmp_path) == []


def test_threads_are_as_many_as_asked_for(tmp_path: Path) -> None:
    for jobs in ("1", "2", "64"):
        assert run("merge", DCP, tmp_path / jobs, "--jobs", jobs, "--max-shard-size", "1KB").code == 0
    files = [{path.name: path.read_bytes() for path in (tmp_path / jobs).iterdir()} for jobs in ("1", "2", "64")]
    assert files[0] == files[1] == files[2]


def test_a_checkpoint_on_a_read_only_disk(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("mounting needs root")
    where = tmp_path / "mount"
    where.mkdir()
    for command in (["mount", "--bind", str(FIXTURES), str(where)], ["mount", "-o", "remount,bind,ro", str(where)]):
        done = subprocess.run(command, check=False, capture_output=True)
        if done.returncode:
            pytest.skip(f"no bind mount here: {done.stderr.decode().strip()}")
    try:
        source = where / DCP.relative_to(FIXTURES)
        assert run("inspect", source).code == 0
        assert run("merge", source, tmp_path / "out").code == 0
    finally:
        subprocess.run(["umount", str(where)], check=True)
    assert tensors(tmp_path / "out") == tensors(EXPECTED)
