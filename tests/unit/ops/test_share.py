from __future__ import annotations

import os
from pathlib import Path

import pytest

from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.ops.share import Share, all_done, note_done, publish_lock, share_from_environment
from fsdp_ckpt.run.engine import OutputSpec
from fsdp_ckpt.store.publish import Staging


def specs(*sizes: int) -> list[OutputSpec]:
    return [
        OutputSpec(name=f"f{i}", size=size, head=b"", ranges={}, tasks=lambda: iter(())) for i, size in enumerate(sizes)
    ]


@pytest.mark.parametrize(("text", "share"), [("1/1", (1, 1)), ("1/4", (1, 4)), ("4/4", (4, 4)), ("12/100", (12, 100))])
def test_texts(text: str, share: tuple[int, int]) -> None:
    found = Share.parse(text)
    assert (found.index, found.count) == share


@pytest.mark.parametrize("text", ["", "1", "0/4", "5/4", "1/0", "-1/4", "1/4/2", "a/b", "1.5/2", " 1/4"])
def test_what_is_no_share(text: str) -> None:
    with pytest.raises(UsageError, match="is not a share"):
        Share.parse(text)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("sizes", [(), (5,), (5, 5, 5, 5), (100, 1, 1, 1, 1, 90, 3), tuple(range(30)), (0, 0, 0)])
def test_every_file_belongs_to_exactly_one_share(sizes: tuple[int, ...], count: int) -> None:
    made = specs(*sizes)
    shares = [Share(index=index, count=count).of(made) for index in range(1, count + 1)]
    assert sorted(made.index(spec) for share in shares for spec in share) == list(range(len(sizes)))
    loads = [sum(spec.size for spec in share) for share in shares]
    if sizes:
        # Greedy by size: nobody has more than the largest file above the one who has least.
        assert max(loads) - min(loads) <= max(sizes)


TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "2", "WORLD_SIZE": "4"}
SLURM = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("environment", "share"),
    [
        ({}, None),
        (TORCHRUN, (3, 4)),
        (TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}, None),
        ({"RANK": "2", "WORLD_SIZE": "4"}, None),  # left over in a shell; nobody else is running
        (TORCHRUN | {"RANK": "x"}, None),
        (TORCHRUN | SLURM | {"RANK": "1"}, (2, 4)),
        (SLURM, (3, 4)),
        (SLURM | {"SLURM_STEP_ID": "4294967291"}, None),  # a batch script
        (SLURM | {"SLURM_STEP_ID": "4294967290"}, None),  # an interactive shell
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}, None),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        ({**SLURM, "RANK": "0", "WORLD_SIZE": "8"}, (3, 4)),
    ],
)
def test_what_launchers_say(environment: dict[str, str], share: tuple[int, int] | None) -> None:
    found = share_from_environment(environment)
    assert (None if found is None else (found.index, found.count)) == share


def test_markers(tmp_path: Path) -> None:
    first = Staging(tmp_path / "out", "ab12", shared=True)
    second = Staging(tmp_path / "out", "ab12", shared=True)
    assert all_done(first, Share(index=1, count=3)) == [1, 2, 3]
    note_done(second, Share(index=2, count=3))
    assert all_done(first, Share(index=1, count=3)) == [1, 3]
    note_done(first, Share(index=1, count=3))
    note_done(first, Share(index=3, count=3))
    assert all_done(second, Share(index=2, count=3)) == []
    assert all_done(second, Share(index=2, count=4)) == [1, 2, 3, 4], "of another number of shares"
    first.publish()
    assert os.listdir(tmp_path / "out") == []
    assert all_done(second, Share(index=2, count=3)) == [], "published: nothing is missing"


def test_only_one_of_those_who_finish_together_publishes(tmp_path: Path) -> None:
    first = Staging(tmp_path / "out", "ab12", shared=True)
    second = Staging(tmp_path / "out", "ab12", shared=True)
    with publish_lock(first, shared=True) as is_mine:
        assert is_mine
        first.publish()
    with publish_lock(second, shared=True) as is_mine:
        assert not is_mine


def test_a_run_on_its_own_publishes(tmp_path: Path) -> None:
    with publish_lock(Staging(tmp_path / "out", "ab12"), shared=False) as is_mine:
        assert is_mine
