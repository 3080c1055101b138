"""On XFS and btrfs a merge of aligned files shares blocks: nothing is copied, no space is used, contents are equal."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.tool import run, strict_json, tensors
from tests.hostile.forge_dcp import Forged, index, pattern, place, tensor_metadata
from tests.hostile.forge_zip import Entry, archive, records, tensor_value

MIB = 1 << 20
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["xfs", "btrfs"])
def mounted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system of 512 MiB that can share blocks, in a file with holes."""
    kind: str = request.param
    make = shutil.which(f"mkfs.{kind}") or shutil.which(f"mkfs.{kind}", path="/usr/sbin:/sbin")
    if os.getuid() != 0:
        pytest.skip("mounting needs root")
    if make is None:
        pytest.skip(f"mkfs.{kind} is not installed")
    home = tmp_path_factory.mktemp(kind)
    image, folder = home / "image", home / "disk"
    folder.mkdir()
    with open(image, "wb") as file:
        file.truncate(512 * MIB)
    subprocess.run([make, str(image)], check=True, capture_output=True, timeout=60)
    done = subprocess.run(["mount", "-o", "loop", str(image), str(folder)], check=False, capture_output=True)
    if done.returncode:
        pytest.skip(f"{kind} cannot be mounted here: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True, timeout=60)
    image.unlink()


@pytest.fixture
def disk(mounted: Path) -> Iterator[Path]:
    """A folder of its own on it, for one test."""
    folder = mounted / "test"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def _used(disk: Path) -> int:
    os.sync()
    status = os.statvfs(disk)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def _aligned(shape: tuple[int, ...], content: bytes) -> bytes:
    """An archive whose storage begins at a multiple of 4096, as torch's ``storage_alignment`` makes it."""
    entries = records(tensor_value(shape), [content])
    plain = archive(entries)
    at = plain.index(b"archive/data/0") + len(b"archive/data/0")
    filler = Entry(name=".pad", content=b"")
    short = -(at + 30 + len("archive/.pad")) % 4096
    position = next(n for n, entry in enumerate(entries) if entry.name == "data/0")
    entries.insert(position, Entry(name=filler.name, content=bytes(short)))
    made = archive(entries)
    assert made.index(content[:64]) % 4096 == 0
    return made


def _checkpoint(folder: Path, shards: int, shard_bytes: int) -> Path:
    """One tensor in so many shards, one per file, and one small tensor that no block holds alone."""
    forged, rows = Forged(), shard_bytes // 4096
    chunks = []
    for number in range(shards):
        content = pattern(shard_bytes, number * shard_bytes // 4)
        offsets = (number * rows, 0)
        chunks.append((offsets, (rows, 1024)))
        at = forged.append(_aligned((rows, 1024), content), f"__{number}_0.distcp")
        forged.storage.append((index("large", offsets), place(*at)))
    forged.items["large"] = tensor_metadata((rows * shards, 1024), chunks)
    forged.tensor("small", (5,))
    return forged.write(folder)


def test_an_aligned_checkpoint_is_shared(disk: Path) -> None:
    shards, size = 4, 4 * MIB
    source = _checkpoint(disk / "ckpt", shards, size)
    before = _used(disk)
    result = run("merge", source, disk / "out", "--json")
    assert result.code == 0, result.err
    report = strict_json(result.out)
    assert report["shared_bytes"] == shards * size
    assert report["tensor_bytes"] == shards * size + 20
    assert _used(disk) - before < 2 * MIB
    assert tensors(disk / "out") == {
        "large": ("F32", (shards * size // 4096, 1024), pattern(shards * size)),
        "small": ("F32", (5,), pattern(20)),
    }
    shutil.rmtree(source)  # the result does not need the source
    assert tensors(disk / "out")["large"][2] == pattern(shards * size)


def test_our_own_safetensors_are_shared_again(disk: Path) -> None:
    source = _checkpoint(disk / "ckpt", 2, 4 * MIB)
    assert run("merge", source, disk / "first").code == 0
    before = _used(disk)
    result = run("merge", disk / "first", disk / "second", "--json")
    assert result.code == 0, result.err
    report = strict_json(result.out)
    assert report["shared_bytes"] == 8 * MIB
    assert _used(disk) - before < 2 * MIB
    assert tensors(disk / "second") == tensors(disk / "first")
    assert (disk / "second/model.safetensors").read_bytes() == (disk / "first/model.safetensors").read_bytes()


def test_what_is_not_aligned_is_copied(disk: Path) -> None:
    forged = Forged()
    forged.tensor("w", (512, 512), rows=(256, 256))
    source = forged.write(disk / "ckpt")
    result = run("merge", source, disk / "out", "--json")
    assert result.code == 0, result.err
    report = strict_json(result.out)
    assert report["shared_bytes"] == 0
    assert report["verified_bytes"] == MIB
    assert tensors(disk / "out") == {"w": ("F32", (512, 512), pattern(MIB))}


def test_a_cast_is_no_copy(disk: Path) -> None:
    source = _checkpoint(disk / "ckpt", 2, MIB)
    result = run("merge", source, disk / "out", "--json", "--dtype", "float16")
    assert result.code == 0, result.err
    assert strict_json(result.out)["shared_bytes"] == 0
    assert tensors(disk / "out")["large"][0] == "F16"


def test_changing_the_result_does_not_change_the_source(disk: Path) -> None:
    source = _checkpoint(disk / "ckpt", 2, MIB)
    assert run("merge", source, disk / "out").code == 0
    before = (source / "__0_0.distcp").read_bytes()
    with open(disk / "out/model.safetensors", "r+b") as file:
        file.seek(-MIB, os.SEEK_END)
        file.write(bytes(MIB))
    assert (source / "__0_0.distcp").read_bytes() == before


def test_across_file_systems_it_is_copied(disk: Path, tmp_path: Path) -> None:
    source = _checkpoint(disk / "ckpt", 2, MIB)
    result = run("merge", source, tmp_path / "out", "--json")
    assert result.code == 0, result.err
    assert strict_json(result.out)["shared_bytes"] == 0
    assert tensors(tmp_path / "out")["large"][2] == pattern(2 * MIB)


@pytest.mark.parametrize("writer", ["save_state", "FastFileSystemWriter"])
def test_what_we_save_is_shared(writer: str, disk: Path) -> None:
    """Every tensor of whole blocks: the rest is smaller than one block."""
    import torch
    import torch.distributed.checkpoint as dcp

    import fsdp_ckpt

    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1000, bias=False))
    if writer == "save_state":
        fsdp_ckpt.save_state(disk / "ckpt", model)
    else:
        state = {"model": model.state_dict()}
        dcp.save(state, storage_writer=fsdp_ckpt.FastFileSystemWriter(disk / "ckpt"), no_dist=True)
    before = _used(disk)
    result = run("merge", disk / "ckpt", disk / "out", "--json")
    assert result.code == 0, result.err
    report = strict_json(result.out)
    assert report["tensor_bytes"] == 4 * (1024 * 1024 + 1024 + 1000 * 1024)
    assert report["shared_bytes"] == report["tensor_bytes"], "all of them are whole blocks"
    assert _used(disk) - before < MIB
    wanted = {name: tensor.numpy().tobytes() for name, tensor in model.state_dict().items()}
    assert {name: content for name, (_, _, content) in tensors(disk / "out").items()} == wanted
