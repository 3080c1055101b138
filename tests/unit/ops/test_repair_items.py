"""Items of data files, found without metadata: where torch's own metadata say that they are."""

from __future__ import annotations

import io
import itertools
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from fsdp_ckpt import save_state
from fsdp_ckpt.errors import MalformedFile
from fsdp_ckpt.ops.repairs.items import walk_archives
from fsdp_ckpt.store.local import Folder, LocalStore
from tests.compat.judges import _Unpickler
from tests.compat.samples import FIXTURES

ODD = ("zstd", "safetensors", "bytecheckpoint", "olmo_core")  # no archives; or classes that torch lacks
FOLDERS = [path.parent for path in sorted(FIXTURES.rglob(".metadata")) if not any(word in str(path) for word in ODD)]


def listed(folder: Path) -> dict[str, set[tuple[int, int]]]:
    """Return the extents in each file, by torch's own classes where it has them."""
    metadata = _Unpickler(io.BytesIO((folder / ".metadata").read_bytes())).load()
    found: dict[str, set[tuple[int, int]]] = {}
    for info in metadata.storage_data.values():
        found.setdefault(info.relative_path, set()).add((info.offset, info.offset + info.length))
    return found


def walked(folder: Path, file: str) -> list[tuple[int, int]]:
    return walk_archives(Folder(LocalStore(folder)), file)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(FIXTURES)))
def test_archives_are_where_the_metadata_say(folder: Path) -> None:
    for file, extents in listed(folder).items():
        found = walked(folder, file)
        assert set(found) == extents
        assert found == sorted(found)


def test_our_own_files_have_gaps(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3))
    save_state(tmp_path / "run", model, torch.optim.Adam(model.parameters()), durable=False)
    folder = tmp_path / "run/pytorch_model_fsdp_0"
    ((file, extents),) = listed(folder).items()
    found = walked(folder, file)
    assert set(found) == extents
    assert any(stop != start for (_, stop), (start, _) in itertools.pairwise(found)), "there is a gap"


def one(tmp_path: Path) -> tuple[Path, bytes]:
    source = FIXTURES / "edge/torch213_hand2"
    return Path(shutil.copytree(source, tmp_path / "c")), (source / "__0_0.distcp").read_bytes()


@pytest.mark.parametrize("where", ["before", "between", "after"])
def test_a_byte_that_belongs_to_nothing(where: str, tmp_path: Path) -> None:
    folder, data = one(tmp_path)
    second = walked(folder, "__0_0.distcp")[1][0]
    place = {"before": 0, "between": second, "after": len(data)}[where]
    (folder / "__0_0.distcp").write_bytes(data[:place] + b"\1" + data[place:])
    with pytest.raises(MalformedFile):
        walked(folder, "__0_0.distcp")


def test_more_zeros_than_alignment_needs(tmp_path: Path) -> None:
    folder, data = one(tmp_path)
    extents = walked(folder, "__0_0.distcp")
    place = extents[1][0]
    (folder / "__0_0.distcp").write_bytes(data[:place] + bytes(4095) + data[place:])
    assert walked(folder, "__0_0.distcp")[1][0] == place + 4095
    (folder / "__0_0.distcp").write_bytes(data[:place] + bytes(9000) + data[place:])
    with pytest.raises(MalformedFile):
        walked(folder, "__0_0.distcp")


def test_an_archive_of_another_program(tmp_path: Path) -> None:
    """Python's zipfile writes no 64-bit records where they are not needed; torch always does."""
    with zipfile.ZipFile(tmp_path / "__0_0.distcp", "w") as archive:
        archive.writestr("archive/data.pkl", b"N.")
    with pytest.raises(MalformedFile):
        walked(tmp_path, "__0_0.distcp")


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").touch()
    assert walked(tmp_path, "__0_0.distcp") == []
