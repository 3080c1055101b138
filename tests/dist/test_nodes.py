"""Nodes with disks of their own: each has its ranks' files and what all need; nothing is lost or mixed up silently."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.dist.stage import outcomes, play

pytestmark = [pytest.mark.dist, pytest.mark.timeout(200)]


@pytest.fixture(scope="session")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    done = subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True, timeout=20)
    if done.returncode:
        pytest.skip(f"no mount namespaces here: {done.stderr.decode().strip()}")
    return play(tmp_path_factory, "tests.dist.nodes_ranks")


def test_each_node_has_its_ranks_files_and_what_all_need(played: Path) -> None:
    ranks = outcomes(played, "saves_and_loads")
    for rank in ranks:
        assert rank["first"]
        assert rank["second"]
        assert rank["first warnings"] == rank["second warnings"] == []
        assert (rank["rng"], rank["data"]) == ("restored", "restored")
    shared = {"fsdp_ckpt.json", "scheduler.bin", "optimizer_0/.metadata", "pytorch_model_fsdp_0/.metadata"}
    for node, files in enumerate(ranks[0]["files"]):
        names = {name.removeprefix("step-1/") for name in files}
        own, other = (0, 1) if node == 0 else (2, 3), (2, 3) if node == 0 else (0, 1)
        assert shared <= names
        assert {f"random_states_{rank}.pkl" for rank in own} <= names
        assert {f"optimizer_0/__{rank}_0.distcp" for rank in own} <= names
        assert not {f"optimizer_0/__{rank}_0.distcp" for rank in other} & names
        assert not any(".fsdp-ckpt" in name for name in files), "nothing hidden is left"


def test_the_folders_of_all_nodes_are_merged_and_one_alone_is_refused(played: Path) -> None:
    first = outcomes(played, "saves_and_loads")[0]
    assert first["merged"]
    assert first["alone"]["kind"] == "IncompleteCheckpoint"
    assert "rank" in first["alone"]["message"]


def test_an_asynchronous_save_does_the_same(played: Path) -> None:
    for rank in outcomes(played, "saves_in_the_background"):
        assert rank["right"]
        assert min(rank["files"]) > 10


def test_ranks_that_changed_places_get_their_shards_from_the_other_node(played: Path) -> None:
    for rank in outcomes(played, "ranks_change_places"):
        assert rank["right"]
        assert (rank["rng"], rank["data"]) == ("restored", "restored")
        assert not [name for name in rank["spilled"] if name.startswith("fsdp-ckpt-")], "what was fetched is removed"


def test_another_number_of_ranks_loads(played: Path) -> None:
    found = outcomes(played, "fewer_ranks_load")
    assert [rank and rank["right"] for rank in found] == [True, None, True, None]
    assert found[0]["saved_by"] == 4


def test_a_file_that_no_node_has_is_named_with_its_rank(played: Path) -> None:
    for rank in outcomes(played, "a_file_is_lost"):
        assert rank["kind"] == "IncompleteCheckpoint"
        assert "optimizer_0/__3_0.distcp (of rank 3)" in rank["message"]
        assert rank["untouched"]


def test_shards_that_went_with_their_node_are_named(played: Path) -> None:
    for rank in outcomes(played, "a_node_is_new"):
        assert rank["kind"] == "IncompleteCheckpoint"
        assert "(of rank 2)" in rank["message"]
        assert rank["untouched"]


def test_a_node_that_lacks_what_another_has_gets_it(played: Path) -> None:
    for rank in outcomes(played, "a_node_is_new_and_nothing_was_on_it"):
        assert rank["kind"] == "nothing", rank["message"]
        assert rank["right"]


def test_different_saves_are_not_mixed(played: Path) -> None:
    for rank in outcomes(played, "a_node_has_another_save"):
        assert rank["kind"] == "IncompleteCheckpoint"
        assert "another save" in rank["message"]
        assert rank["untouched"]


def test_a_failure_on_one_node_leaves_all_nodes_as_they_were(played: Path) -> None:
    for rank in outcomes(played, "a_node_fails"):
        assert rank["kind"] == "NotEnoughSpace"
        assert "rank 2" in rank["message"]
        assert rank["same"]
        assert rank["previous"]


def test_every_node_is_pruned_and_the_first_rank_decides_what_is_there(played: Path) -> None:
    for rank in outcomes(played, "every_node_is_pruned"):
        assert rank["left"] == [["step-2", "step-3"]] * 2
        assert rank["resumed"] == 2
        assert rank["then"] == [["step-4"]] * 2, "also what a killed job had removed from one node alone"


def test_a_failure_while_nodes_publish_takes_all_of_them_back(played: Path) -> None:
    for rank in outcomes(played, "a_node_fails_to_publish"):
        assert rank["kind"] == "RankFailed"
        assert "Input/output error" in rank["message"]
        assert rank["same"], "on both nodes, in every byte"
        assert rank["previous"]
        assert rank["other"] == "RankFailed"
        assert rank["steps"][1] == ["step-1"], "what the second node had published of a new step is gone"


def test_whole_state_dicts_are_pruned_on_all_nodes(played: Path) -> None:
    for rank in outcomes(played, "whole_files_are_pruned_everywhere"):
        assert rank == [["step-3"], ["step-3"]]


def test_resuming_does_not_begin_anew_when_only_the_first_node_is(played: Path) -> None:
    for rank in outcomes(played, "the_first_node_is_new"):
        assert rank["kind"] == "IncompleteCheckpoint"
        assert "of rank 2" in rank["message"]
