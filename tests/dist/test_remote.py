"""Ranks save to an S3 server and load from it: no rank's failure leaves half a checkpoint that is taken for one."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_ckpt.layouts.manifest import MANIFEST
from tests.cases.launch import build_once, run_module
from tests.dist.remote_ranks import BUCKETS, DEATHS
from tests.dist.stage import outcomes
from tests.remote.proxy import SLOW_DOWN, Proxy, Status, proxied
from tests.remote.s3_server import serving

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

SECRET = "wJalrXUtnFEMI-K7MDENG-bPxRfiCY-only-here"


@pytest.fixture(scope="session")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_once(tmp_path_factory, "remote_ranks", _play)


def _play(folder: Path) -> None:
    """Play everything in front of a proxy; keep what it saw, and what was in the buckets at the end."""
    with serving() as server, proxied(server.host, server.port) as proxy, pytest.MonkeyPatch.context() as patch:
        buckets = {name: server.make_bucket(name) for name in BUCKETS}
        _set_environment(patch, proxy, folder)
        _break(proxy)
        run_module("tests.dist.remote_ranks", str(folder), timeout_s=120)
        run_module("tests.dist.remote_ranks", str(folder), "deaths", timeout_s=100)
        seen = [(one.method, one.target, one.status) for one in proxy.requests]
        (folder / "requests.json").write_text(json.dumps(seen))
        for name, bucket in buckets.items():
            there = folder / "buckets" / name
            for key in bucket.keys():  # noqa: SIM118 - no mapping
                (there / key).parent.mkdir(parents=True, exist_ok=True)
                (there / key).write_bytes(bucket.get(key))
            (folder / f"{name}.uploads").write_text(json.dumps(bucket.unfinished_uploads()))


def _set_environment(patch: pytest.MonkeyPatch, proxy: Proxy, folder: Path) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_") or name.lower().endswith("_proxy")]:
        patch.delenv(name)
    (folder / "tmp").mkdir()
    for name, value in {
        "AWS_ENDPOINT_URL_S3": proxy.url, "AWS_ACCESS_KEY_ID": "AKIAREMOTERANKS", "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true", "FSDP_CKPT_RETRY_SCALE": "0.02", "TMPDIR": str(folder / "tmp"),
    }.items():  # fmt: skip
        patch.setenv(name, value)


def _break(proxy: Proxy) -> None:
    def puts(text: str) -> Any:
        return lambda request: request.method == "PUT" and text in request.target

    def throttled(text: str, method: str) -> Any:
        return lambda request: request.method == method and f"/is-throttled/step-1{text}" in request.target

    proxy.fail(Status(code=403), when=puts("/an-upload-fails/run/step-2/optimizer_0/__1_0.distcp"))
    proxy.fail(Status(code=403), when=puts("/the-manifest-fails/run/step-2/fsdp_ckpt.json"))
    for text in ("/optimizer_0/__0_0.distcp", "/random_states_1.pkl", "/fsdp_ckpt.json"):
        proxy.fail(SLOW_DOWN, when=throttled(text, "PUT"), times=1)
        proxy.fail(SLOW_DOWN, when=throttled(text, "GET"), times=1)


def _requests(played: Path, bucket: str) -> list[tuple[str, str]]:
    """Methods and targets of requests that were answered well, in order; of targets what follows the bucket."""
    seen = json.loads((played / "requests.json").read_text())
    return [
        (method, target.removeprefix(f"/{bucket}").lstrip("/"))
        for method, target, status in seen
        if status < 300 and re.match(rf"/{bucket}(/|\?|$)", target)
    ]


def _puts(played: Path, bucket: str) -> list[str]:
    return [target.partition("?")[0] for method, target in _requests(played, bucket) if method == "PUT"]


def _left(played: Path, bucket: str) -> list[str]:
    place = played / "buckets" / bucket
    return sorted(path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file())


def _manifest(played: Path, place: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads((played / "buckets" / place / MANIFEST).read_text())
    return found


def test_what_two_ranks_save_they_load(played: Path) -> None:
    for rank in outcomes(played, "saves_and_loads"):
        url = "s3://saves-and-loads/run/step-7"
        assert rank["right"]
        assert rank["path"] == rank["by run"] == url
        assert rank["loaded"] == [url, 7, {"epoch": 3}, "restored", "restored", []]
        assert (rank["refused"]["kind"], rank["refused"]["message"]) == ("DestinationExists", f"`{url}` exists")
        assert rank["not there"]["kind"] == "Unreachable"
        assert "`s3://saves-and-loads/rum` does not exist" in rank["not there"]["message"]
        there = {path.removeprefix("run/step-7/") for path in _left(played, "saves-and-loads")}
        assert there == set(rank["files"])


def test_one_rank_loads_what_two_have_saved(played: Path) -> None:
    found = outcomes(played, "one_rank_loads")[0]
    assert found["model"]
    assert len(found["moments"]) == 4
    assert all(found["moments"])


def test_three_ranks_load_what_two_have_saved(played: Path) -> None:
    for rank in outcomes(played, "three_ranks_load"):
        assert rank == {"right": True, "saved by": 2}


@pytest.mark.parametrize("scenario", ["ranks_list_once", "three_list_once"])
def test_ranks_do_not_each_list_the_bucket(played: Path, scenario: str) -> None:
    """mlcommons/storage#667: 512 ranks that list are throttled. What is below, and what is beside it: two requests."""
    requests = _requests(played, scenario.replace("_", "-"))
    start = next(place for place, (_, target) in enumerate(requests) if target.startswith("now-loading"))
    lists = [target for method, target in requests[start:] if method == "GET" and "list-type=2" in target]
    assert len(lists) <= 2, lists


