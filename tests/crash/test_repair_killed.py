"""``repair --apply`` killed at any system call: as much can be read as before, and the next repair ends it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from fsdp_ckpt import latest_complete, merge, save_state
from fsdp_ckpt.ops.repair import repair
from fsdp_ckpt.ops.validate import validate
from tests.build import assert_same, save_rank_files
from tests.cli.tool import TIMEOUT_S, TOOL, environment, flip
from tests.compat.judges import read_item_by_item, read_with_torch
from tests.compat.samples import EDGE
from tests.crash.strace import STRACE, skip_without_strace
from tests.unit.ops.mended import moved_away
from tests.unit.ops.test_repair_folder import with_path_of_python_313

CALLS = (
    "rename", "renameat", "renameat2", "link", "linkat", "unlink", "unlinkat", "mkdir", "rmdir", "fsync", "pwrite64",
    "fchmod", "flock", "copy_file_range",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A repair to be disturbed.

    Attributes:
        set_up: Makes the damaged checkpoint in a folder and returns its path.
        options: Of the repair.
        reads: Raises when less can be read than before the repair.
        whole: Raises when the checkpoint is not mended.
    """

    set_up: Callable[[Path], Path]
    options: Callable[[Path], list[str]]
    reads: Callable[[Path], None]
    whole: Callable[[Path], None]


def _for_torch(where: Path) -> Path:
    shutil.copytree(EDGE / "torch215_hand2", where / "c")
    shutil.copy(EDGE / "torch215_hand2/__0_0.distcp", where / "c/__0_1.distcp")
    return where / "c"


def _items(source: Path) -> Callable[[Path], None]:
    """Return a judge that knows the classes of every torch and Python."""
    return lambda folder: assert_same(read_item_by_item(folder), read_item_by_item(source))


def _torch(source: Path) -> Callable[[Path], None]:
    return lambda folder: assert_same(read_with_torch(folder), read_item_by_item(source))


STATE = {"w": torch.arange(1000.0, 1064.0).reshape(16, 4), "b": torch.full((6,), 7.5)}


def _boxes(where: Path) -> Path:
    folder = save_rank_files(where / "c", STATE, mesh=[2, 2], placements={"w": [Replicate(), Shard(0)]})
    for rank in (0, 3):
        path = folder / f"model_world_size_4_rank_{rank}.pt"
        data = bytearray(path.read_bytes())
        data[data.index(STATE["w"][8 * (rank % 2) :][:8].contiguous().numpy().tobytes()) + 1] ^= 1
        path.write_bytes(data)
    return folder


def _merges(folder: Path) -> None:
    """It can be merged, as before, when copies are taken for what is damaged."""
    merge(folder, folder.parent / "out", fsync=False, overwrite=True)
    assert_same(load_file(folder.parent / "out/model.safetensors"), STATE)


def _every_rank_is_right(folder: Path) -> None:
    report = merge(folder, folder.parent / "out", fsync=False, overwrite=True)
    assert report.recovered == []


def _own(where: Path, *, seed: int = 1) -> Path:
    torch.manual_seed(seed)
    save_state(where / "run/step-1", nn.Linear(6, 5), step=1, durable=False)
    return where / "run/step-1"


def _linear() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {f"model.{key}": value for key, value in nn.Linear(6, 5).state_dict().items()}


def _with_manifest(where: Path) -> Path:
    path = _own(where)
    with_path_of_python_313(path)
    return path


def _own_is_read(path: Path) -> None:
    assert_same(read_item_by_item(path / "pytorch_model_fsdp_0"), _linear())
    assert latest_complete(path.parent) == path, "it must stay what resuming takes"


def _own_is_whole(path: Path) -> None:
    _own_is_read(path)
    assert_same(read_with_torch(path / "pytorch_model_fsdp_0"), _linear())
    assert (path / "fsdp_ckpt.json").is_file()


def _moved_away(where: Path) -> Path:
    path = _own(where)
    moved_away(path)
    return path


def _is_somewhere(path: Path) -> None:
    there = [path] if path.exists() else list(path.parent.glob(".step-1.*.old"))
    assert len(there) == 1
    assert_same(read_with_torch(there[0] / "pytorch_model_fsdp_0"), _linear())


def _replica(where: Path) -> Path:
    path = _own(where)
    shutil.copytree(path, where / "backup")
    (path / "pytorch_model_fsdp_0/.metadata").unlink()
    (path / "pytorch_model_fsdp_0/__0_0.distcp").write_bytes(b"x")
    return path


