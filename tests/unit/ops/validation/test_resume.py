from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_ckpt.catalog import Checkpoint, Problem, Severity
from fsdp_ckpt.layouts.manifest import MANIFEST, Manifest, Member, write_manifest
from fsdp_ckpt.layouts.registry import read_checkpoint
from fsdp_ckpt.ops.validation.names import check_names
from fsdp_ckpt.ops.validation.resume import ResumeAnswer, answer_resume, check_resume
from fsdp_ckpt.ops.validation.training_state import check_training_state
from tests.build import rows, save_dcp, save_rank_files
from tests.compat.samples import FIXTURES, SAMPLES, Sample, sample_id
from tests.unit.ops.validation.made import LETTERS

WITH_OPTIMIZER = [
    sample
    for sample in SAMPLES
    if sample.folder.is_relative_to(FIXTURES) and any("optim" in file for file in sample.row["files"])
]
MOMENTS = {"state": {"w": {"exp_avg": torch.ones(4, 2)}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]}


def run(folder: Path, *, ranks: int = 4, rng: int | None = None, positions: int = 0, **more: Any) -> Checkpoint:
    """Lay a checkpoint out as Accelerate does, with random states and positions of some ranks."""
    save_dcp(folder / "pytorch_model_fsdp_0", {"model": {"w": rows(torch.ones(4, 2), ranks)}}, ranks=ranks)
    save_dcp(folder / "optimizer_0", {"optimizer": MOMENTS}, ranks=ranks)
    for rank in range(ranks if rng is None else rng):
        torch.save({"step": 1}, folder / f"random_states_{rank}.pkl")
    for rank in range(positions):
        torch.save({"0": {"pos": rank}}, folder / f"dl_states_{rank}.pkl")
    for name, value in more.items():
        torch.save(value, folder / f"{name}.bin")
    return read_checkpoint(folder)


def found(checkpoint: Checkpoint, world_size: int | None) -> list[tuple[str, str]]:
    return [(LETTERS[problem.severity], problem.code) for problem in check_resume(checkpoint, world_size)]


def answer(checkpoint: Checkpoint, world_size: int | None) -> str:
    return answer_resume(check_resume(checkpoint, world_size)).sentence(world_size)


@pytest.mark.parametrize("sample", WITH_OPTIMIZER, ids=sample_id)
def test_what_torch_wrote_can_be_resumed_on_as_many_ranks(sample: Sample, tmp_path: Path) -> None:
    here = read_checkpoint(sample.copy(tmp_path / "ck"))
    problems = [*check_names(here), *check_resume(here, int(sample.row["world_size"]))]
    assert answer_resume(problems).can_resume
    assert [p.code for p in problems if p.severity is not Severity.NOTE] == (
        ["flat-parameters"] if sample.is_flat else []
    )


@pytest.mark.parametrize("world_size", [None, 4])
def test_as_many_ranks_go_on_as_before(world_size: int | None, tmp_path: Path) -> None:
    here = run(tmp_path, positions=4, scheduler={"last_epoch": 8})
    assert found(here, world_size) == []
    on = "" if world_size is None else " on 4 ranks"
    assert answer(here, world_size) == f"can be resumed{on}: yes"


def test_more_ranks(tmp_path: Path) -> None:
    assert found(run(tmp_path / "a"), 8) == [("N", "rng-world-size")]
    assert answer(run(tmp_path), 8) == "can be resumed on 8 ranks: yes; random states of ranks 4-7 begin anew"


def test_fewer_ranks(tmp_path: Path) -> None:
    assert answer(run(tmp_path), 1) == "can be resumed on 1 rank: yes; random states of ranks 1-3 are not used"


def test_no_random_states_are_worth_a_note(tmp_path: Path) -> None:
    here = run(tmp_path, rng=0)
    assert found(here, 4) == [("N", "missing-rng")]
    assert answer(here, 4).endswith("yes; random states were not saved: all ranks begin with new ones")


@pytest.mark.parametrize("world_size", [2, 6])
def test_positions_are_of_each_rank(world_size: int, tmp_path: Path) -> None:
    # Case P40, with one file for each rank.
    here = run(tmp_path, rng=0, positions=4)
    assert found(here, world_size) == [("N", "missing-rng"), ("E", "position-world-size")]
    text = answer(here, world_size)
    assert ": yes; " in text
    assert 'positions in the data are of 4 ranks: load_state needs positions="fresh"' in text


