"""Ctrl-C in a push or a pull: it ends soon, nothing half is to be seen, and the same command goes on."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.cli.tool import TOOL, environment, leftovers, run
from tests.remote.hub_server import Hub

FIXTURES = Path(__file__).parents[2] / "fixtures"
TRAINER = FIXTURES / "frameworks/trainer/checkpoint-2"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(tmp_path / "hub", multipart_bytes=10_000) as running:
        yield running


def interrupt(hub: Hub, home: Path, route: str, count: int, *arguments: object) -> tuple[int, str, float]:
    """Start a command, press Ctrl-C when so many requests to a route were answered, and say how it ended, and when."""
    env = environment(**hub.environment(home))
    process = subprocess.Popen(
        [TOOL, *map(str, arguments)], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        deadline = time.monotonic() + 30
        while hub.count(route) < count:
            assert time.monotonic() < deadline, hub.requests
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        time.sleep(0.2)  # into the request that does not end
        pressed = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        return process.returncode, err.decode(), time.monotonic() - pressed
    finally:
        process.kill()
        process.wait()


def oid_of(name: str) -> str:
    return hashlib.sha256((TRAINER / name).read_bytes()).hexdigest()


def test_a_push(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in "ab":
        save_file({f"{name}.weight": np.full(2_500_000, ord(name), "f4")}, folder / f"{name}.safetensors")
    oid = hashlib.sha256((folder / "b.safetensors").read_bytes()).hexdigest()
    with Hub(tmp_path / "hub", multipart_bytes=4_000_000) as hub:  # three parts each
        hub.add_repo("owner/model")
        hub.fail("part", path=f"{oid}/2", delay_s=20)
        code, err, took_s = interrupt(hub, tmp_path / "home", "complete", 1, "push", folder, "hf://owner/model")
        assert (code, took_s < 8) == (130, True)
        assert "interrupted" in err
        assert "the same command goes on" in err
        assert "Traceback" not in err
        assert hub.repos["owner/model"].files() == {}
        hub.forget()
        done = run("push", folder, "hf://owner/model", env=environment(**hub.environment(tmp_path / "home")))
        assert done.code == 0, done.err
        assert hub.repos["owner/model"].files()["b.safetensors"] == (folder / "b.safetensors").read_bytes()
        assert hub.received_bytes("part") == (folder / "b.safetensors").stat().st_size  # the other was stored before


def test_a_pull(hub: Hub, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    files: dict[str, bytes | Path] = {path.name: path for path in TRAINER.iterdir()}
    hub.add_repo("owner/model", files)
    hub.fail("cdn", path=oid_of("optimizer.pt"), delay_s=20)
    code, err, took_s = interrupt(hub, tmp_path / "home", "cdn", 2, "pull", "hf://owner/model", place / "out")
    assert (code, took_s < 8) == (130, True)
    assert "the same command goes on" in err
    assert "Traceback" not in err
    assert not (place / "out").exists()
    assert len(leftovers(place)) == 1
    hub.forget()
    env = environment(**hub.environment(tmp_path / "home"))
    done = run("pull", "hf://owner/model", place / "out", env=env)
    assert done.code == 0, done.err
    assert "kept of an earlier run" in done.out
    assert {path.name: path.read_bytes() for path in (place / "out").iterdir()} == {
        path.name: path.read_bytes() for path in TRAINER.iterdir()
    }
    assert leftovers(place) == []
    assert [one.path for one in hub.of("cdn", method="GET") if oid_of("model.safetensors") in one.path] == []


def test_a_pull_that_was_killed(hub: Hub, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    hub.add_repo("owner/model", {path.name: path for path in TRAINER.iterdir()})
    hub.fail("cdn", path=oid_of("optimizer.pt"), delay_s=20)
    env = environment(**hub.environment(tmp_path / "home"))
    process = subprocess.Popen([TOOL, "pull", "hf://owner/model", place / "out"], env=env, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while hub.count("cdn") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.2)
    process.kill()
    process.wait()
    hub.forget()
    assert run("pull", "hf://owner/model", place / "out", env=env).code == 0
    assert {path.name for path in (place / "out").iterdir()} == {path.name for path in TRAINER.iterdir()}
    assert leftovers(place) == []
