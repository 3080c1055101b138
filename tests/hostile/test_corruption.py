"""The corruption sweep: whatever changes what a loader returns is found by ``validate --deep``, and nothing else is.

What loaders return is told by torch, safetensors and the json module, see ``loader_judge``; what nobody can find, as
the writer recorded nothing, is told by ``undetectable`` from the files. Both figures are printed.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_ckpt.ops.validate import validate
from tests.cli.tool import FIXTURES, ROOT
from tests.dist.stage import outcomes, play
from tests.hostile.corruption import Change, Outcome, Server, changes, read_tree
from tests.hostile.loader_judge import ERROR
from tests.hostile.operations import Tree, apply
from tests.hostile.undetectable import BYTES, kind_of

SHARED = ROOT.parent / "shared"
FOREIGN = [
    "torch-2.1.2/fsdp1_sharded_w2", "torch-2.13.0/fsdp1_sharded_w2", "torch-2.13.0/fsdp2_sharded_w2",
    "torch-2.13.0/fsdp2_sharded_w3", "torch-2.13.0/dcp_threads_w2", "torch-2.13.0/dcp_nocollectives_w2",
    "torch-2.13.0/dcp_zstd_w2", "torch-2.13.0/dcp_safetensors_w2", "torch-2.13.0/objects_w2", "torch-2.13.0/full_w2",
    "torch-2.13.0/rank_files_fsdp1_w2", "torch-2.13.0/rank_files_fsdp2_w2", "torch-2.13.0/hf_w1",
    "torch-2.13.0/hf_sharded_w2", "edge/tied", "edge/nocrc", "edge/model_optim_dsd",
]  # fmt: skip
OWN = ["own_w1/place/step-1", "own_w2/place/step-1", "own_full_w2/place/step-1"]
COMPOSITE = "composite_w2/place/checkpoint-1"
BESIDE = shutil.ignore_patterns("expected*", "layout.json", "fsdp_config.json")
"""Judges of the fixtures, and what no loader of tensors reads."""


TOTAL: Counter[str] = Counter()
"""Of all sweeps of this process."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    client = Server()
    yield client
    client.close()
    _print("all together", TOTAL)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``saved_ranks`` writes."""
    return play(tmp_path_factory, "tests.hostile.saved_ranks")


def _sweep(source: Path, name: str, place: Path, server: Server, scale: int) -> Counter[str]:
    """Try all changes of one checkpoint; return how many there were, and how many of each kind cannot be found."""
    folder = place / source.name
    shutil.copytree(source, folder, ignore=BESIDE)
    tree = read_tree(folder)
    is_own = "fsdp_ckpt.json" in tree
    older = read_tree(source.with_name("step-2")) if is_own else None
    todo = changes(tree, scale=scale, seed=name, older=older)
    intact, found = server.attempt(folder, todo)
    assert read_tree(folder) == tree
    assert intact.crash is None
    assert intact.raised is None
    assert not intact.faults
    assert ERROR not in intact.parts.values()
    counts = Counter({"changes": len(todo)})
    for change, outcome in zip(todo, found, strict=True):
        assert outcome.crash is None, (change.text, outcome.crash)
        assert outcome.raised is None or outcome.raised[1] in (3, 4, 8), (change.text, outcome.raised)
        if dict(outcome.parts) != dict(intact.parts):
            counts["altered"] += 1
            counts[_verdict(change, tree, intact, outcome, is_own=is_own)] += 1
    return counts


ENOUGH = {"W113", "W505"}
"""What is no more than a warning: a data file that nothing names, as an earlier save leaves them; a rank's random state
that is not there, which that rank begins anew."""


def _verdict(change: Change, tree: Tree, intact: Outcome, outcome: Outcome, *, is_own: bool) -> str:
    """Return ``found``, or the kind of what cannot be found; anything else is a failure."""
    if outcome.errors or outcome.raised is not None:
        return "found"
    warned = {code for _, code, *_ in outcome.faults - intact.faults}
    if warned:
        assert warned <= ENOUGH, f"no more than a warning: {change.text}: {warned}"
        return "found"
    differing = {part: digest for part, digest in outcome.parts.items() if digest != intact.parts.get(part)}
    kind = kind_of(change, tree, apply(tree, change.operations), differing)
    assert kind is not None, f"MISSED: {change.text}; loaders then return {differing}"
    assert not is_own, f"MISSED, though the manifest says it: {change.text}"
    if kind in BYTES:
        assert "N304" in outcome.notes, change.text
    return f"undetectable: {kind}"


def _show(name: str, counts: Counter[str]) -> None:
    TOTAL.update(counts)
    assert counts["altered"] == counts["found"] + _print(name, counts)
    assert counts["found"] >= 10, "the sweep has lost its way"


def _print(name: str, counts: Counter[str]) -> int:
    kinds = {kind.removeprefix("undetectable: "): n for kind, n in counts.items() if kind.startswith("undetectable")}
    print(
        f"{name}: {counts['changes']} changes, {counts['altered']} alter what a loader returns, {counts['found']} "
        f"found, {sum(kinds.values())} undetectable by construction {kinds or ''}"
    )
    return sum(kinds.values())


@pytest.mark.parametrize("name", FOREIGN)
def test_what_alters_a_loaders_result_is_found(name: str, tmp_path: Path, server: Server) -> None:
    _show(name, _sweep(FIXTURES / name, name, tmp_path, server, 1))


@pytest.mark.parametrize("name", [*OWN, COMPOSITE])
def test_what_alters_a_saved_state_is_found(name: str, tmp_path: Path, server: Server, saved: Path) -> None:
    """Of ours without exception, as the manifest has a checksum of every file, and one of itself."""
    outcomes(saved, name.partition("/")[0])
    _show(name, _sweep(saved / name, name, tmp_path, server, 1))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [*FOREIGN, *OWN, COMPOSITE])
def test_ten_times_as_many_changes(name: str, tmp_path: Path, server: Server, saved: Path) -> None:
    source = FIXTURES / name if name in FOREIGN else saved / name
    _show(name, _sweep(source, f"{name} again", tmp_path, server, 10))


# --- intact ones

EXPECTED_FAULTS = {
    "local_state_dict": {"E401"},  # flat parameters have no names: only the job that saved them can load them
    "edge/stale": {"W113"},  # files of an earlier save lie beside it
    "edge/nontensor": {"E111"},  # an object of a class of the writer's own
    "edge/noflatten": {"E109"},  # its tensors are in one object
}


def _folders() -> list[Path]:
    """All checkpoints there are, also those within others.

    Those of frameworks and DeepSpeed hold folders that are none by themselves; each is validated by tests/contract.
    """
    roots = [path for top in (FIXTURES, SHARED / "golden") for path in sorted(top.glob("*/*")) if path.is_dir()]
    roots = [path for path in roots if path.parent.name not in ("deepspeed", "frameworks")]
    roots += [path for path in sorted((SHARED / "edge").glob("*")) if path.is_dir()]
    found = [below for root in roots for below in [root, *sorted(root.rglob("*"))] if below.is_dir()]
    return found + [path.parent for path in sorted((SHARED / "real").rglob(".metadata"))]


def _is_wrong(folder: Path) -> bool:
    """Tell whether a checkpoint is known to be wrong: torch 2.3 saved optimizers of 2D meshes with others' shards."""
    return "torch-2.3.1/fsdp2_w4_mesh2x2" in str(folder)


def test_nothing_is_found_in_what_is_intact() -> None:
    if not SHARED.exists():
        print("../shared is not there: only the fixtures are looked at")
    number = 0
    for folder in _folders():
        report = validate(folder, level="deep", strict=True)
        faults = {finding.code for finding in report.findings if finding.severity != "note"}
        expected = next((codes for name, codes in EXPECTED_FAULTS.items() if name in str(folder)), set())
        if not _is_wrong(folder):
            assert faults <= expected, (folder, [one for one in report.findings if one.code in faults])
        number += not expected
    print(f"{number} intact checkpoints, 0 findings")
    assert number > 60


@pytest.mark.parametrize("name", [*OWN, COMPOSITE])
def test_nothing_is_found_in_what_was_just_saved(name: str, saved: Path) -> None:
    report = validate(saved / name, level="deep", strict=True)
    assert [one for one in report.findings if one.severity != "note"] == []
    assert report.checked.unverified_bytes == 0
    assert report.ok
