"""Links where a save writes: nothing behind them is touched, and nothing but a checkpoint is replaced."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path

import pytest

from tests.crash.save_strace import Point, go_on, hold, skip_without_attaching
from tests.crash.save_trial import SCENES, Trial, check_errors
from tests.crash.save_yard import Yard
from tests.dist.attempt import tree

pytestmark = pytest.mark.dist


class Planted:
    """A trial with a folder beside it that is dear to somebody."""

    def __init__(self, yard: Yard, folder: Path, scene: str) -> None:
        self.precious = folder / "precious"
        (self.precious / "below").mkdir(parents=True)
        for name in ("thesis.tex", "below/data.csv", "__0_0.distcp"):
            (self.precious / name).write_text(f"years of work: {name}")
        (self.precious / "empty").touch()
        self.before = tree(self.precious)
        self.trial = Trial(yard, SCENES[scene], folder)
        self.target = self.trial.run / "step-1"

    @cached_property
    def staging(self) -> Path:
        """The hidden folder that a save writes into."""
        version = self.trial.next_version()
        self.begin(version)
        (found,) = self.trial.run.glob(".*")
        go_on(self.trial.team.ranks[0])
        self.trial.team.answers()
        self.trial.go_on(version, "as it is", fresh=False)
        assert not found.exists()
        return found

    def begin(self, version: int) -> None:
        """Begin to save; stop the first rank when it has made the folders."""
        begin = partial(self.trial.team.send, **self.trial.order(version))
        assert hold(Point("mkdir", "", 4), self.trial.team.ranks[0], self.trial.log, begin)

    def save(self, what: str) -> str:
        """Save; return the error, which is the same on all ranks. Nothing dear has changed, nor is an old one lost."""
        version = self.trial.next_version()
        first = check_errors(self.trial.team.order(**self.trial.order(version)), "DestinationExists", what)
        self.check(what)
        return first.kind

    def check(self, what: str) -> None:
        """Whatever was not ours is as it was."""
        assert tree(self.precious) == self.before, f"{what}: something behind a link has changed"


@pytest.fixture
def planted(request: pytest.FixtureRequest, yard: Yard, tmp_path: Path) -> Planted:
    skip_without_attaching()
    return Planted(yard, tmp_path, getattr(request, "param", "overwrite"))


def test_a_target_that_is_a_link_to_a_folder_of_others(planted: Planted) -> None:
    shutil.rmtree(planted.target)
    planted.target.symlink_to(planted.precious)
    assert planted.save("the target is a link") == "DestinationExists"
    assert planted.target.is_symlink()
    assert os.listdir(planted.trial.run) == ["step-1"]


def test_a_target_that_is_a_link_to_a_checkpoint_stays_a_link(planted: Planted, yard: Yard) -> None:
    """As with ``latest -> /scratch/step-1``: the checkpoint behind it is replaced, in one step."""
    real = planted.trial.run.parent / "elsewhere" / "step-1"
    real.parent.mkdir()
    planted.target.rename(real)
    planted.target.symlink_to(real)
    version = planted.trial.next_version()
    planted.trial.team.must(**planted.trial.order(version))
    assert planted.target.readlink() == real
    assert yard.judge(real) == {"state": "whole", "version": version, "why": ""}
    assert os.listdir(real.parent) == ["step-1"]
    planted.check("the target is a link to a checkpoint")


def test_a_target_that_is_a_link_to_nothing(planted: Planted, yard: Yard) -> None:
    shutil.rmtree(planted.target)
    place = planted.trial.run.parent / "not-yet"
    planted.target.symlink_to(place)
    version = planted.trial.next_version()
    first = check_errors(planted.trial.team.order(**planted.trial.order(version)), "DestinationExists", "a dead link")
    assert planted.target.is_symlink()
    if not first.kind:
        assert yard.judge(place)["version"] == version
    planted.check("the target is a link to nothing")


IN_THE_OLD_ONE: dict[str, Callable[[Planted], None]] = {
    "a file": lambda at: _swap(at.target / "scheduler.bin", at.precious / "thesis.tex"),
    "a part": lambda at: _swap(at.target / "pytorch_model_fsdp_0", at.precious),
    "a shard": lambda at: _swap(at.target / "optimizer_0" / "__0_0.distcp", at.precious / "__0_0.distcp"),
    "the manifest": lambda at: _swap(at.target / "fsdp_ckpt.json", at.precious / "thesis.tex"),
    "a stranger": lambda at: (at.target / "notes").symlink_to(at.precious),
    "a lock": lambda at: _swap(at.target / ".fsdp-ckpt-lock", at.precious / "thesis.tex"),
}


def _swap(path: Path, target: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize("name", IN_THE_OLD_ONE)
def test_links_in_the_old_checkpoint_are_not_followed(planted: Planted, yard: Yard, name: str) -> None:
    """The old one may be replaced or refused, but what its links lead to is not ours."""
    IN_THE_OLD_ONE[name](planted)
    version = planted.trial.next_version()
    found = planted.trial.team.order(**planted.trial.order(version))
    planted.check(name)
    kinds = {one.kind for one in found if one is not None}
    assert len(kinds) == 1, found
    assert kinds <= {"", "DestinationExists", "MalformedFile"}, found
    assert None not in found
    if kinds == {""}:
        assert yard.judge(planted.target) == {"state": "whole", "version": version, "why": ""}
    else:
        assert planted.target.is_dir()
    planted.check(name)


BESIDE: dict[str, Callable[[Planted], None]] = {
    "the staging folder": lambda at: at.staging.symlink_to(at.precious),
    "the staging folder, dead": lambda at: at.staging.symlink_to(at.precious / "nothing"),
    "the one moved away": lambda at: Path(f"{at.staging}.old").symlink_to(at.precious),
    "a leftover of ours": lambda at: _plant(at, at.target.with_name(".step-1.fsdp-ckpt-0123456789abcdef")),
    "what lies in a leftover": lambda at: _plant(at, at.staging),
}


def _plant(at: Planted, folder: Path) -> None:
    folder.mkdir()
    (folder / "pytorch_model_fsdp_0").symlink_to(at.precious)
    (folder / "fsdp_ckpt.json").symlink_to(at.precious / "thesis.tex")
    (folder / "__0_0.distcp").symlink_to(at.precious / "__0_0.distcp")


@pytest.mark.parametrize("name", BESIDE)
def test_links_with_names_of_ours_are_not_followed(planted: Planted, yard: Yard, name: str) -> None:
    BESIDE[name](planted)
    kind = planted.save(name)
    assert kind == ("DestinationExists" if name.startswith("the staging folder") else "")
    assert yard.judge(planted.target)["state"] == "whole"
    left = sorted(path for path in planted.trial.run.glob(".*") if not path.is_symlink())
    assert left == [], "what was left is cleaned up"


def test_a_lock_that_is_a_link(planted: Planted, yard: Yard) -> None:
    """A leftover whose lock leads elsewhere: nothing is created or locked there."""
    planted.staging.mkdir()
    (planted.staging / ".fsdp-ckpt-lock").symlink_to(planted.precious / "new")
    found = planted.trial.team.order(**planted.trial.order(planted.trial.next_version()))
    planted.check("a lock that is a link")
    assert len({(one.kind, one.message) for one in found if one is not None}) == 1, found
    assert all(one is not None and one.named for one in found), found
    assert yard.judge(planted.target)["state"] == "whole"


DURING = {
    "the second rank's file": "pytorch_model_fsdp_0/__1_0.distcp",
    "the first rank's file": "optimizer_0/__0_0.distcp",
    "a small file": "scheduler.bin",
    "metadata": "pytorch_model_fsdp_0/.metadata",
    "the manifest": "fsdp_ckpt.json",
}


@pytest.mark.parametrize("name", DURING)
@pytest.mark.parametrize("planted", ["overwrite", pytest.param("fresh", marks=pytest.mark.slow)], indirect=True)
def test_links_planted_while_it_writes(planted: Planted, name: str) -> None:
    """The first rank is stopped when the folders are made; what is planted then is an error on all ranks."""
    team, staging, version = planted.trial.team, planted.staging, planted.trial.next_version()
    planted.begin(version)
    (staging / DURING[name]).symlink_to(planted.precious / "thesis.tex")
    go_on(team.ranks[0])
    found = team.answers()
    planted.check(name)
    assert len({(one.kind, one.message) for one in found if one is not None}) == 1, found
    assert all(one is not None and one.named and one.kind for one in found), found
    standing = planted.trial.check_folder(version, name)
    assert standing == planted.trial.old
    planted.trial.go_on(standing, name, fresh=False)
