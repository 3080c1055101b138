"""Files cut short, bits flipped: a merge refuses, or writes exactly what the undamaged files say."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli.tool import DCP, EXPECTED, FIXTURES, tensor_ranges, tensors
from tests.hostile.forge_dcp import Forged
from tests.hostile.sandbox import Case, Edit, Outcome, Sandbox


def _checkpoints() -> list[str]:
    """Every checkpoint of the fixtures that merges, by its folder."""
    rows = json.loads((FIXTURES / "MANIFEST.json").read_text())
    names = [f"torch-{row['torch'].partition('+')[0]}/{row['variant']}" for row in rows]
    edges = [f"edge/{path.name}" for path in sorted((FIXTURES / "edge").iterdir()) if path.is_dir()]
    return sorted({name for name in names if (FIXTURES / name).is_dir()}) + edges


def _source(name: str, folder: Path) -> Path:
    """Copy a checkpoint without the expected values that lie beside it."""
    shutil.copytree(FIXTURES / name, folder, ignore=shutil.ignore_patterns("expected*", "layout.json"))
    return folder


def _cuts(size: int) -> list[int]:
    return sorted({0, size // 2, size - 30, size - 1} & set(range(size)))


def _merge(source: Path, out: Path, edits: Sequence[Edit] = ()) -> Case:
    return Case(argv=["merge", str(source), str(out), "--no-fsync"], edits=edits, out=str(out), direct=True)


def _inspect(source: Path, edits: Sequence[Edit] = ()) -> Case:
    return Case(argv=["inspect", str(source), "--json"], edits=edits, direct=True)


def _judge(outcome: Outcome, right: str | None, what: str) -> str:
    """Return ``refused`` or ``harmless``; anything else is a failure."""
    assert not outcome.danger
    assert "Traceback" not in outcome.err, (what, outcome.err)
    assert "internal error" not in outcome.err, (what, outcome.err)
    assert not outcome.hidden, (what, outcome.hidden)
    if outcome.code == 0:
        assert outcome.digest == right, f"{what}: SILENTLY WRONG"
        return "harmless"
    assert outcome.code in (3, 4, 8), (what, outcome.code, outcome.err)
    assert outcome.digest is None, what
    return "refused"


@pytest.mark.parametrize("name", _checkpoints())
def test_a_file_cut_short_is_noticed(name: str, tmp_path: Path, sandbox: Sandbox) -> None:
    source, out = _source(name, tmp_path / "ckpt"), tmp_path / "out"
    (whole,) = sandbox.many([_merge(source, out)])
    files = [path for path in sorted(source.rglob("*")) if path.is_file()]
    if len(files) > 8:  # one file per item, or threads: they are alike
        files = [*files[:6], *files[-2:]]
    cases, names = [], []
    for path in files:
        for size in _cuts(path.stat().st_size):
            edits = [Edit(path=str(path), size=size)]
            cases += [_merge(source, out, edits), _inspect(source, edits)]
            names.append(f"{path.relative_to(source)} cut to {size} of {path.stat().st_size}")
    outcomes = sandbox.many(cases)
    found: Counter[str] = Counter()
    for what, merged, seen in zip(names, outcomes[::2], outcomes[1::2], strict=True):
        verdict = _judge(merged, whole.digest, what)
        found[verdict] += 1
        assert seen.code in (0, 3, 4, 8), (what, seen.code, seen.err)
        assert "internal error" not in seen.err, (what, seen.err)
        if verdict == "refused" and whole.code == 0:
            assert seen.code or not json.loads(seen.out)["complete"], f"{what}: inspect calls it complete"
        size = int(what.split()[-3])
        beside = ("optim", "extra_state", "__0_1.distcp", "__0_2.distcp", ".json")  # a merge needs none of them
        referenced = not any(part in what for part in beside)
        if size == 0 and referenced and whole.code == 0:
            assert verdict == "refused", what
    print(f"{name}: {dict(found)}")


def _flips(source: Path, file: str, positions: Sequence[int], out: Path, bit: int | None) -> list[Case]:
    data = (source / file).read_bytes()
    cases = []
    for at in positions:
        changed = data[at] ^ (1 << (at % 8 if bit is None else bit))
        cases.append(_merge(source, out, [Edit(path=str(source / file), offset=at, data=f"{changed:02x}")]))
    return cases


def _sweep(
    sandbox: Sandbox, source: Path, file: str, positions: Sequence[int], out: Path, *, bit: int | None = None
) -> Counter[str]:
    """Flip one bit at each position; return how many were refused, how many harmless."""
    (whole,) = sandbox.many([_merge(source, out)])
    assert whole.code == 0
    ranges = list(tensor_ranges((source / file).read_bytes()))
    assert sum(stop - start for start, stop in ranges)
    found: Counter[str] = Counter()
    for begin in range(0, len(positions), 500):
        some = positions[begin : begin + 500]
        for at, outcome in zip(some, sandbox.many(_flips(source, file, some, out, bit)), strict=True):
            verdict = _judge(outcome, whole.digest, f"{file} at {at}")
            found[verdict] += 1
            if any(start <= at < stop for start, stop in ranges):
                found["in tensors"] += 1
                assert verdict == "refused", at
                assert re.search(r"`\S+` is damaged", outcome.err), outcome.err
    return found


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Two tensors in two files, one with a checksum per shard and all."""
    forged = Forged()
    forged.tensor("a.weight", (4, 8), rows=(2, 2))
    forged.tensor("b", (24,), dtype="bfloat16")
    return forged.write(tmp_path / "ckpt")