def _relisted(where: Path) -> Path:
    """The manifest has to change, and a file is damaged that it lists."""
    path = _with_manifest(where)
    shutil.copytree(path, where / "backup")
    flip(path / "pytorch_model_fsdp_0/__0_0.distcp")
    return path


def _lost(where: Path) -> Path:
    """The metadata are gone, and once they are back the manifest has to change."""
    path = _with_manifest(where)
    shutil.copytree(path, where / "backup")
    (path / "pytorch_model_fsdp_0/.metadata").unlink()
    return path


def _no_damage_is_believed(path: Path) -> None:
    """A repair that has no other copy calls it whole only where it is: no checksum was made to fit damaged bytes."""
    shutil.rmtree(path.parent.parent / "again", ignore_errors=True)
    again = Path(shutil.copytree(path, path.parent.parent / "again/step-1"))
    report = repair(again, apply=True)
    assert (again / "fsdp_ckpt.json").is_file()
    good = path.parent.parent / "backup/pytorch_model_fsdp_0/__0_0.distcp"
    is_whole = all(
        (
            (again / "pytorch_model_fsdp_0/__0_0.distcp").read_bytes() == good.read_bytes(),
            (again / "pytorch_model_fsdp_0/.metadata").is_file(),
        )
    )
    assert (report.whole, validate(again, level="deep").ok) == (is_whole, is_whole)


def _index(where: Path) -> Path:
    (where / "c").mkdir()
    for number in (1, 2):
        save_file({f"w{number}": torch.full((3,), float(number))}, where / f"c/model-{number:05}-of-00002.safetensors")
    (where / "c/model.safetensors.index.json").write_text('{"metadata": {}, "weight_map": {}}')
    return where / "c"


def _shards_are_read(folder: Path) -> None:
    for number in (1, 2):
        found = load_file(folder / f"model-{number:05}-of-00002.safetensors")
        assert_same(found, {f"w{number}": torch.full((3,), float(number))})
    assert '"weight_map"' in (folder / "model.safetensors.index.json").read_text()


def _nothing(_: Path) -> None:
    """There was nothing that could be read before."""


HAND = EDGE / "torch215_hand2"
SCENES = {
    "for-torch": Scene(
        set_up=_for_torch, options=lambda _: ["--for-torch", "2.9"], reads=_items(HAND), whole=_torch(HAND)
    ),
    "boxes": Scene(set_up=_boxes, options=lambda _: [], reads=_merges, whole=_every_rank_is_right),
    "manifest": Scene(
        set_up=_with_manifest, options=lambda _: ["--for-torch", "2.9"], reads=_own_is_read, whole=_own_is_whole
    ),
    "swap": Scene(set_up=_moved_away, options=lambda _: [], reads=_is_somewhere, whole=_own_is_whole),
    "replica": Scene(
        set_up=_replica, options=lambda w: ["--replica", str(w / "backup")], reads=_nothing, whole=_own_is_whole
    ),
    "relisted": Scene(
        set_up=_relisted,
        options=lambda w: ["--for-torch", "2.9", "--replica", str(w / "backup")],
        reads=_no_damage_is_believed,
        whole=_own_is_whole,
    ),
    "lost": Scene(
        set_up=_lost,
        options=lambda w: ["--for-torch", "2.9", "--replica", str(w / "backup")],
        reads=_no_damage_is_believed,
        whole=_own_is_whole,
    ),
    "index": Scene(set_up=_index, options=lambda _: [], reads=_shards_are_read, whole=_shards_are_read),
}