def test_positions_within_a_distributed_checkpoint(tmp_path: Path) -> None:
    # Case P40 as torchtitan lays it out.
    loader = {f"dp_rank_{rank}": {"pos": 10 * (rank + 1)} for rank in range(4)}
    state = {"model": {"w": rows(torch.ones(4, 2), 4)}, "optimizer": MOMENTS, "dataloader": loader}
    here = read_checkpoint(save_dcp(tmp_path / "ck", state, ranks=4))
    assert [code for _, code in found(here, 4)] == ["missing-rng"]
    assert [code for _, code in found(here, 2)] == ["missing-rng", "position-world-size"]


def test_a_model_alone(tmp_path: Path) -> None:
    here = read_checkpoint(save_dcp(tmp_path / "ck", {"model": {"w": rows(torch.ones(4, 2), 2)}}))
    assert found(here, 2)[0] == ("E", "no-optimizer")
    assert answer(here, 2) == "can be resumed on 2 ranks: no; there is no optimizer in it"


def test_a_model_alone_is_no_error_where_nobody_names_a_number_of_ranks(tmp_path: Path) -> None:
    here = read_checkpoint(save_dcp(tmp_path / "ck", {"model": {"w": rows(torch.ones(4, 2), 2)}}))
    assert found(here, None) == [("N", "no-optimizer"), ("N", "missing-rng")]
    assert answer(here, None) == "can be resumed: no; there is no optimizer in it"


def test_a_scheduler_of_accelerate_counts_all_ranks(tmp_path: Path) -> None:
    here = run(tmp_path, scheduler={"last_epoch": 8})
    assert found(here, 4) == []
    assert ("N", "scheduler-pace") in found(here, 2)
    assert "took 4 steps at a time, and will take 2" in answer(here, 2)


def manifest(**fields: Any) -> Manifest:
    given: dict[str, Any] = {
        "save_id": "x", "step": 1, "world_size": 4, "state_dict_type": "FULL_STATE_DICT", "created": "", "versions": {},
    }  # fmt: skip
    return Manifest(**given | fields)


@pytest.mark.parametrize(("kind", "codes"), [("AcceleratedScheduler", ["scheduler-pace"]), ("LambdaLR", [])])
def test_our_manifest_knows_whose_scheduler_it_is(kind: str, codes: list[str], tmp_path: Path) -> None:
    run(tmp_path, rng=0, scheduler={"last_epoch": 8})
    members = [Member(name="0", part="scheduler", kind=kind)]
    (tmp_path / MANIFEST).write_bytes(write_manifest(manifest(schedulers=members)))
    assert [code for _, code in found(read_checkpoint(tmp_path), 2)] == ["missing-rng", *codes]


def test_our_manifest_knows_of_ranks_on_other_nodes(tmp_path: Path) -> None:
    run(tmp_path, rng=2)
    files: Mapping[str, tuple[int, str]] = {f"random_states_{rank}.pkl": (1, "00000000") for rank in range(4)}
    (tmp_path / MANIFEST).write_bytes(write_manifest(manifest(files=files)))
    here = read_checkpoint(tmp_path)
    assert [code for _, code in found(here, 4)] == []
    assert [code for _, code in found(here, 5)] == ["rng-world-size"]


def test_files_of_each_rank_are_ours_to_reshard(tmp_path: Path) -> None:
    from torch.distributed.tensor import Shard

    places = {"w": [Shard(0)]}
    save_rank_files(tmp_path, {"w": torch.ones(4, 2)}, mesh=[2], placements=places)
    pattern = "optim_world_size_{world_size}_rank_{rank}.pt"
    save_rank_files(tmp_path, {"state.w.exp_avg": torch.ones(4, 2)}, mesh=[2], placements={}, pattern=pattern)
    here = read_checkpoint(tmp_path)
    assert ("N", "file-per-rank") in found(here, 3)
    assert "file-per-rank" not in [code for _, code in found(here, 2)]
    assert answer_resume(check_resume(here, 3)).can_resume


def local(folder: Path, *, is_whole: bool) -> Checkpoint:
    """LOCAL_STATE_DICT: flat parameters as ShardedTensor, as torch writes them, or as each rank's plain slice."""
    flat = torch.arange(20.0)
    pattern = "pytorch_model_fsdp_0_rank{rank}.bin"
    if is_whole:
        save_rank_files(
            folder,
            {"_flat_param": flat},
            mesh=[2],
            placements={"_flat_param": []},
            pattern=pattern,
            kind="ShardedTensor",
        )
    else:
        for rank in (0, 1):
            torch.save({"_flat_param": flat[10 * rank :][:10].clone()}, folder / pattern.format(rank=rank))
    save_dcp(folder / "optimizer_0", {"optimizer": MOMENTS})
    return read_checkpoint(folder)


