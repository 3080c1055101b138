"""Killed, or out of disk, or with a failing disk, at any system call: the destination is whole or as it was."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.tool import DCP, EXPECTED, Tensors, leftovers, run, tensors
from tests.crash.strace import Fault, Point, skip_without_strace, strike, watch
from tests.hostile.sandbox import Sandbox

KILL = "signal=KILL"
ERRORS = ("error=ENOSPC", "error=EIO")
LOCKS = (".fsdp-ckpt-lock", ".fsdp-ckpt-publish")
MUST_FAIL = {"write", "pwrite64", "fsync", "ftruncate", "mkdir", "rename"}
"""Calls whose failure may not be passed over in silence."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A merge to be disturbed.

    Attributes:
        options: Of the merge.
        old: Whether there is an old result to be replaced.
        below: Folders to be made above the destination.
    """

    options: Sequence[str] = ("--max-shard-size", "2KB")
    old: bool = False
    below: str = ""


SCENES = {
    "fresh": Scene(below="new"),
    "overwrite": Scene(options=("--max-shard-size", "2KB", "--overwrite"), old=True),
    "bin": Scene(options=("--format", "bin")),
    "resume": Scene(options=("--max-shard-size", "2KB", "--resume")),
    "remove-source": Scene(options=("--remove-source",)),
    "share": Scene(options=("--max-shard-size", "2KB", "--part", "1/1")),
}


class Stage:
    """A folder with a source and a destination, set up anew before every fault, with the same names and times."""

    def __init__(self, folder: Path, scene: Scene) -> None:
        self.scene = scene
        self.log = folder / "log"
        self.where = folder / "where"
        self.out = self.where / scene.below / "out"
        self.source = folder / "source"
        self.arguments = ["merge", str(self.source), str(self.out), *scene.options]
        self.right: Tensors = tensors(EXPECTED)

    def set_up(self) -> None:
        shutil.rmtree(self.where, ignore_errors=True)
        shutil.rmtree(self.source, ignore_errors=True)
        shutil.copytree(DCP, self.source)
        (self.source / "config.json").write_text('{"model_type": "llama"}')
        self.where.mkdir()
        if self.scene.old:
            self.out.mkdir()
            (self.out / "model.safetensors").write_bytes(b"old")
            (self.out / "config.json").write_text("old")

    def points(self) -> list[Point]:
        self.set_up()
        found = watch(self.arguments, self.where, self.log)
        assert self.state() == "new"
        assert len({point.call for point in found}) >= 6, found
        return found

    def state(self) -> str:
        """Return what is at the destination: ``absent``, ``old``, ``new``, or what is wrong with it."""
        if not self.out.exists():
            return "absent"
        # Killed right after the rename, it may leave its locks: hidden, empty, and the next run takes them away.
        names = {path.name for path in self.out.iterdir() if path.name not in LOCKS or path.stat().st_size}
        if {(self.out / name).read_bytes() for name in names} == {b"old"} and len(names) == 2 and self.scene.old:
            return "old"
        if self.scene.options[:2] == ("--format", "bin"):
            return "new" if names == {"pytorch_model.bin", "config.json"} and self._is_sound_archive() else f"{names}"
        sharded = len(names) > 2
        if ("model.safetensors.index.json" in names) is not sharded or "config.json" not in names:
            return f"incomplete: {names}"
        if names - {"config.json", "model.safetensors.index.json"} != {p.name for p in self.out.glob("*.safetensors")}:
            return f"foreign files: {names}"
        try:
            return "new" if tensors(self.out) == self.right else "wrong values"
        except Exception as error:  # noqa: BLE001  # whatever the library says about a broken file
            return f"unreadable: {error}"

    def _is_sound_archive(self) -> bool:
        import torch

        found = torch.load(self.out / "pytorch_model.bin", weights_only=True)
        return {
            name: tuple(tensor.shape) for name, tensor in found.items()
        } == {name: shape for name, (_, shape, _) in self.right.items()} and all(
            tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() == self.right[name][2]
            for name, tensor in found.items()
        )  # fmt: skip

    def disturb(self, fault: Fault, sandbox: Sandbox) -> str:
        """Let a fault strike and check all that must hold; return what became of the destination."""
        self.set_up()
        before = self.state()
        result, struck = strike(fault, self.arguments, self.log)
        assert struck, f"{fault}: not reached\n{result}"
        state = self.state()
        assert state in (before, "new"), f"{fault}: the destination is {state}\n{result}"
        assert "Traceback" not in result.err, f"{fault}\n{result.err}"
        if fault.what == KILL:
            assert result.code in (-9, 137), f"{fault}: {result}"
        else:
            self._check_error(fault, result.code, state, result.err)
        self._run_again(fault, sandbox)
        return state

    def _check_error(self, fault: Fault, code: int, state: str, message: str) -> None:
        if code == 0:
            assert state == "new", f"{fault}: success, but the destination is {state}"
            # Its second rename gives the old content, which has been exchanged, the name under which it is removed.
            is_clean_up = fault.point.call == "rename" and fault.point.number == 2 and self.scene.old
            assert is_clean_up or fault.point.call not in MUST_FAIL, f"{fault}: passed over in silence"
            return
        assert message.splitlines()[-1].startswith(("error: ", "hint: ")), f"{fault}: {message}"
        assert "internal error" not in message, f"{fault}: {message}"
        if fault.what == "error=ENOSPC":
            assert code == 6, f"{fault}: exit {code}\n{message}"

    def _run_again(self, fault: Fault, sandbox: Sandbox) -> None:
        """The next run succeeds and cleans up, whatever the last one left."""
        if not (self.source / ".metadata").exists() or len(list(self.source.iterdir())) < 4:
            assert self.state() == "new", f"{fault}: the source is gone, and the result is not there"
            return
        arguments = [word for word in self.arguments if word != "--remove-source"]
        if self.state() != "absent" and "--overwrite" not in arguments:
            arguments.append("--overwrite")
        again = sandbox.run(*arguments, "--no-fsync")
        assert again.code == 0, f"{fault}: the next run fails: {again.err}"
        assert self.state() == "new", f"{fault}: after the next run the destination is {self.state()}"
        stay = [*leftovers(self.out.parent), *(path.name for path in self.out.glob(".*"))]
        assert stay == [], f"{fault}: {stay} stay"


def _sweep(stage: Stage, faults: Sequence[Fault], sandbox: Sandbox) -> Counter[str]:
    states = Counter(stage.disturb(fault, sandbox) for fault in faults)
    print(f"{len(faults)} faults put in and survived: {dict(states)}")
    return states


def _sample(points: Sequence[Point], count: int) -> list[Point]:
    """Return some points, spread evenly, with every kind of call among them."""
    first = list({point.call: point for point in reversed(points)}.values())
    rest = [point for point in points if point not in first]
    step = max(1, len(rest) // max(1, count - len(first)))
    return [*first, *rest[::step]][:count]


@pytest.fixture
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Stage:
    skip_without_strace()
    return Stage(tmp_path, SCENES[request.param])


@pytest.mark.parametrize("stage", ["fresh", "overwrite"], indirect=True)
def test_killed_at_some_system_calls(stage: Stage, sandbox: Sandbox) -> None:
    points = stage.points()
    states = _sweep(stage, [Fault(point, KILL) for point in _sample(points, 10)], sandbox)
    assert states["old" if stage.scene.old else "absent"] >= 5


@pytest.mark.parametrize("stage", ["fresh", "overwrite"], indirect=True)
def test_some_system_calls_fail(stage: Stage, sandbox: Sandbox) -> None:
    points = _sample([point for point in stage.points() if point.call in MUST_FAIL], 8)
    _sweep(stage, [Fault(point, ERRORS[number % 2]) for number, point in enumerate(points)], sandbox)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stage", SCENES, indirect=True)
def test_killed_at_every_system_call(stage: Stage, sandbox: Sandbox) -> None:
    points = stage.points()
    assert len(points) >= 20
    _sweep(stage, [Fault(point, KILL) for point in points], sandbox)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("stage", SCENES, indirect=True)
def test_every_system_call_fails(stage: Stage, error: str, sandbox: Sandbox) -> None:
    points = [point for point in stage.points() if point.call not in ("flock", "ioctl", "getdents64")]
    _sweep(stage, [Fault(point, error) for point in points], sandbox)


def test_killed_while_it_cleans_up_after_another(tmp_path: Path, sandbox: Sandbox) -> None:
    """A run that removes what an earlier one left is itself killed: the one after that cleans up all."""
    skip_without_strace()
    stage = Stage(tmp_path, SCENES["fresh"])
    points = stage.points()
    finish = [point for point in points if point.call == "rename" and not point.path][1]
    stage.set_up()
    _, struck = strike(Fault(finish, KILL), stage.arguments, stage.log)
    assert struck
    assert len(leftovers(stage.out.parent)) == 1
    (hidden,) = leftovers(stage.out.parent)
    for number in (1, 2):
        removal = Point("unlinkat", str(stage.out.parent / hidden), number)
        _, struck = strike(Fault(removal, KILL), stage.arguments, stage.log)
        assert struck
        assert stage.state() == "absent"
    assert sandbox.run(*stage.arguments).code == 0
    assert stage.state() == "new"
    assert leftovers(stage.out.parent) == []


def test_the_source_is_as_it_was_after_every_fault(tmp_path: Path) -> None:
    """Faults on the source's files are read errors: refused, and the source is not touched."""
    skip_without_strace()
    stage = Stage(tmp_path, SCENES["fresh"])
    stage.set_up()
    for file in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        for call, what in (("openat", "error=EIO"), ("openat", "error=EACCES")):
            fault = Fault(Point(call, str(stage.source / file), 1), what)
            result, struck = strike(fault, stage.arguments, stage.log)
            assert struck, fault
            assert result.code not in (0, 1), result
            assert "Traceback" not in result.err
            assert file in result.err, f"{fault}: {result.err}"
            assert stage.state() == "absent"
            assert (stage.source / file).read_bytes() == (DCP / file).read_bytes()
    assert run(*stage.arguments).code == 0
    assert stage.state() == "new"
