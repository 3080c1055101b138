"""Several processes share one merge: in any order, at once, under torchrun or SLURM, the result is the same."""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path

import pytest

from tests.cli.tool import DCP, EXPECTED, TOOL, assert_refused, environment, leftovers, run, tensors
from tests.hostile.sandbox import Sandbox

MANY = ("--max-shard-size", "1KB")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a merge by one process."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert run("merge", DCP, out, *MANY).code == 0
    return _files(out)


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("order", list(itertools.permutations([1, 2, 3])), ids=str)
def test_shares_in_any_order(order: tuple[int, ...], whole: dict[str, bytes], tmp_path: Path, sandbox: Sandbox) -> None:
    out = tmp_path / "out"
    for number, share in enumerate(order, start=1):
        assert not out.exists()
        outcome = sandbox.run("merge", DCP, out, *MANY, "--part", f"{share}/3")
        assert outcome.code == 0, outcome.err
        assert ("waiting for" in outcome.out) is (number < 3)
    assert _files(out) == whole
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("count", [1, 2, 9])
def test_any_number_of_shares(count: int, whole: dict[str, bytes], tmp_path: Path, sandbox: Sandbox) -> None:
    for share in range(1, count + 1):
        assert sandbox.run("merge", DCP, tmp_path / "out", *MANY, "--part", f"{share}/{count}").code == 0
    assert _files(tmp_path / "out") == whole
    assert leftovers(tmp_path) == []


def test_a_share_that_is_run_twice(whole: dict[str, bytes], tmp_path: Path, sandbox: Sandbox) -> None:
    for share in (1, 1, 2, 1, 3):
        assert sandbox.run("merge", DCP, tmp_path / "out", *MANY, "--part", f"{share}/3").code == 0
    assert _files(tmp_path / "out") == whole


def _at_once(out: Path, environments: list[dict[str, str]], *options: str) -> list[tuple[int, str, str]]:
    runs = [
        subprocess.Popen(
            [TOOL, "merge", str(DCP), str(out), *MANY, *options],
            env=environment(**env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for env in environments
    ]
    texts = [process.communicate(timeout=60) for process in runs]
    return [(process.returncode, *text) for process, text in zip(runs, texts, strict=True)]


def test_shares_at_once_as_torchrun_starts_them(whole: dict[str, bytes], tmp_path: Path) -> None:
    for attempt in range(3):
        out = tmp_path / f"out{attempt}"
        ranks = [{"TORCHELASTIC_RUN_ID": "none", "RANK": str(rank), "WORLD_SIZE": "3"} for rank in range(3)]
        done = _at_once(out, ranks)
        assert [code for code, _, _ in done] == [0, 0, 0], done
        assert _files(out) == whole
        assert any("merged 16 tensors" in text for _, text, _ in done)
    assert leftovers(tmp_path) == []


def test_shares_at_once_as_srun_starts_them(whole: dict[str, bytes], tmp_path: Path) -> None:
    ranks = [{"SLURM_PROCID": str(n), "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0"} for n in range(2)]
    done = _at_once(tmp_path / "out", ranks)
    assert [code for code, _, _ in done] == [0, 0], done
    assert _files(tmp_path / "out") == whole


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "1", "WORLD_SIZE": "4"},
        {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "1"},
        {"TORCHELASTIC_RUN_ID": "x", "RANK": "", "WORLD_SIZE": ""},
        {"TORCHELASTIC_RUN_ID": "x", "RANK": "one", "WORLD_SIZE": "two"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"},
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_ID": "4294967294"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"},
    ],
    ids=str,
)
def test_variables_that_do_not_mean_a_share(variables: dict[str, str], tmp_path: Path) -> None:
    """Left over in a shell, or of a batch script that runs once: it is the whole merge."""
    result = run("merge", DCP, tmp_path / "out", env=environment(**variables))
    assert result.code == 0, result.err
    assert tensors(tmp_path / "out") == tensors(EXPECTED)


def test_a_rank_outside_of_its_world_is_refused(tmp_path: Path) -> None:
    variables = {"TORCHELASTIC_RUN_ID": "x", "RANK": "9", "WORLD_SIZE": "4"}
    result = run("merge", DCP, tmp_path / "out", *MANY, env=environment(**variables))
    assert_refused(result, 2)
    assert not (tmp_path / "out").exists()


def test_a_share_of_a_finished_merge_is_refused_or_changes_nothing(whole: dict[str, bytes], tmp_path: Path) -> None:
    assert run("merge", DCP, tmp_path / "out", *MANY).code == 0
    result = run("merge", DCP, tmp_path / "out", *MANY, "--part", "1/3")
    assert_refused(result, 5)
    assert _files(tmp_path / "out") == whole


def test_shares_replace_an_old_result_when_all_are_there(whole: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("merge", DCP, out).code == 0
    before = _files(out)
    for share in (2, 1):
        result = run("merge", DCP, out, *MANY, "--overwrite", "--part", f"{share}/3")
        assert result.code == 0, result.err
        assert _files(out) == before
    assert run("merge", DCP, out, *MANY, "--overwrite", "--part", "3/3").code == 0
    assert _files(out) == whole
    assert leftovers(tmp_path) == []
