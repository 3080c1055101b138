"""A failure on one rank is the same error on all of them, at once; nothing of before is lost, and nothing is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cases.launch import build_once, run_module
from tests.dist.stage import outcomes

pytestmark = pytest.mark.dist

SOON_S = 10

DEATHS = [
    "dies_while_collecting", "dies_while_writing", "dies_while_loading", "dies_while_exporting",
    "is_interrupted_while_writing",
]  # fmt: skip

SAVES = {
    "collecting_fails": ("RankFailed", "rank 1: KeyError: 'lost'"),
    "collecting_a_model_fails": ("RankFailed", "rank 1: ValueError: no such thing"),
    "a_full_disk": ("NotEnoughSpace", "rank 1: OSError: [Errno 28] No space left on device"),
    "a_broken_disk_of_the_first_rank": ("RankFailed", "rank 0: OSError: [Errno 5] Input/output error"),
    "a_full_disk_for_one_file": ("NotEnoughSpace", "rank 0: OSError: [Errno 28] No space left on device"),
    "small_files_fail": ("RankFailed", "rank 1: OSError: [Errno 5] Input/output error"),
    "metadata_fail": ("RankFailed", "rank 0: OSError: [Errno 5] Input/output error"),
    "the_manifest_fails": ("RankFailed", "rank 0: OSError: [Errno 5] Input/output error"),
    "publishing_fails": ("RankFailed", "rank 0: OSError: [Errno 30] Read-only file system"),
    "a_hook_refuses_to_save": ("Vetoed", "rank 1: {path}: refused by a hook: loss is not finite"),
    "an_error_that_torch_raises": ("RankFailed", "rank 1: CheckpointException"),
}

LOADS = {
    "a_hook_refuses_to_load": ("Vetoed", "rank 1: {path}: refused by a hook: loss is not finite"),
    "reading_fails": ("RankFailed", "rank 1: OSError: [Errno 5] Input/output error"),
}

DAMAGE = {
    "a_bit_of_one_rank_has_flipped": ("ChecksumMismatch", "rank 1: `model.0.weight` is damaged"),
    "the_file_of_one_rank_is_gone": ("IncompleteCheckpoint", "optimizer_0/__1_0.distcp: listed in the"),
    "the_random_states_of_one_rank_are_gone": ("IncompleteCheckpoint", "random_states_1.pkl: listed in the manifest"),
    "the_data_position_of_one_rank_is_garbage": ("MalformedFile", "rank 1: dl_states_1.pkl"),
}


@pytest.fixture(scope="session")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def build(folder: Path) -> None:
        run_module("tests.dist.failure_ranks", str(folder), timeout_s=120)

    return build_once(tmp_path_factory, "failure_ranks", build)


def _all_raised(found: list[dict[str, Any]], kind: str, text: str) -> None:
    assert [rank["kind"] for rank in found] == [kind] * len(found)
    assert len({rank["message"] for rank in found}) == 1
    for rank in found:
        assert text in rank["message"]
        assert rank["seconds"] < SOON_S


@pytest.mark.parametrize("name", SAVES)
def test_a_save_that_fails_on_one_rank_fails_on_all(played: Path, name: str) -> None:
    kind, text = SAVES[name]
    path = played / name / "place" / "run" / "step-1"
    found = outcomes(played, name)
    _all_raised(found, kind, text.format(path=path))
    assert f"saving {path} failed" in found[0]["message"]


@pytest.mark.parametrize("name", SAVES)
def test_after_a_failed_save_all_is_as_before(played: Path, name: str) -> None:
    for rank in outcomes(played, name):
        assert rank["live"], "the save changed the model or the optimizer"
        assert rank["files"], "files have changed, or are left over"
        assert rank["previous"], "the previous checkpoint does not load any more"
        assert rank["next"], "the next save does not hold what was saved"


@pytest.mark.parametrize("name", LOADS)
def test_a_load_that_fails_on_one_rank_changes_nothing_on_any(played: Path, name: str) -> None:
    kind, text = LOADS[name]
    path = played / name / "place" / "run" / "step-1"
    found = outcomes(played, name)
    _all_raised(found, kind, text.format(path=path))
    for rank in found:
        assert f"loading {path} failed" in rank["message"]
        assert (rank["live"], rank["again"]) == (True, True)


def test_a_load_that_fails_half_way_says_so(played: Path) -> None:
    found = outcomes(played, "reading_once_more_fails")
    _all_raised(found, "RankFailed", "may be half loaded: do not go on with them) failed: rank 1: OSError")
    for rank in found:
        assert rank["again"]


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_of_one_ranks_files_changes_nothing_and_resume_takes_the_one_before(played: Path, name: str) -> None:
    found = outcomes(played, name)
    _all_raised(found, *DAMAGE[name])
    for rank in found:
        assert (rank["live"], rank["resumed"]) == (True, "step-1")


@pytest.mark.parametrize("what", ["save", "exported", "model"])
def test_another_model_on_one_rank_is_refused(played: Path, what: str) -> None:
    found = outcomes(played, "another_model_on_one_rank")
    _all_raised([rank if what == "save" else rank[what] for rank in found], "Incompatible", "(7, 6) on rank 1")
    assert [rank["left"] for rank in found] == [[], []]


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("another_path_on_one_rank", ["step-0", "step-1"]),
        ("another_style_on_one_rank", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"]),
        ("an_optimizer_on_one_rank_only", ["what is to be saved differs", "'optimizers': ['0']", "'optimizers': []"]),
        ("a_hook_skips_on_one_rank", ["optimizer_0"]),
    ],
)
def test_arguments_that_differ_between_ranks_are_refused(played: Path, name: str, texts: list[str]) -> None:
    found = outcomes(played, name)
    for text in texts:
        _all_raised(found, "UsageError", text)
    for rank in found:
        assert "rank 1" in rank["message"]
        assert rank["left"] == []
        assert rank["hint"] == "call it with the same arguments on every rank"


def test_an_export_that_fails_on_one_rank_fails_on_all(played: Path) -> None:
    found = outcomes(played, "exporting_fails")
    _all_raised(found, "RankFailed", "get_state_dict failed: rank 1: ValueError: no such thing")
    _all_raised([rank["model"] for rank in found], "RankFailed", "rank 1: ValueError: no such thing")
    assert [rank["left"] for rank in found] == [[], []]


def test_another_path_to_load_from_is_refused(played: Path) -> None:
    found = [rank["load"] for rank in outcomes(played, "another_path_on_one_rank")]
    _all_raised(found, "UsageError", "step-5")


def test_of_two_groups_that_save_to_one_path_each_wins_or_is_told(played: Path) -> None:
    found = outcomes(played, "two_groups_save_to_one_path")
    for pair in (found[:2], found[2:]):
        assert len({rank["kind"] for rank in pair}) == 1
        assert pair[0]["kind"] in ("nothing", "DestinationExists")
    assert any(rank["kind"] == "nothing" for rank in found)
    assert len({rank["bits"] for rank in found}) == 1
    assert [rank["left"] for rank in found] == [["step-1"]] * 4


@pytest.mark.parametrize("name", DEATHS)
def test_when_a_rank_ends_the_others_soon_know(played: Path, name: str) -> None:
    found = outcomes(played, name)
    assert [rank["kind"] for rank in found] == ["RankFailed", "RankFailed"]  # the third one left no word
    for number, rank in enumerate(found):
        assert f"rank {number} lost touch with the other ranks" in rank["message"]
        assert "a rank died or hangs" in rank["hint"]
        assert rank["seconds"] < SOON_S
        assert rank["live"]
    assert found[0]["files"], "the checkpoint was touched, or files are left over"


FOLDERS = {
    "home": "notes.txt",
    "checkout": "model.py",
    "dotted": ".hidden",
    "file": "is a file",
    "run": "step-1",
    "nested/beside": "thesis.tex",
    "link": "notes.txt",
    "not overwriting": "exists",
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_of_others_are_never_replaced(played: Path, name: str) -> None:
    found = outcomes(played, "folders_of_others")
    _all_raised([rank["tries"][name] for rank in found], "DestinationExists", FOLDERS[name])
    for rank in found:
        assert rank["tries"][name]["hint"]
        assert rank["untouched"]


WRONG = {
    "type": ("UsageError", "'SHARDED' is none of SHARDED_STATE_DICT", None),
    "lone optimizer": ("UsageError", "an optimizer was given without its model", "pass the model as well"),
    "early optimizer": ("UsageError", "parameter 0 of group 0 of the SGD", "after FSDP wrapped them"),
    "early optimizer of FSDP2": ("UsageError", "parameter 0 of group 0 of the SGD", "after FSDP wrapped them"),
    "scheduler": ("UsageError", "scheduler `0` (object) has no state_dict", "the object itself"),
    "loader": ("UsageError", "dataloader `0` (object) has no state_dict", "StatefulDataLoader"),
    "model": ("UsageError", "no torch.nn.Module", None),
    "optimizer": ("UsageError", "object is no optimizer", None),
    "values": ("UsageError", "values: ", "numbers, texts"),
    "tensor in values": ("UsageError", "values: Object of type Tensor", "objects="),
    "url": ("UsageError", "`hf://user/run/step-1`: the Hub takes whole commits", "fsdp-ckpt push"),
    "local": ("Incompatible", "LOCAL_STATE_DICT is a form of FSDP1", "SHARDED_STATE_DICT"),
    "meta": ("UsageError", "on the meta device (0.weight and 6 others)", "before saving"),
    "get meta": ("UsageError", "on the meta device", "initialize"),
    "export meta": ("UsageError", "on the meta device", "initialize"),
    "load meta": ("UsageError", "on the meta device", "to_empty"),
    "load lone optimizer": ("UsageError", "an optimizer was given without its model", "pass the model as well"),
    "load resize": ("UsageError", "resize='shrink'", '"grow"'),
    "load positions": ("UsageError", "positions='any'", '"exact"'),
    "load nothing there": ("CheckpointNotFound", "goof` does not exist", "holds: good"),
    "load scaler": ("CheckpointNotFound", "the checkpoint has no scaler", "scaler="),
    "load other model": ("StateMismatch", "missing in the checkpoint: weight, bias", "strict=False"),
    "keep": ("UsageError", "keep=0", None),
    "step": ("UsageError", "step -1", None),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named_with_what_to_do(played: Path, name: str) -> None:
    kind, text, hint = WRONG[name]
    found = outcomes(played, "wrong_arguments")
    _all_raised([rank["tries"][name] for rank in found], kind, text)
    for rank in found:
        assert hint is None or hint in rank["tries"][name]["hint"]
        assert rank["left"] == ["good"]
        assert rank["live"]
