"""dcp.save and dcp.load with our writer and reader on real ranks: crosswise with torch's own, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import fsdp_ckpt
from tests.dist.drop_in_ranks import DTYPES, OBJECTS, READERS, WRITERS, bits, tensors
from tests.dist.stage import outcomes, play

pytestmark = pytest.mark.dist

PAIRS = [f"{writer} -> {reader}" for writer in WRITERS for reader in READERS]


@pytest.fixture(scope="session")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return play(tmp_path_factory, "tests.dist.drop_in_ranks", timeout_s=170)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", ["of_an_fsdp2_job", "of_fsdp1", "of_tensor_parallel_fsdp", "from_one_rank"])
def test_what_was_saved_comes_back(played: Path, name: str, pair: str) -> None:
    assert [rank[pair] for rank in outcomes(played, name)] == [True] * (4 if "parallel" in name else 2)


@pytest.mark.parametrize("pair", PAIRS)
def test_tensors_of_all_kinds_come_back(played: Path, pair: str) -> None:
    """All dtypes, 0-d and empty ones, strided sources and targets, objects: what differs is listed."""
    assert [rank[pair] for rank in outcomes(played, "of_all_kinds")] == [[], []]


def test_the_scenarios_are_what_they_are_called(played: Path) -> None:
    assert outcomes(played, "of_fsdp1")[0]["kinds"] == ["ShardedTensor", "Tensor"]
    assert "_StridedShard" in outcomes(played, "of_tensor_parallel_fsdp")[0]["placements"]


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("number", range(len(WRITERS)), ids=list(WRITERS))
def test_one_process_loads_what_two_ranks_saved(played: Path, number: int, reader: str) -> None:
    """Into no state dict at all, by the planner of torch's own converter."""
    model = outcomes(played, "from_two_ranks")[0]
    folder = played / "from_two_ranks" / "place" / f"saved {number}"
    found: dict[str, Any] = {}
    _load_state_dict(found, storage_reader=READERS[reader](folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    assert len(model) == 5
    assert {key: bits(found["model"][key]) for key in model} == model
    assert {key: bits(value) for key, value in found["tensors"].items()} == bits(tensors(1, whole=True))
    assert found["objects"] == OBJECTS


@pytest.mark.parametrize("number", range(len(WRITERS)), ids=list(WRITERS))
def test_the_rest_of_the_toolkit_reads_what_two_ranks_saved(played: Path, number: int, tmp_path: Path) -> None:
    folder = played / "from_two_ranks" / "place" / f"saved {number}"
    parts = fsdp_ckpt.inspect(folder).parts
    assert [list(part.problems) for part in parts] == [[]] * len(parts)
    with fsdp_ckpt.open_checkpoint(folder, framework="pt") as view:
        for key, value in outcomes(played, "from_two_ranks")[0].items():
            assert bits(view.get_tensor(key)) == value


def test_a_rank_for_each_file(played: Path) -> None:
    """Nothing but .metadata and the data files is left, as many as were asked for."""
    place = played / "from_two_ranks" / "place"
    found = [sorted(path.name for path in (place / f"saved {number}").iterdir()) for number in range(2)]
    assert found[0] == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert found[1] == [".metadata", *(f"__{rank}_{number}.distcp" for rank in range(2) for number in range(3))]


def test_cached_plans_go_to_the_place_of_this_save(played: Path) -> None:
    for rank in outcomes(played, "with_cached_plans"):
        for name in ("elsewhere", "to the same place"):
            assert rank[f"{name}: cached"] == ["DefaultSavePlanner"], "nothing was cached: nothing is tested"
            assert rank[f"{name}: 2"]
            assert rank[f"{name}: 3"]
            assert rank[f"{name}: hidden"] == []


def test_when_a_rank_fails_all_ranks_raise_and_the_old_checkpoint_stays(played: Path) -> None:
    for found in outcomes(played, "a_rank_fails"):
        for rank in (0, 1):
            assert list(found[f"rank {rank}"]) == [rank]
            kind, message = found[f"rank {rank}"][rank]
            assert kind == "NotEnoughSpace"
            assert f"__{rank}_0.distcp" in message
            assert found[f"rank {rank}: old"]
            assert len(found[f"rank {rank}: hidden"]) == 1
        assert found["once more"]
        assert found["new"]
        assert found["hidden"] == []


def test_what_a_failed_save_leaves_goes_with_its_writer(played: Path) -> None:
    for found in outcomes(played, "a_failed_save_leaves"):
        for name in ("close", "gone"):
            assert found[name]
            assert len(found[f"{name}: before"]) == 1
            assert found[f"{name}: after"] == []


def test_asynchronous_saves(played: Path) -> None:
    for found in outcomes(played, "asynchronously"):
        for name in ("thread 1", "thread 2", "process"):
            assert found[name] == []
        assert found["thread 2: places"]
        assert found["hidden"] == []


def test_ranks_that_save_for_themselves(played: Path) -> None:
    """torch fills what other ranks have with whatever is in memory; see facts/dcp.md, finding 3."""
    for rank, found in enumerate(outcomes(played, "each_rank_for_itself")):
        assert found["refused"].startswith("UsageError: with use_collectives=False")
        assert found["same ranks"]
        kind, message = found["whole"]["alone"]
        assert kind == "IncompleteCheckpoint"
        assert f"{(45, 60)[rank]} of 105 elements" in message
        assert found["untouched"]


def test_all_ranks_learn_of_a_flipped_bit(played: Path) -> None:
    found = outcomes(played, "a_rank_reads_damage")
    assert found[1]["torch is silent"], "the bit did no harm: nothing is tested"
    for rank in found:
        assert list(rank["ours"]) == [1]
        assert rank["ours"][1][0] == "ChecksumMismatch"
        assert [kind for kind, _ in rank["in columns"].values()] == ["ChecksumMismatch"]


def test_a_record_of_which_all_ranks_want_a_part_is_read_through_once(played: Path) -> None:
    first, second = (rank["read through"] for rank in outcomes(played, "from_one_rank"))
    assert len({*first, *second}) == len(first) + len(second)
    cut = {"large", "odd", "columns", *DTYPES}  # the one row, and what is not sharded, are read whole by somebody
    assert {*first, *second} == {f"tensors.{name}" for name in cut}
    assert first
    assert second


def test_the_path_of_the_first_rank_counts(played: Path) -> None:
    for found in outcomes(played, "paths_differ"):
        assert found == {"right": True, "names": ["run-0"]}
