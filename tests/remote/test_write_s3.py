"""Results written to an S3 server by the client that users have: whole, in order, and nothing left of what failed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import fsdp_ckpt
from fsdp_ckpt.errors import DestinationExists, Unreachable
from fsdp_ckpt.store.remote import target
from tests.cli.tool import TOOL, environment
from tests.remote.conftest import KEY_ID, SECRET
from tests.remote.proxy import Delay, Proxy, Request, Status
from tests.remote.s3_server import Bucket
from tests.remote.written import contents

FIXTURES = Path(__file__).parents[2] / "fixtures"
ACCELERATE = FIXTURES / "torch-2.13.0/fsdp2_sharded_w2"
TRAINER = FIXTURES / "frameworks/trainer/checkpoint-2"

INTERNAL = Status(code=500, body=b"<Error><Code>InternalError</Code><Message>again</Message></Error>")
DENIED = Status(code=403, body=b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint whose merged file goes up in four parts, and what is in it."""
    folder = tmp_path_factory.mktemp("large") / "step-1"
    torch.manual_seed(0)
    state = {name: torch.randn(1 << 20) for name in ("a", "b", "c", "d")}
    dcp.save({"model": state}, checkpoint_id=folder, no_dist=True)
    return folder, state


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "_PART_BYTES", 5 << 20)  # S3 takes none that are smaller
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # the client's own tries take seconds


def is_part(request: Request) -> bool:
    return request.method == "PUT" and "partNumber=" in request.target


def puts(word: str) -> Callable[[Request], bool]:
    """Return what tells uploads of objects with a word in their keys."""
    return lambda request: (
        request.method in ("PUT", "POST") and word in request.target and "?delete" not in request.target
    )


def merge_many(src: Any, out: Any, **options: Any) -> Any:
    return fsdp_ckpt.merge(src, out, max_shard_size="1KB", **options)


@pytest.mark.parametrize(
    "write",
    [
        merge_many,
        lambda src, out: fsdp_ckpt.convert(src, out, to="accelerate", world_size=3),
        lambda src, out: fsdp_ckpt.reshard(src, out, 5),
    ],
)
def test_the_objects_are_the_files_of_a_local_run(write: Any, bucket: Bucket, tmp_path: Path) -> None:
    write(ACCELERATE, tmp_path / "out")
    report = write(ACCELERATE, bucket.url("deep/er/out"))
    assert contents(bucket.download("deep/er/out", tmp_path / "got")) == contents(tmp_path / "out")
    assert report.destination == bucket.url("deep/er/out")
    assert bucket.keys() == bucket.keys("deep/er/out/")


def test_odd_names_arrive_as_they_are(bucket: Bucket, tmp_path: Path) -> None:
    key = "w t/run_lr=[1e-3, 2e-3]_é*/100%#1"
    for overwrite in (False, True):
        report = merge_many(TRAINER, bucket.url(key), overwrite=overwrite)
        assert report.destination == bucket.url(key)
    merge_many(TRAINER, tmp_path / "out")
    assert contents(bucket.download(key, tmp_path / "got")) == contents(tmp_path / "out")
    assert fsdp_ckpt.inspect(bucket.url(key)).complete


def test_large_files_go_up_in_parts(
    large: tuple[Path, dict[str, torch.Tensor]], bucket: Bucket, proxy: Proxy, tmp_path: Path
) -> None:
    src, state = large
    fsdp_ckpt.merge(bucket.upload(src, "src"), bucket.url("out"))
    assert [request.status for request in proxy.requests if is_part(request)] == [200] * 4
    assert max(request.body_bytes for request in proxy.requests) < 6 << 20
    got = load_file(bucket.download("out", tmp_path / "got") / "model.safetensors")
    assert set(got) == set(state)
    assert all(torch.equal(got[name], tensor) for name, tensor in state.items())


def test_what_commits_goes_up_last(bucket: Bucket, proxy: Proxy) -> None:
    merge_many(TRAINER, bucket.url("out"))
    changes = [
        (request.method, request.target.partition("?")[0].rpartition("/")[2])
        for request in sorted(proxy.requests, key=lambda one: one.began)
        if request.method in ("PUT", "POST", "DELETE")
    ]
    assert changes[0][1].startswith(".saving")
    assert changes[-3:] == [
        ("PUT", "config.json"), ("PUT", "model.safetensors.index.json"), ("DELETE", changes[0][1]),
    ]  # fmt: skip
    assert not any(changes[0][1] in key for key in list(bucket.keys()))