def test_every_third_byte_of_a_small_file(small: Path, tmp_path: Path, sandbox: Sandbox) -> None:
    positions = range(0, (small / "__0_0.distcp").stat().st_size, 3)
    found = _sweep(sandbox, small, "__0_0.distcp", positions, tmp_path / "out")
    print(f"{len(positions)} bits flipped, one in every third byte: {dict(found)}, 0 silently wrong")
    assert found["refused"] > found["harmless"]
    assert found["in tensors"] >= (4 * 8 // 2 * 4 + 24 * 2) // 3


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("bit", range(8))
def test_every_bit_of_a_small_file(bit: int, small: Path, tmp_path: Path, sandbox: Sandbox) -> None:
    size = (small / "__0_0.distcp").stat().st_size
    found = _sweep(sandbox, small, "__0_0.distcp", range(size), tmp_path / "out", bit=bit)
    print(f"{size} bits flipped, bit {bit} of every byte: {dict(found)}, 0 silently wrong")
    assert found["in tensors"] == 4 * 8 // 2 * 4 + 24 * 2


def test_bits_of_a_file_that_torch_wrote(tmp_path: Path, sandbox: Sandbox) -> None:
    shutil.copytree(DCP, tmp_path / "ckpt")
    size = (tmp_path / "ckpt/__0_0.distcp").stat().st_size
    found = _sweep(sandbox, tmp_path / "ckpt", "__0_0.distcp", range(3, size, 97), tmp_path / "out")
    print(f"{dict(found)}, 0 silently wrong")
    assert found["refused"] > 60


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("file", ["__0_0.distcp", "__1_0.distcp"])
def test_every_byte_of_a_file_that_torch_wrote(file: str, tmp_path: Path, sandbox: Sandbox) -> None:
    shutil.copytree(DCP, tmp_path / "ckpt")
    size = (tmp_path / "ckpt" / file).stat().st_size
    found = _sweep(sandbox, tmp_path / "ckpt", file, range(size), tmp_path / "out")
    print(f"{size} bits flipped, one in every byte: {dict(found)}, 0 silently wrong")
    assert found["refused"] > 600


@pytest.mark.parametrize("file", ["__0_0.distcp", "__1_0.distcp"])
def test_a_page_of_zeros_is_noticed(file: str, tmp_path: Path, sandbox: Sandbox) -> None:
    source, out = shutil.copytree(DCP, tmp_path / "ckpt"), tmp_path / "out"
    (whole,) = sandbox.many([_merge(source, out)])
    size = (source / file).stat().st_size
    cases = [
        _merge(source, out, [Edit(path=str(source / file), offset=at, data="00" * min(512, size - at))])
        for at in range(0, size, 400)
    ]
    verdicts = Counter(_judge(outcome, whole.digest, "zeros") for outcome in sandbox.many(cases))
    assert verdicts["refused"] > 10


def test_bits_of_the_metadata(tmp_path: Path, sandbox: Sandbox) -> None:
    """``.metadata`` has no checksum: a changed name is a changed name. But no tensor may get other values."""
    source = shutil.copytree(DCP, tmp_path / "ckpt")
    expected = tensors(EXPECTED)
    data = (source / ".metadata").read_bytes()
    refused = right = 0
    positions = range(0, len(data), 23)
    for begin in range(0, len(positions), 50):
        some = positions[begin : begin + 50]
        cases = [
            Case(
                argv=["merge", str(source), str(tmp_path / f"out-{at}"), "--no-fsync"],
                edits=[Edit(path=str(source / ".metadata"), offset=at, data=bytes([data[at] ^ (1 << at % 8)]).hex())],
                direct=True,
            )
            for at in some
        ]
        for at, outcome in zip(some, sandbox.many(cases), strict=True):
            out = tmp_path / f"out-{at}"
            assert "internal error" not in outcome.err, (at, outcome.err)
            if outcome.code:
                assert outcome.code in (3, 4, 8), (at, outcome.err)
                assert not out.exists()
                refused += 1
                continue
            for name, value in tensors(out).items():
                assert name not in expected or expected[name] == value, f"byte {at}: `{name}` has other values"
            right += 1
    print(f"{len(positions)} bits flipped: {refused} refused, {right} with the right values")
    assert refused > 0 < right


def test_files_of_another_save_are_noticed(tmp_path: Path, sandbox: Sandbox) -> None:
    """Two rank files exchanged, one copied over the other, one appended to: refused, or nothing changes."""
    out = tmp_path / "out"
    for change in ("swap", "copy", "append", "prepend"):
        source = shutil.copytree(DCP, tmp_path / change)
        (whole,) = sandbox.many([_merge(source, out)])
        first, second = source / "__0_0.distcp", source / "__1_0.distcp"
        a, b = first.read_bytes(), second.read_bytes()
        first.write_bytes({"swap": b, "copy": b, "append": a + b, "prepend": b + a}[change])
        if change == "swap":
            second.write_bytes(a)
        (outcome,) = sandbox.many([_merge(source, out)])
        verdict = _judge(outcome, whole.digest, change)
        assert verdict == ("harmless" if change == "append" else "refused"), change
