"""The save_state and load_state halves of theme 6: crashed and failing saves, and which checkpoint is the newest.

What several ranks did is in `played`, see `state_ranks`; the rest is loaded here, without a process group.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

import fsdp_ckpt
from fsdp_ckpt import LoadReport
from fsdp_ckpt.errors import CheckpointNotFound, ChecksumMismatch, IncompleteCheckpoint
from tests.cases.check import assert_same, merge_and_load
from tests.cases.models import Mlp, reference
from tests.cases.state_training import blank
from tests.dist.stage import outcomes

pytestmark = pytest.mark.dist

MIB = 1 << 20


def shifted(by: float) -> dict[str, Tensor]:
    """Return REF with a number added everywhere."""
    return {name: value + by for name, value in reference(Mlp()).items()}


def load(path: str | Path) -> tuple[LoadReport, dict[str, Tensor]]:
    """Load a checkpoint of the MLP in this process."""
    model = blank(Mlp())
    report = fsdp_ckpt.load_state(path, model)
    return report, reference(model)


# P25 ------------------------------------------------------------------------------------------------------------------


def test_p25_the_newest_whole_one_is_loaded(played: Path) -> None:
    """awsome-distributed-ai#190, #251, Automodel#3261, transformers#26186: and those passed over are named."""
    expected = reference(Mlp())
    expected["up.weight"] += 100
    for report, state, _ in outcomes(played, "p25"):
        assert_same(state, expected)
        assert (report.step, Path(report.path).name) == (100, "step-100")
        said = "\n".join(report.warnings)
        for name in ("step-200", "step-300", "step-400"):
            assert name in said


def test_p25_asking_for_an_incomplete_one_is_an_error(played: Path) -> None:
    """No fallback: every rank raises, and step-200 is named. `p25` itself checks that the model is untouched."""
    for _, _, error in outcomes(played, "p25"):
        assert error.kind in ("IncompleteCheckpoint", "CheckpointNotFound", "UnknownLayout")
        assert "step-200" in error.message
    resumed = fsdp_ckpt.Checkpointer(played / "p25/place", Mlp()).resume()
    assert resumed is not None
    assert resumed.step == 100
    for step in (300, 400):
        with pytest.raises((IncompleteCheckpoint, CheckpointNotFound), match=f"step-{step}"):
            load(played / f"p25/place/step-{step}")


def test_p25_our_own_run_is_resumed_in_the_same_way(tmp_path: Path) -> None:
    """The Checkpointer passes over a checkpoint that lost a file, one that was cut, and one without a manifest."""
    model = Mlp()
    for step in (1, 2, 3, 4):
        with torch.no_grad():
            model.up.weight.fill_(step)
        fsdp_ckpt.save_state(tmp_path / f"step-{step}", model, step=step)
    (tmp_path / "step-4/random_states_0.pkl").unlink()
    data = tmp_path / "step-3/pytorch_model_fsdp_0/__0_0.distcp"
    os.truncate(data, data.stat().st_size - 100)
    (tmp_path / "step-2/fsdp_ckpt.json").write_text("{")
    model = blank(Mlp())
    report = fsdp_ckpt.Checkpointer(tmp_path, model).resume()
    assert report is not None
    assert report.step == 1
    assert torch.equal(model.up.weight.detach(), torch.ones(8, 6))
    report, _ = load(tmp_path)
    assert report.step == 1
    assert all(f"step-{step}" in "\n".join(report.warnings) for step in (2, 3, 4))


# P26 ------------------------------------------------------------------------------------------------------------------


def flip(file: Path, payload: Tensor) -> None:
    """Flip bit 6 of the first byte of a tensor's payload, which must be in the file once."""
    data, wanted = bytearray(file.read_bytes()), payload.numpy().tobytes()
    assert data.count(wanted) == 1
    data[data.find(wanted)] ^= 1 << 6
    file.write_bytes(data)