def test_errors_that_pass_are_survived(
    large: tuple[Path, dict[str, torch.Tensor]], bucket: Bucket, proxy: Proxy, tmp_path: Path
) -> None:
    src, state = large
    proxy.fail(INTERNAL, when=is_part, after=2, times=2)
    proxy.fail(INTERNAL, when=lambda request: "uploads" in request.target and request.method == "POST", times=1)
    proxy.fail(INTERNAL, when=lambda request: request.method == "HEAD", times=2)
    proxy.fail(INTERNAL, when=lambda request: request.method == "DELETE", times=1)
    fsdp_ckpt.merge(src, bucket.url("out"))
    assert list(bucket.keys()) == ["out/model.safetensors"]
    assert bucket.unfinished_uploads() == []
    got = load_file(bucket.download("out", tmp_path / "got") / "model.safetensors")
    assert all(torch.equal(got[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("fault", [INTERNAL, DENIED], ids=["500", "403"])
def test_errors_for_good_leave_nothing(
    fault: Status, large: tuple[Path, dict[str, torch.Tensor]], bucket: Bucket, proxy: Proxy
) -> None:
    proxy.fail(fault, when=is_part, after=1)
    with pytest.raises(Unreachable) as caught:
        fsdp_ckpt.merge(large[0], bucket.url("out"))
    assert caught.value.exit_code == 7
    assert bucket.url("out") in caught.value.message
    assert bucket.keys() == {}
    assert bucket.unfinished_uploads() == []


def test_uploads_that_could_not_be_given_up_are_in_the_end(
    large: tuple[Path, dict[str, torch.Tensor]], bucket: Bucket, proxy: Proxy
) -> None:
    proxy.fail(DENIED, when=is_part, after=1)
    proxy.fail(INTERNAL, when=lambda request: request.method == "DELETE" and "uploadId" in request.target, times=1)
    with pytest.raises(Unreachable):
        fsdp_ckpt.merge(large[0], bucket.url("out"))
    assert bucket.unfinished_uploads() == []
    assert bucket.keys() == {}


def test_a_failure_at_the_last_object_leaves_nothing(bucket: Bucket, proxy: Proxy) -> None:
    proxy.fail(DENIED, when=puts(".index.json"))
    with pytest.raises(Unreachable, match="denied"):
        merge_many(ACCELERATE, bucket.url("out"))
    assert bucket.keys() == {}


def test_a_bucket_that_is_not_there(bucket: Bucket) -> None:
    with pytest.raises(Unreachable, match="no such bucket") as caught:
        merge_many(ACCELERATE, "s3://no-such-bucket-here/out")
    assert "s3://no-such-bucket-here/out" in caught.value.message


def test_replacing_is_asked_for(bucket: Bucket, tmp_path: Path) -> None:
    merge_many(TRAINER, bucket.url("out"))
    bucket.put("outside.txt", b"not below it")
    bucket.put("out2/x", b"nor this")
    with pytest.raises(DestinationExists, match="not empty"):
        fsdp_ckpt.merge(TRAINER, bucket.url("out"))
    fsdp_ckpt.merge(TRAINER, bucket.url("out"), overwrite=True)
    fsdp_ckpt.merge(TRAINER, tmp_path / "out")
    assert contents(bucket.download("out", tmp_path / "got")) == contents(tmp_path / "out")
    assert {key for key in list(bucket.keys()) if not key.startswith("out/")} == {"outside.txt", "out2/x"}


def test_the_command_shows_urls_and_no_credentials(bucket: Bucket, tmp_path: Path) -> None:
    done = _tool("merge", ACCELERATE, bucket.url("out"), "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["destination"] == bucket.url("out")
    again = _tool("merge", ACCELERATE, bucket.url("out"), cwd=tmp_path)
    assert again.returncode == 5
    assert f"{bucket.url('out')} --overwrite" in again.stderr
    for text in (done.stdout, done.stderr, again.stderr, *map(str, bucket.keys())):
        assert KEY_ID not in text
        assert SECRET not in text
        assert "mirror" not in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(
    number: int, large: tuple[Path, dict[str, torch.Tensor]], bucket: Bucket, proxy: Proxy, tmp_path: Path
) -> None:
    proxy.fail(Delay(1.0), when=lambda request: request.method == "PUT" and "safetensors" in request.target)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [TOOL, "merge", str(large[0]), bucket.url("out"), "--max-shard-size", "9MB"]
    running = subprocess.Popen(command, env=_environment(TMPDIR=str(temporary)), stderr=subprocess.PIPE, text=True)
    try:
        _wait_for(lambda: bool(bucket.keys()))
        running.send_signal(number)
        _, err = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 128 + number, err
    assert "Traceback" not in err
    assert bucket.keys() == {}
    assert bucket.unfinished_uploads() == []
    assert list(temporary.iterdir()) == []


def test_what_a_killed_run_left_is_taken_up(bucket: Bucket, proxy: Proxy, tmp_path: Path) -> None:
    proxy.fail(Delay(30), when=puts("00004"))
    arguments = ("merge", ACCELERATE, bucket.url("out"), "--max-shard-size", "1KB", "--jobs", "1", "--resume")
    running = subprocess.Popen([TOOL, *map(str, arguments)], env=_environment())
    try:
        _wait_for(lambda: any("00003" in key and key.endswith(".done") for key in list(bucket.keys())))
    finally:
        running.kill()
        running.wait()
    proxy.clear()
    refused = _tool(*arguments[:-1], cwd=tmp_path)
    assert refused.returncode == 5, refused.stderr
    assert "--resume" in refused.stderr
    done = _tool(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not any(puts(f"0000{n}-of")(request) for request in proxy.requests for n in (1, 2, 3))
    merge_many(ACCELERATE, tmp_path / "out")
    assert contents(bucket.download("out", tmp_path / "got")) == contents(tmp_path / "out")


def _environment(**changes: str) -> dict[str, str]:
    """Return what the command gets: the server of the tests, which the fixtures have set for this process."""
    names = [name for name in os.environ if name.startswith(("AWS_", "FSDP_CKPT_"))]
    return environment(**{name: os.environ[name] for name in names}, **changes)


def _tool(*arguments: Any, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TOOL, *map(str, arguments)], env=_environment(), cwd=cwd, timeout=60, check=False,
        capture_output=True, text=True,
    )  # fmt: skip


def _wait_for(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit, "it did not come to that"
        time.sleep(0.05)
