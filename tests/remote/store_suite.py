"""What must hold for checkpoints in any store; each store inherits it and says how a folder comes to it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor

import fsdp_ckpt
from fsdp_ckpt.errors import ChecksumMismatch, FsdpCkptError, IncompleteCheckpoint
from fsdp_ckpt.ops.list_run import list_run
from tests.build import assert_same, read_safetensors, rows, save_dcp, save_rank_files
from tests.cli.tool import flip
from tests.remote.normal import outcome

ODD = "w t/run_lr=[1e-3, 2e-3]_é*?/epoch=0-step=10%.ckpt#1"
"""Every character that some library takes for something else; a valid name on disk and in every store."""


class Place(Protocol):
    """A store with room for a test."""

    def put(self, folder: Path, name: str) -> str:
        """Copy a folder to below a name; return the URL of that."""

    def remove(self, url: str) -> None:
        """Remove one object."""


def model() -> dict[str, Tensor]:
    torch.manual_seed(7)
    return {
        "layers.0.weight": torch.randn(37, 11),
        "layers.0.a/b c.weight": torch.randn(8, 3).to(torch.bfloat16),
        "steps": torch.tensor(41),
        "empty": torch.zeros(0, 4),
        "large.weight": torch.arange(300_000, dtype=torch.float32).reshape(1000, 300),
    }


def dcp_folder(folder: Path, state: Mapping[str, Tensor] | None = None) -> Path:
    whole = model() if state is None else dict(state)
    return save_dcp(folder, {key: rows(value, 2) if value.dim() else value for key, value in whole.items()})


def disk_bytes(folder: Path) -> int:
    """Return what the files below a folder really take."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