def test_the_manifest_is_the_last_object(played: Path) -> None:
    puts = _puts(played, "saves-and-loads")
    assert puts[-1] == f"run/step-7/{MANIFEST}"
    assert puts.count(puts[-1]) == 1
    data = [place for place, name in enumerate(puts) if name.endswith(".distcp")]
    index = [place for place, name in enumerate(puts) if name.endswith(".metadata")]
    assert len(data) == 4
    assert max(data) < min(index)


def test_what_is_replaced_stops_being_complete_first(played: Path) -> None:
    for rank in outcomes(played, "is_replaced"):
        assert rank["right"]
        assert [f"step-1/{name}" for name in rank["files"]] == _left(played, "is-replaced")
    requests = _requests(played, "is-replaced")
    removed = next(
        place for place, (method, target) in enumerate(requests) if method == "DELETE" and MANIFEST in target
    )
    before = [target for method, target in requests[:removed] if method == "DELETE" and "fsdp-ckpt" not in target]
    assert before == [], "the manifest goes before anything else of the old checkpoint"
    first_new = next(
        place for place, (method, target) in enumerate(requests) if method == "PUT" and target.endswith(".distcp")
    )
    assert removed < first_new
    gone = [target for method, target in requests[removed:first_new] if method == "DELETE"]
    assert any("pytorch_model_fsdp.bin" in target for target in gone)


def test_a_run_is_resumed_and_pruned(played: Path) -> None:
    for rank in outcomes(played, "resumes_and_prunes"):
        assert rank["nothing"]
        assert rank["right"]
        assert (rank["step"], rank["values"]) == (4, {"loss": 0.3})
        assert rank["path"] == rank["latest"] == "s3://resumes-and-prunes/run/step-4"
    left = _left(played, "resumes-and-prunes")
    assert {name.split("/")[1] for name in left} == {"step-1", "step-3", "step-4"}
    for step in ("step-1", "step-3", "step-4"):
        names = {name.removeprefix(f"run/{step}/") for name in left if name.startswith(f"run/{step}/")}
        assert names == {*_manifest(played, f"resumes-and-prunes/run/{step}")["files"], MANIFEST}
    requests = _requests(played, "resumes-and-prunes")
    gone = [target for method, target in requests if method == "DELETE" and "run/step-2/" in target]
    own = [target for target in gone if ".saving." not in target]
    assert own[0] == f"run/step-2/{MANIFEST}", "the manifest goes first"
    saved = next(
        place
        for place, (method, target) in enumerate(requests)
        if method == "PUT" and target.startswith(f"run/step-4/{MANIFEST}")
    )
    assert saved < requests.index(("DELETE", own[0])), "after the newer one is there"