class Stage:
    """A damaged checkpoint, set up anew before every kill."""

    def __init__(self, folder: Path, scene: Scene) -> None:
        self.scene, self.where, self.log = scene, folder / "where", folder / "log"
        self.path = Path()

    def set_up(self) -> None:
        shutil.rmtree(self.where, ignore_errors=True)
        self.where.mkdir()
        self.path = self.scene.set_up(self.where)

    def strace(self, *options: str) -> int:
        command = [
            STRACE,
            "-f",
            "-qq",
            "-s",
            "300",
            "-o",
            str(self.log),
            *options,
            TOOL,
            "repair",
            str(self.path),
            "--apply",
        ]
        done = subprocess.run(
            [*command, *self.scene.options(self.where)],
            env=environment(PYTHONDONTWRITEBYTECODE="1"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert b"Traceback" not in done.stderr, done.stderr.decode()
        return done.returncode

    def points(self) -> list[tuple[str, int]]:
        """Return name and number of the calls of a repair that nobody disturbs."""
        self.set_up()
        self.scene.reads(self.path)
        assert self.strace("-e", "trace=" + ",".join(f"?{call}" for call in CALLS)) == 0
        self.scene.whole(self.path)
        counts: Counter[str] = Counter()
        points = []
        for line in self.log.read_text(errors="replace").splitlines():
            match = re.match(r"\d+ +(\w+)\(", line)
            if match is not None and match[1] in CALLS:
                counts[match[1]] += 1
                points.append((match[1], counts[match[1]]))
        return points

    def kill(self, call: str, number: int) -> None:
        self.set_up()
        what = f"killed at {call} #{number}"
        code = self.strace("-e", f"trace={call}", "-e", f"inject={call}:signal=KILL:when={number}")
        assert code in (-9, 137), f"{what}: not reached: {code}"
        self.check(what)

    def fail(self, call: str, number: int, error: str) -> None:
        """Let a call fail; the repair says so, and leaves nothing unfinished."""
        self.set_up()
        what = f"{error} at {call} #{number}"
        code = self.strace("-e", f"trace={call}", "-e", f"inject={call}:error={error}:when={number}")
        assert "(INJECTED)" in self.log.read_text(errors="replace"), f"{what}: not reached"
        if code == 0:
            self.scene.whole(self.path)
        elif error == "ENOSPC":
            assert code == 6, f"{what}: {code}"
        left = [name for name in _listing(self.where) if name.endswith(".fsdp-ckpt-repair")]
        assert call == "unlink" or not left, f"{what}: {left}"
        self.check(what)

    def check(self, what: str) -> None:
        """As much can be read as before, and the next repair ends what this one began."""
        try:
            self.scene.reads(self.path)
        except Exception as error:
            raise AssertionError(f"{what}: {error}\n{_listing(self.where)}") from error
        options = self.scene.options(self.where)
        named = dict(zip([name[2:].replace("-", "_") for name in options[::2]], options[1::2], strict=True))
        for_torch, replica = named.get("for_torch"), named.get("replica")
        report = repair(self.path, apply=True, for_torch=for_torch, replica=replica)
        assert report.whole, f"{what}: {report.faults}"
        try:
            self.scene.whole(self.path)
        except Exception as error:
            raise AssertionError(f"{what}, then mended: {error}\n{_listing(self.where)}") from error
        left = [name for name in _listing(self.where) if name.endswith(".fsdp-ckpt-repair")]
        assert all(".before-repair-" in name for name in left), f"{what}: {left}"
        assert not [name for name in os.listdir(self.path.parent) if ".fsdp-ckpt-" in name], what


def _listing(folder: Path) -> list[str]:
    return sorted(os.path.relpath(path, folder) for path in folder.rglob("*"))


@pytest.fixture
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Stage:
    skip_without_strace()
    return Stage(tmp_path, SCENES[request.param])


@pytest.mark.parametrize("stage", ["manifest", "boxes", "relisted", "lost"], indirect=True)
def test_killed_at_some_system_calls(stage: Stage) -> None:
    points = stage.points()
    names = [point for point in points if point[0] in ("rename", "unlink", "linkat", "link", "mkdir")]
    assert len(points) >= 12
    for point in names[:: max(1, len(names) // 7)]:
        stage.kill(*point)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stage", SCENES, indirect=True)
def test_killed_at_every_system_call(stage: Stage) -> None:
    points = stage.points()
    assert len(points) >= 4
    for point in points:
        stage.kill(*point)
    print(f"{len(points)} times killed")


FAILING = ("pwrite64", "fsync", "rename", "link", "linkat", "mkdir", "unlink", "fchmod")


@pytest.mark.parametrize("stage", ["manifest"], indirect=True)
def test_some_system_calls_fail(stage: Stage) -> None:
    points = [point for point in stage.points() if point[0] in FAILING]
    first = {point[0]: point for point in reversed(points)}
    for number, point in enumerate(first.values()):
        stage.fail(*point, ("ENOSPC", "EIO")[number % 2])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("error", ["ENOSPC", "EIO", "EPERM"])
@pytest.mark.parametrize("stage", SCENES, indirect=True)
def test_every_system_call_fails(stage: Stage, error: str) -> None:
    for point in stage.points():
        if point[0] in FAILING:
            stage.fail(*point, error)
