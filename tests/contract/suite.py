"""What every layout has to answer; tests/contract/test_layouts.py says for which."""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from fsdp_ckpt import convert, inspect, merge, open_checkpoint, validate
from fsdp_ckpt.errors import FsdpCkptError
from tests.build import assert_same, read_bin, read_safetensors

__all__ = ["FIXTURES", "LayoutSuite"]

FIXTURES = Path(__file__).parents[2] / "fixtures"
_JUDGES = ("expected.safetensors", "expected_optim.safetensors", "expected_extra.safetensors", "expected_objects.json",
           "layout.json")  # fmt: skip
_IMPORTS = """
import json, sys
import fsdp_ckpt
fsdp_ckpt.inspect(sys.argv[1], objects=True)
fsdp_ckpt.merge(sys.argv[1], sys.argv[2], fsync=False)
heavy = {"torch", "accelerate", "transformers", "typer", "rich"}
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules} & heavy)))
"""


class LayoutSuite:
    """Inherit, and say what the layout looks like.

    Attributes:
        fixture: A folder of fixtures/, without the files that hold the expected values; "" for a layout that ``make``
            builds.
        inner: The folder in it that is read.
        layout: What ``inspect`` calls it.
        parts: Name, role and number of tensors of each part.
        world_size: Ranks that wrote it; None where that does not show.
        lacks: Keys that were not saved, besides those that MANIFEST.json says the writer cannot store.
        needed: Files without which the model is incomplete, relative to the folder that is read.
    """

    fixture: ClassVar[str] = ""
    inner: ClassVar[str] = "."
    layout: ClassVar[str]
    parts: ClassVar[tuple[tuple[str, str, int], ...]]
    world_size: ClassVar[int | None] = None
    needed: ClassVar[tuple[str, ...]]
    lacks: ClassVar[tuple[str, ...]] = ()

    def make(self, folder: Path) -> None:
        """Write the checkpoint into an empty folder."""
        shutil.copytree(FIXTURES / self.fixture, folder, ignore=shutil.ignore_patterns(*_JUDGES), dirs_exist_ok=True)

    def expected(self) -> dict[str, torch.Tensor]:
        """Return the unsharded tensors."""
        found = load_file(FIXTURES / self.fixture / "expected.safetensors")
        version, _, variant = self.fixture.removeprefix("torch-").partition("/")
        for row in json.loads((FIXTURES / "MANIFEST.json").read_text()):
            if row["variant"] == variant and row["torch"].startswith(version):
                for text in row.get("lacks", ()):  # each the repr of a list
                    for key in ast.literal_eval(text):
                        found.pop(key, None)
        return {key: tensor for key, tensor in found.items() if key not in self.lacks}

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        (tmp_path / "ckpt").mkdir()
        self.make(tmp_path / "ckpt")
        return (tmp_path / "ckpt" / self.inner).resolve()

    def test_inspect_names_it(self, path: Path) -> None:
        report = inspect(path)
        assert report.layout == self.layout
        assert report.title
        assert report.world_size == self.world_size
        assert report.complete
        assert report.path == str(path)

    def test_parts_and_roles(self, path: Path) -> None:
        report = inspect(path)
        assert tuple((part.name, part.role, part.num_tensors) for part in report.parts) == self.parts
        assert all(part.complete for part in report.parts)
        for part in report.parts:
            assert part.file_bytes >= part.num_bytes > 0 or part.num_tensors == 0

    def test_tensors_as_inspect_sees_them(self, path: Path) -> None:
        expected = self.expected()
        tensors = {tensor.name: tensor for tensor in inspect(path).parts[0].tensors}
        assert {name: (t.shape, t.dtype) for name, t in tensors.items()} == {
            name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in expected.items()
        }
        assert {name: t.num_bytes for name, t in tensors.items()} == {
            name: tensor.numel() * tensor.dtype.itemsize for name, tensor in expected.items()
        }
        assert all(tensor.shards >= 1 for tensor in tensors.values() if tensor.num_bytes)

    def test_merge_gives_the_unsharded_tensors(self, path: Path, tmp_path: Path) -> None:
        expected = self.expected()
        report = merge(path, tmp_path / "out")
        assert_same(read_safetensors(tmp_path / "out"), expected)
        assert report.num_tensors == len(expected)
        assert report.num_parameters == sum(tensor.numel() for tensor in expected.values())
        assert not report.dry_run

    def test_merge_into_small_files_of_torch(self, path: Path, tmp_path: Path) -> None:
        merge(path, tmp_path / "out", format="bin", max_shard_size=500)
        assert len(list((tmp_path / "out").glob("*.bin"))) > 1
        assert_same(read_bin(tmp_path / "out"), self.expected())

    def test_tensors_can_be_read_one_by_one(self, path: Path) -> None:
        with open_checkpoint(path, framework="pt") as view:
            assert_same({name: view.get_tensor(name) for name in view}, self.expected())

    def test_torch_is_imported_neither_for_looking_nor_for_merging(self, path: Path, tmp_path: Path) -> None:
        done = subprocess.run(
            [sys.executable, "-c", _IMPORTS, str(path), str(tmp_path / "out")],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        assert json.loads(done.stdout) == []

    def test_the_source_is_not_touched(self, path: Path, tmp_path: Path) -> None:
        before = self._digests(tmp_path / "ckpt")
        inspect(path, objects=True)
        merge(path, tmp_path / "out")
        assert self._digests(tmp_path / "ckpt") == before

    def test_a_dry_run_writes_nothing(self, path: Path, tmp_path: Path) -> None:
        report = merge(path, tmp_path / "out", dry_run=True)
        assert report.dry_run
        assert report.num_tensors == len(self.expected())
        assert [entry.name for entry in tmp_path.iterdir()] == ["ckpt"]

    def test_validate_finds_no_fault_in_a_whole_one(self, path: Path) -> None:
        report = validate(path, level="deep")
        assert [finding for finding in report.findings if finding.severity == "error"] == []
        assert report.ok

    def test_torch_reads_what_it_is_converted_to(self, path: Path, tmp_path: Path) -> None:
        report = convert(path, tmp_path / "out", to="dcp", part="model", world_size=3)
        state: dict[str, Any] = {}
        reader = FileSystemReader(tmp_path / "out")
        _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
        tensors = {name: value for name, value in state["model"].items() if isinstance(value, torch.Tensor)}
        assert_same(tensors, self.expected())
        assert report.world_size == 3

    def test_a_missing_file_is_noticed(self, path: Path, tmp_path: Path) -> None:
        for name in self.needed:
            kept = (path / name).read_bytes()
            (path / name).unlink()
            assert self._is_noticed(path), name
            with pytest.raises(FsdpCkptError) as caught:
                merge(path, tmp_path / "out")
            assert caught.value.exit_code in (3, 4), name
            assert [entry.name for entry in tmp_path.iterdir()] == ["ckpt"], "nothing is left behind"
            (path / name).write_bytes(kept)

    def test_a_file_cut_in_half_is_noticed(self, path: Path, tmp_path: Path) -> None:
        for name in self.needed:
            kept = (path / name).read_bytes()
            (path / name).write_bytes(kept[: len(kept) // 2])
            with pytest.raises(FsdpCkptError) as caught:
                merge(path, tmp_path / "out")
            assert caught.value.exit_code in (3, 4), name
            assert [entry.name for entry in tmp_path.iterdir()] == ["ckpt"], "nothing is left behind"
            (path / name).write_bytes(kept)

    def _is_noticed(self, path: Path) -> bool:
        try:
            report = inspect(path)
        except FsdpCkptError:
            return True
        return not report.complete or all(part.role != "model" for part in report.parts)

    def _digests(self, folder: Path) -> dict[str, tuple[str, int]]:
        return {
            str(file.relative_to(folder)): (hashlib.sha256(file.read_bytes()).hexdigest(), file.stat().st_mtime_ns)
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        }