def test_whole_flat_parameters_go_into_the_same_model(tmp_path: Path) -> None:
    here = local(tmp_path, is_whole=True)
    problems = [*check_names(here), *check_resume(here, 4)]
    given = answer_resume(problems)
    assert given.can_resume
    assert given.reasons[0] == "only into the same model, wrapped by FSDP1 in the same way"


@pytest.mark.parametrize("world_size", [2, 4])
def test_slices_without_a_place_are_for_what_saved_them(world_size: int, tmp_path: Path) -> None:
    here = local(tmp_path, is_whole=False)
    assert ("E", "other-world-size") in found(here, world_size)
    text = answer(here, world_size)
    assert ": no; `pytorch_model_fsdp_0` holds slices of flat parameters" in text
    assert text.endswith("on 2 ranks")


@pytest.mark.parametrize("sizes", [(5, 5), (6, 4)])
def test_slices_of_moments_are_for_what_saved_them(sizes: tuple[int, int], tmp_path: Path) -> None:
    # As verl saves FSDP1's optimizer; load_state says of it that the share of a rank cannot be told.
    for rank, size in enumerate(sizes):
        torch.save({"w": torch.ones(5, 2)}, tmp_path / f"model_world_size_2_rank_{rank}.pt")
        state = {"state": {0: {"exp_avg": torch.arange(float(size)) + 100 * rank}}, "param_groups": [{"params": [0]}]}
        torch.save(state, tmp_path / f"optim_world_size_2_rank_{rank}.pt")
    here = read_checkpoint(tmp_path)
    assert ("E", "other-world-size") in found(here, 2)
    assert not answer_resume(check_resume(here, 2)).can_resume


def problem(code: str, severity: Severity = Severity.ERROR, where: str = "w") -> Problem:
    return Problem(severity=severity, code=code, where=where, message="said so")


def test_errors_block_and_are_counted() -> None:
    faults = [problem("missing-shard", where=where) for where in ("w", "v", "w")]
    given = answer_resume([*faults, problem("numbered-optimizer", Severity.NOTE)])
    assert not given.can_resume
    (reason,) = given.reasons
    assert reason.endswith("`w` (and 1 more)")


def test_what_load_state_copes_with_does_not_block() -> None:
    assert answer_resume([problem("local-slices")]) == ResumeAnswer(can_resume=True)


@pytest.mark.parametrize(
    ("code", "who"),
    [
        ("torch-too-old", "torch's own loader"),
        ("torch-lacks-items", "torch's own loader"),
        ("other-state-dict-type", "Accelerate"),
    ],
)
def test_what_only_others_cannot_load_is_said_of_them(code: str, who: str) -> None:
    given = answer_resume([problem(code), problem(code)])
    assert given == ResumeAnswer(can_resume=True, reasons=(f"with load_state; not with {who}: said so",))


def test_an_optimizer_alone_is_nothing_to_resume_from(tmp_path: Path) -> None:
    run(tmp_path)
    shutil.rmtree(tmp_path / "pytorch_model_fsdp_0")
    here = read_checkpoint(tmp_path)
    assert found(here, 4) == [("E", "no-model")]
    assert answer(here, 4) == "can be resumed on 4 ranks: no; there are no model weights in it"
    # What two checks say is no second reason.
    problems = [*check_training_state(here), *check_resume(here, 4)]
    assert [p.severity for p in problems if p.code == "no-model"] == ["error", "error"]
    assert answer_resume(problems).reasons[0] == "there are no model weights in it"


def test_warnings_that_change_nothing_are_left_out() -> None:
    assert answer_resume([problem("stale-file", Severity.WARNING)]).sentence() == "can be resumed: yes"


def test_a_title_that_begins_with_a_name_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsdp_ckpt.findings import KINDS
    from fsdp_ckpt.ops.validation import resume

    kinds = {"missing-shard": replace(KINDS["missing-shard"], title="FSDP1 again")}
    monkeypatch.setattr(resume, "KINDS", kinds)
    assert answer_resume([problem("missing-shard")]).reasons == ("FSDP1 again: `w`",)
    assert answer_resume([problem("unknown-kind", where="")]).reasons == ("said so",)