def test_p26_a_flipped_bit_is_named_and_nothing_is_loaded(played: Path, tmp_path: Path) -> None:
    """pytorch/torchtitan#4011: in save_state's own checkpoint, of two ranks; found by load_state and by merge.

    Left out: validate.
    """
    folder = tmp_path / "step-2"
    shutil.copytree(played / "p28_first/place/D", folder)
    flip(folder / "pytorch_model_fsdp_0/__1_0.distcp", shifted(0.5)["up.weight"][4:])
    model = blank(Mlp())
    with pytest.raises(ChecksumMismatch, match=r"up\.weight") as caught:
        fsdp_ckpt.load_state(folder, model)
    assert "__1_0.distcp" in str(caught.value)
    assert all((value == -1).all() for value in model.state_dict().values())
    with pytest.raises(ChecksumMismatch, match=r"up\.weight"):
        fsdp_ckpt.merge(folder, tmp_path / "out")
    assert os.listdir(tmp_path) == ["step-2"]


def test_p26_verification_can_be_turned_off(played: Path, tmp_path: Path) -> None:
    """Then the wrong value arrives: the flip is in the data. Of the intact copy every byte is compared."""
    folder = tmp_path / "step-2"
    shutil.copytree(played / "p28_first/place/D", folder)
    report, found = load(folder)
    assert_same(found, shifted(0.5))
    assert (report.verified_bytes, report.unverified_bytes) == (488, 0)
    flip(folder / "pytorch_model_fsdp_0/__1_0.distcp", shifted(0.5)["up.weight"][4:])
    model = blank(Mlp())
    fsdp_ckpt.load_state(folder, model, verify=False)
    differs = reference(model)["up.weight"] != shifted(0.5)["up.weight"]
    assert differs.nonzero().tolist() == [[4, 0]]


# P28 ------------------------------------------------------------------------------------------------------------------


def survivors(played: Path, name: str) -> list[Any]:
    """Return what came of the ranks that lived to tell it."""
    return [torch.load(path, weights_only=False) for path in sorted((played / name).glob("rank_*.pt"))]


def test_p28_a_rank_that_dies_while_saving_is_noticed(played: Path) -> None:
    """pytorch-lightning#20012, VeOmni#1164: rank 0 raises, and does not publish; where all died, nobody is left."""
    (error,) = survivors(played, "p28_crash_one")
    assert error.kind == "RankFailed"
    assert "saving " in error.message
    assert survivors(played, "p28_crash_all") == []
    assert (played / "p28_crash_all").is_dir()


def test_p28_after_the_crash_the_first_save_is_loaded(played: Path) -> None:
    """REF exactly, never a mix; what the dead ranks left lies beside it, hidden."""
    for found in outcomes(played, "p28_after"):
        assert_same(found["loaded"], reference(Mlp()))
        assert found["step"] == 1
        assert "D" in found["left"]
        assert all(name == "D" or name.startswith(".") for name in found["left"])
        assert len(found["left"]) > 1, "the crash came too early"


def test_p28_a_good_save_leaves_nothing_else(played: Path, tmp_path: Path) -> None:
    """Four ranks, then two: no file that nothing refers to, neither in the folder nor beside it."""
    for found in outcomes(played, "p28_after"):
        assert_same(found["again"], shifted(0.5))
        assert found["step again"] == 2
    place = played / "p28_first/place"
    assert os.listdir(place) == ["D"]
    here = {str(path.relative_to(place / "D")) for path in (place / "D").rglob("*") if path.is_file()}
    part = "pytorch_model_fsdp_0"
    used = {info.relative_path for info in FileSystemReader(place / "D" / part).read_metadata().storage_data.values()}
    states = {f"random_states_{rank}.pkl" for rank in range(2)}
    assert here == {f"{part}/{name}" for name in {*used, ".metadata"}} | states | {"fsdp_ckpt.json"}
    assert used <= {"__0_0.distcp", "__1_0.distcp"}
    manifest = json.loads((place / "D/fsdp_ckpt.json").read_text())
    assert set(manifest["files"]) == here - {"fsdp_ckpt.json"}
    _, merged = merge_and_load(place / "D", tmp_path / "out")
    assert_same(merged, shifted(0.5))