class StoreSuite:
    """Inherit, and define the fixture ``place``."""

    @pytest.fixture(autouse=True)
    def scratch(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Where temporary files go."""
        folder = tmp_path / "scratch"
        folder.mkdir()
        monkeypatch.setenv("TMPDIR", str(folder))
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        monkeypatch.chdir(tmp_path)
        return folder

    # ---------------------------------------------------------------------------------------------------- looking

    def test_reports_are_those_of_the_disk(self, place: Place, tmp_path: Path) -> None:
        local = dcp_folder(tmp_path / "ck")
        url = place.put(local, "run/ck")
        for verb in (fsdp_ckpt.inspect, fsdp_ckpt.validate):
            expected = outcome(lambda verb=verb: verb(str(local)), str(local))  # type: ignore[misc]
            assert outcome(lambda verb=verb: verb(url), url, "fsdp-ckpt-mirror") == expected  # type: ignore[misc]
            assert outcome(lambda verb=verb: verb(f"{url}/"), url, "fsdp-ckpt-mirror") is not None  # type: ignore[misc]

    def test_what_was_fetched_is_told(self, place: Place, tmp_path: Path) -> None:
        report = fsdp_ckpt.inspect(place.put(dcp_folder(tmp_path / "ck"), "ck"))
        metadata = (tmp_path / "ck/.metadata").stat().st_size
        assert report.fetched_bytes is not None
        assert metadata <= report.fetched_bytes <= metadata + (64 << 10)
        assert report.requests
        assert fsdp_ckpt.inspect(tmp_path / "ck").fetched_bytes is None
        size = sum(file.stat().st_size for file in (tmp_path / "ck").iterdir())
        checked = fsdp_ckpt.validate(report.path, level="deep").checked
        assert checked.fetched_bytes is not None
        assert checked.fetched_bytes >= size - (64 << 10), "every byte was looked at"
        assert checked.requests
        assert fsdp_ckpt.validate(tmp_path / "ck").checked.fetched_bytes is None

    def test_a_run_is_listed(self, place: Place, tmp_path: Path) -> None:
        for step in (5, 10, 100):
            dcp_folder(tmp_path / f"run/step-{step}")
        (tmp_path / "run/step-100/.metadata").unlink()
        url = place.put(tmp_path / "run", "a/run")
        report = list_run(url)
        assert [(item.name, item.step) for item in report.checkpoints] == [
            (item.name, item.step) for item in list_run(tmp_path / "run").checkpoints
        ]
        assert report.latest == f"{url}/step-10"
        assert fsdp_ckpt.latest_complete(url) == f"{url}/step-10"

    def test_tensors_are_read_one_by_one(self, place: Place, tmp_path: Path) -> None:
        url = place.put(dcp_folder(tmp_path / "ck"), "ck")
        with fsdp_ckpt.open_checkpoint(url, framework="pt") as view:
            found = {name: view.get_tensor(name) for name in view}
            rows_of_it = view.get_slice("large.weight")[3:7]
        assert_same(found, model())
        assert torch.equal(rows_of_it, model()["large.weight"][3:7])

    def test_differences_are_found(self, place: Place, tmp_path: Path) -> None:
        local = dcp_folder(tmp_path / "ck")
        changed = model()
        changed["layers.0.weight"][5, 5] += 1
        url, other = place.put(local, "ck"), place.put(dcp_folder(tmp_path / "other", changed), "other")
        assert fsdp_ckpt.diff(url, local).is_equal
        assert fsdp_ckpt.diff(local, url).is_equal
        report = fsdp_ckpt.diff(url, other)
        assert not report.is_equal
        assert (report.num_tensors, report.num_equal) == (5, 4)

    # ----------------------------------------------------------------------------------------------------- moving

    def test_a_merge_is_bit_equal(self, place: Place, tmp_path: Path, scratch: Path) -> None:
        url = place.put(dcp_folder(tmp_path / "ck"), "ck")
        fsdp_ckpt.merge(url, tmp_path / "out")
        assert_same(read_safetensors(tmp_path / "out"), model())
        assert disk_bytes(scratch) < 100_000, "a copy of the source was made"

    def test_a_merge_of_rank_files(self, place: Place, tmp_path: Path) -> None:
        from torch.distributed.tensor import Shard

        state = {"a": torch.randn(10, 6), "b": torch.randn(4, 400_000)}
        local = save_rank_files(tmp_path / "ck", state, mesh=[2], placements={"a": [Shard(0)], "b": [Shard(1)]})
        fsdp_ckpt.merge(place.put(local, "ck"), tmp_path / "out")
        assert_same(read_safetensors(tmp_path / "out"), state)

    def test_one_file_is_a_checkpoint(self, place: Place, tmp_path: Path) -> None:
        (tmp_path / "ck").mkdir()
        save_file(model(), tmp_path / "ck/model.safetensors")
        torch.save(model(), tmp_path / "ck/weights.pt")
        url = place.put(tmp_path / "ck", "ck")
        for number, name in enumerate(("model.safetensors", "weights.pt")):
            fsdp_ckpt.merge(f"{url}/{name}", tmp_path / f"out{number}")
            assert_same(read_safetensors(tmp_path / f"out{number}"), model())

    def test_conversions_start_from_it(self, place: Place, tmp_path: Path) -> None:
        url = place.put(dcp_folder(tmp_path / "ck"), "ck")
        fsdp_ckpt.convert(url, tmp_path / "out", to="safetensors")
        assert_same(read_safetensors(tmp_path / "out"), model())
        fsdp_ckpt.reshard(url, tmp_path / "four", 4)
        found = {key: torch.full_like(value, -1) for key, value in model().items()}
        dcp.load(found, checkpoint_id=tmp_path / "four", no_dist=True)
        assert_same(found, model())

    def test_training_goes_on_from_it(self, place: Place, tmp_path: Path) -> None:
        """One process; real ranks are in tests/dist."""

        def job() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
            net = torch.nn.Linear(4, 3)
            return net, torch.optim.AdamW(net.parameters())

        net, optimizer = job()
        net(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        fsdp_ckpt.save_state(tmp_path / "ck", net, optimizer)
        again, other = job()
        fsdp_ckpt.load_state(place.put(tmp_path / "ck", "run/ck"), again, other)
        assert_same(again.state_dict(), net.state_dict())
        for mine, theirs in zip(net.parameters(), again.parameters(), strict=True):
            assert_same(other.state[theirs], optimizer.state[mine])

    # ----------------------------------------------------------------------------------------------------- damage

    def test_a_damaged_byte_is_found(self, place: Place, tmp_path: Path) -> None:
        local = dcp_folder(tmp_path / "ck")
        flip(local / "__1_0.distcp")
        url = place.put(local, "ck")
        assert fsdp_ckpt.validate(url).ok, "heads alone do not show it"
        report = fsdp_ckpt.validate(url, level="deep")
        assert not report.ok
        assert any("CRC" in finding.message or "checksum" in finding.message for finding in report.findings)
        with pytest.raises(ChecksumMismatch):
            fsdp_ckpt.merge(url, tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["ck", "scratch"]

    def test_a_missing_file_is_found(self, place: Place, tmp_path: Path) -> None:
        url = place.put(dcp_folder(tmp_path / "ck"), "ck")
        place.remove(f"{url}/__1_0.distcp")
        assert not fsdp_ckpt.validate(url).ok
        with pytest.raises(IncompleteCheckpoint, match=r"__1_0\.distcp"):
            fsdp_ckpt.merge(url, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_a_file_that_is_too_short_is_found(self, place: Place, tmp_path: Path) -> None:
        local = dcp_folder(tmp_path / "ck")
        os.truncate(local / "__1_0.distcp", (local / "__1_0.distcp").stat().st_size - 1000)
        url = place.put(local, "ck")
        expected = outcome(lambda: fsdp_ckpt.validate(str(local)), str(local))
        assert outcome(lambda: fsdp_ckpt.validate(url), url, "fsdp-ckpt-mirror") == expected
        assert not expected["ok"]

    # ------------------------------------------------------------------------------------------------------ names

    def test_odd_names_in_urls(self, place: Place, tmp_path: Path) -> None:
        """P54: brackets, spaces, stars, hashes and percent signs are characters like others."""
        url = place.put(dcp_folder(tmp_path / "ck"), ODD)
        assert url.endswith(ODD)
        report = fsdp_ckpt.inspect(url)
        assert report.path == url
        assert report.root == url
        fsdp_ckpt.merge(url, tmp_path / "out")
        assert_same(read_safetensors(tmp_path / "out"), model())
        assert fsdp_ckpt.validate(url).ok

    def test_a_pattern_is_a_name(self, place: Place, tmp_path: Path) -> None:
        """``step-*`` is not any of the folders that it would match."""
        place.put(dcp_folder(tmp_path / "ck"), "run/step-1")
        url = place.put(tmp_path / "scratch", "run/x").removesuffix("x") + "step-*"
        with pytest.raises(FsdpCkptError) as caught:
            fsdp_ckpt.inspect(url)
        assert f"`{url}`" in caught.value.message

    def test_a_name_is_no_prefix(self, place: Place, tmp_path: Path) -> None:
        """``step-1`` is not ``step-10``, though the keys of the one begin with the name of the other."""
        url = place.put(dcp_folder(tmp_path / "ck"), "run/step-10")
        with pytest.raises(FsdpCkptError) as caught:
            fsdp_ckpt.inspect(url.removesuffix("0"))
        assert caught.value.exit_code in (3, 7)

    @pytest.mark.parametrize("verb", ["inspect", "validate", "merge"])
    def test_nothing_there(self, verb: str, place: Place, tmp_path: Path) -> None:
        """P53: the URL comes back as it was typed, and nothing was made."""
        url = place.put(dcp_folder(tmp_path / "ck"), "run/ck").removesuffix("/ck") + "/not [there]"
        before = sorted(path.name for path in tmp_path.iterdir())
        with pytest.raises(FsdpCkptError) as caught:
            getattr(fsdp_ckpt, verb)(url, *(["out"] if verb == "merge" else []))
        assert caught.value.exit_code in (3, 7)
        assert f"`{url}`" in caught.value.message
        assert sorted(path.name for path in tmp_path.iterdir()) == before

    def test_no_checkpoint_there(self, place: Place, tmp_path: Path) -> None:
        (tmp_path / "ck").mkdir()
        (tmp_path / "ck/notes.txt").write_text("nothing")
        url = place.put(tmp_path / "ck", "notes")
        with pytest.raises(FsdpCkptError) as caught:
            fsdp_ckpt.merge(url, "out")
        assert caught.value.exit_code == 3
        assert url in caught.value.message
        assert "fsdp-ckpt-mirror" not in f"{caught.value.message} {caught.value.hint}"

    def test_mirrors_go(self, place: Place, tmp_path: Path, scratch: Path) -> None:
        from fsdp_ckpt.store.remote.mirrors import close_mirrors

        fsdp_ckpt.inspect(place.put(dcp_folder(tmp_path / "ck"), "ck"))
        close_mirrors()
        assert list(scratch.iterdir()) == []