def test_saves_go_on_in_the_background(played: Path) -> None:
    assert outcomes(played, "in_the_background") == [True, True]
    assert {name.split("/")[1] for name in _left(played, "in-the-background")} == {"step-2"}


@pytest.mark.parametrize(
    ("scenario", "text"),
    [
        ("an_upload_fails", "rank 1: `s3://an-upload-fails/run/step-2"),
        ("the_manifest_fails", "`s3://the-manifest-fails/run/step-2"),
    ],
)
def test_a_failure_is_everybodys_and_leaves_nothing(played: Path, scenario: str, text: str) -> None:
    found, bucket = outcomes(played, scenario), scenario.replace("_", "-")
    assert len({rank["message"] for rank in found}) == 1
    for rank in found:
        assert rank["kind"] == "Unreachable"
        assert text in rank["message"]
        assert "access is denied" in rank["message"]
        assert rank["previous"]
        assert rank["path"] == f"s3://{bucket}/run/step-1"
    assert {name.split("/")[1] for name in _left(played, bucket)} == {"step-1"}
    assert json.loads((played / f"{bucket}.uploads").read_text()) == []


def test_throttling_is_waited_out(played: Path) -> None:
    assert outcomes(played, "is_throttled") == [True, True]
    seen = json.loads((played / "requests.json").read_text())
    refused = [target for _, target, status in seen if status == 503 and target.startswith("/is-throttled/")]
    assert len(refused) == 6


def test_accelerate_loads_what_was_downloaded(played: Path) -> None:
    for rank in outcomes(played, "accelerate_loads"):
        assert len(rank) > 10
        assert all(rank.values()), rank


@pytest.mark.parametrize("death", DEATHS)
def test_a_dead_rank_leaves_nothing_that_is_taken_for_a_checkpoint(played: Path, death: str) -> None:
    survivor = 0 if death == DEATHS[0] else 1
    found = torch.load(played / death / f"rank_{survivor}.pt", weights_only=False)
    assert found["kind"] == "RankFailed", found
    assert not (played / death / f"rank_{1 - survivor}.pt").exists()
    for rank in (0, 1):
        after = torch.load(played / death / f"after_{rank}.pt", weights_only=False)
        assert after["latest"] == after["path"] == f"s3://{death}/run/step-1"
        assert after["right"]
        kind = "Unreachable" if death == DEATHS[0] else "IncompleteCheckpoint"
        assert after["refused"]["kind"] == kind, after["refused"]
        assert after["saved"], "another job may save to the same place, whatever is there"
        assert after["then"] == f"s3://{death}/run/step-2"
    uploads = json.loads((played / f"{death}.uploads").read_text())
    assert len(uploads) == (death == DEATHS[0]), "what a killed rank was uploading is given up by the next save"
    left = {name.removeprefix("run/step-2/") for name in _left(played, death) if name.startswith("run/step-2/")}
    assert left == {*_manifest(played, f"{death}/run/step-2")["files"], MANIFEST}


def test_when_the_first_rank_dies_everything_is_there_but_the_manifest(played: Path) -> None:
    """This is where only the mark tells that the save did not end."""
    puts = _puts(played, DEATHS[1])
    first = [name for name in puts if name.startswith("run/step-2/")]
    until = first.index("run/step-2/fsdp_ckpt.json")
    assert {"run/step-2/optimizer_0/.metadata", "run/step-2/pytorch_model_fsdp_0/.metadata"} <= set(first[: until // 2])


def test_no_temporary_file_is_left(played: Path) -> None:
    """Also what the ranks have left that died: the next job has removed it."""
    left = [name for name in os.listdir(played / "tmp") if name.startswith("fsdp-ckpt-save")]
    assert left == []


def test_credentials_are_nowhere(played: Path) -> None:
    for path in (played / "buckets").rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path
    for path in played.glob("*/*.pt"):
        assert SECRET.encode() not in path.read_bytes(), path