def test_p28_stock_leftovers_are_not_loaded(built: Path) -> None:
    """dcp.save by four ranks and then by two into one folder: REF + 0.5."""
    assert (built / "p28/__3_0.distcp").exists()
    _, found = load(built / "p28")
    assert_same(found, shifted(0.5))


# P29, P30 -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """P29's run: step-100, which is whole, and step-200, which has lost its `.metadata`."""
    for step in (100, 200):
        model = Mlp()
        with torch.no_grad():
            model.up.weight.add_(step)
        fsdp_ckpt.save_state(tmp_path / f"run/step-{step}", model)
    (tmp_path / "run/step-200/pytorch_model_fsdp_0/.metadata").unlink()
    return tmp_path / "run"


def up(state: dict[str, Tensor]) -> float:
    """Return what was added to REF's up.weight."""
    found = state["up.weight"] - reference(Mlp())["up.weight"]
    assert found.min() == found.max()
    return float(found[0, 0])


def test_p29_a_latest_link_to_an_unfinished_save_is_no_trap(run: Path) -> None:
    """KempnerForge#102, torchtitan#930: the run falls back to step-100 and says so; through the link it is an error."""
    (run / "latest").symlink_to("step-200")
    report, state = load(run)
    assert up(state) == 100
    assert report.step == 100
    assert "step-200" in "\n".join(report.warnings)
    with pytest.raises(IncompleteCheckpoint, match=r"latest|step-200"):
        load(run / "latest")


def test_p29_a_dangling_link_names_its_target(run: Path) -> None:
    """Asked for by name it is an error; beside a whole checkpoint it does not matter."""
    (run / "latest").symlink_to("step-300")
    with pytest.raises(CheckpointNotFound, match="step-300"):
        load(run / "latest")
    report, state = load(run)
    assert up(state) == 100
    assert report.step == 100
    for step in (100, 200):
        shutil.rmtree(run / f"step-{step}")
    with pytest.raises(CheckpointNotFound, match="step-300"):
        load(run)


def test_p29_a_link_to_the_run_is_the_run(run: Path, tmp_path: Path) -> None:
    """Access through a symlinked root equals direct access."""
    (tmp_path / "link").symlink_to(run)
    direct, linked = load(run), load(tmp_path / "link")
    assert up(linked[1]) == up(direct[1]) == 100
    assert linked[0].step == direct[0].step == 100
    assert Path(linked[0].path).resolve() == Path(direct[0].path).resolve()
    report = fsdp_ckpt.save_state(tmp_path / "link/step-101", Mlp())  # saving through it reaches the target, too
    assert (run / "step-101/fsdp_ckpt.json").exists()
    assert report.files.keys() >= {"fsdp_ckpt.json"}


def test_p29_a_link_out_of_the_run(run: Path, tmp_path: Path) -> None:
    """latest -> ../other/step-7 loads what it points to, and is named by that step."""
    shutil.copytree(run / "step-100", tmp_path / "other/step-7")
    (run / "latest").symlink_to("../other/step-7")
    report, state = load(run / "latest")
    assert up(state) == 100
    assert report.step == 7
    assert load(run)[0].step == 100  # the run's own is newer


def test_p29_saving_to_a_link_keeps_the_link(tmp_path: Path) -> None:
    """The checkpoint that it points to is replaced."""
    fsdp_ckpt.save_state(tmp_path / "step-1", Mlp())
    (tmp_path / "latest").symlink_to("step-1")
    model = blank(Mlp())
    fsdp_ckpt.save_state(tmp_path / "latest", model, step=5)
    assert (tmp_path / "latest").is_symlink()
    report, state = load(tmp_path / "step-1")
    assert report.step == 5
    assert_same(state, reference(model))


def test_p30_newest_is_a_matter_of_numbers(tmp_path: Path) -> None:
    """litgpt#661, open-instruct#542, robots#3165, RLinf#1468: not of strings, nor of names without a number."""
    for name in ("900", "1000", "0950", "best", "1100.tmp"):
        model = Mlp()
        with torch.no_grad():
            model.up.weight.add_(int(name) if name.isdecimal() else -1)
        fsdp_ckpt.save_state(tmp_path / f"checkpoint-{name}", model)
    (tmp_path / "checkpoint-9999").write_text("")
    (tmp_path / "checkpoint-2000").mkdir()
    report, state = load(tmp_path)
    assert up(state) == 1000
    assert (report.step, Path(report.path).name) == (1000, "checkpoint-1000")
    assert "checkpoint-2000" in "\n".join(report.warnings)
    resumed = fsdp_ckpt.Checkpointer(tmp_path, Mlp()).resume()
    assert resumed is not None
    assert resumed.step == 1000


def test_p30_a_trailing_slash_changes_nothing(tmp_path: Path) -> None:
    """As the shell completes it."""
    path = f"{tmp_path}/checkpoint-900"
    for end in ("", "/", "//"):
        saved = fsdp_ckpt.save_state(path + end, Mlp())
        assert os.listdir(tmp_path) == ["checkpoint-900"]
        assert saved.num_bytes > 488
    (plain, first), (slash, second) = load(path), load(f"{path}/")
    assert (plain.step, plain.path) == (slash.step, slash.path) == (900, path)
    assert_same(first, second)
    assert load(f"{tmp_path}/")[0].step == 900


# P32 ------------------------------------------------------------------------------------------------------------------


def test_p32_a_full_disk_on_one_rank_reaches_all(played: Path) -> None:
    """accelerate#3250, axolotl#1828, torchtune#2093, Automodel#3261: within seconds, with that rank's error."""
    for found in outcomes(played, "p32_full_disk"):
        for name in ("ck", "new"):
            assert found[name].kind == "NotEnoughSpace"
            assert "rank 1" in found[name].message
            assert "No space left on device" in found[name].message
            assert found[f"{name} took"] < 10


def test_p32_what_was_there_stays_and_nothing_new_appears(played: Path) -> None:
    """The earlier checkpoint is whole, the new one is not there, and no leftovers lie about."""
    for found in outcomes(played, "p32_full_disk"):
        assert found["there"] == ["ck"]
        assert found["step"] == 1
        assert_same(found["state"], reference(Mlp()))
    report, _ = load(played / "p32_full_disk/place/new")  # saved by the same ranks afterwards
    assert report.step == 2


def test_p32_a_rank_that_never_saves_does_not_hang_the_others(played: Path) -> None:
    """Rank 1 raises before save_state, and its process ends."""
    (error, took_s, there), gone = survivors(played, "p32_absent")
    assert (gone.kind, gone.message) == ("ValueError", "out of data")
    assert error.kind == "RankFailed"
    assert took_s < 20
    assert there == []


def test_p32_no_tensor_travels_between_ranks(played: Path) -> None:
    """A sharded save of 128 MiB: 0 bytes of tensors, a few statuses; a full one of 488 bytes shows that they count."""
    for found in outcomes(played, "p32_traffic"):
        assert found["tensor bytes"] == 0
        assert found["tensor bytes of a full save"] >= 488 // 2
        assert 0 < found["object bytes"] < 1 * MIB
        assert 128 * MIB < found["size"] < 129 * MIB


def test_p32_saving_needs_next_to_no_memory(played: Path) -> None:
    """What a rank needs beyond its shard of 64 MiB, which is there anyway; a gathered state would be 128 MiB."""
    for found in outcomes(played, "p32_traffic"):
        assert found["extra memory"] <= 48 * MIB
        assert found["extra memory of a copy"] >= 48 * MIB, "the measure does not measure"
